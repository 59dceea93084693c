"""The device memory of engines and actor: colocated they share it, separate ones have their own."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from rlpipe.config.root import Config
from rlpipe.estimate.memory import USED_SHARE_OF_SPARE, build_bytes
from rlpipe.training.placement import cluster_gpus
from rlpipe.training.trained_share import planned_model

if TYPE_CHECKING:
    from actor.group import ActorGroup
    from actor.train_report import Resident
    from rollout.pool import RolloutPool


class MemorySharing(Protocol):
    """Engines generate outside of these calls, and after `onload_actor` only once `during_weight_sync` has ended."""

    notes: tuple[str, ...]
    """Sentences for the user."""

    beside: bool
    """Whether the actor joins while engines start on the same devices: before `give_device_to_actor`, not after it."""

    def give_device_to_actor(self) -> None:
        """Call before the actor's first pass, and once only. Waits for engines on the same devices."""

    def onload_actor(self) -> None:
        """Offload the engines and bring the actor's weights and gradients back: it works from now on."""

    @contextmanager
    def during_weight_sync(self) -> Iterator[None]:
        """Within the block weights go from actor to engines; after it engines can generate."""
        raise NotImplementedError

    @contextmanager
    def during_save(self) -> Iterator[None]:
        """Within the block the actor's weights are resident and can be saved; the engines keep their weights."""
        raise NotImplementedError

    @contextmanager
    def during_catch_up(self) -> Iterator[None]:
        """Within the block weights go from actor to engines that were restarted, while the others hold them already."""
        raise NotImplementedError

    def take_seconds(self) -> dict[str, float]:
        """Seconds of offloading and onloading in these blocks since the last call, as the phase `sleep_wake`."""
        raise NotImplementedError

    def take_metrics(self) -> dict[str, float]:
        """Seconds of each step, `onload_actor` included, since the last call, as `sleep_wake/*_seconds`."""
        raise NotImplementedError


def open_memory_sharing(config: Config, pool: "RolloutPool", actor: "ActorGroup") -> MemorySharing:
    """As `ray.colocate` and `ray.sleep` say; Ray must be initialised. The actor need not have joined yet."""
    if not config.ray.shares_memory(gpus=cluster_gpus() > 0):
        return Separate()
    if config.ray.start == "after":
        return Colocated(pool, actor)
    return _built_beside(pool, actor, build_bytes(config, planned_model(config)))


def _built_beside(pool: "RolloutPool", actor: "ActorGroup", wanted_bytes: int) -> "Colocated":
    """Where engines leave room for it: their pools have sizes of their own then, whatever they find free."""
    room = pool.room_beside_bytes()
    fits = wanted_bytes <= room
    there = "" if math.isinf(room) else f": it takes up to {wanted_bytes / 1e9:.1f} GB, and they leave {room / 1e9:.1f}"
    note = f"the actor is built {'beside' if fits else 'after'} the engines{there}"
    return Colocated(pool, actor, beside=fits, notes=(note,))


class Separate:
    """Engines and actor have memory of their own: nothing ever changes."""

    notes: tuple[str, ...] = ()

    beside = False

    def give_device_to_actor(self) -> None: ...

    def onload_actor(self) -> None: ...

    @contextmanager
    def during_weight_sync(self) -> Iterator[None]:
        yield

    @contextmanager
    def during_save(self) -> Iterator[None]:
        yield

    @contextmanager
    def during_catch_up(self) -> Iterator[None]:
        yield

    def take_seconds(self) -> dict[str, float]:
        return {}

    def take_metrics(self) -> dict[str, float]:
        return {}


class Colocated:
    """Either side frees its memory while the other works. Only weights are there twice, while they are handed over; and
    the actor's stay where they are while engines generate, where what the engines leave free is room enough.

    A lost engine is restarted only while the actor leaves the device to engines, which measure free memory then. It is
    built beside engines only where they start alike with it on the device.
    """

    def __init__(
        self, pool: "RolloutPool", actor: "ActorGroup", beside: bool = False, notes: tuple[str, ...] = ()
    ) -> None:
        self._pool = pool
        self._actor = actor
        self.beside = beside
        self.notes = notes
        self._spare_bytes = 0
        self._beside_engines: Resident | None = None
        self._seconds = 0.0
        self._steps: dict[str, float] = {}

    def give_device_to_actor(self) -> None:
        self._pool.wait_until_ready()
        # After their warm-up, engines hold as much as they ever will.
        self._spare_bytes = self._actor.free_device_bytes()
        self._pool.pause_restarts()
        self._pool.sleep(("kv_cache", "weights"))

    def onload_actor(self) -> None:
        with self._step("engines_sleep"):
            self._pool.pause_restarts()
            self._steps["engines_idle"] = self._pool.sleep(("kv_cache", "weights"))
        with self._step("actor_onload"):
            self._actor.keep_resident("all")

    @contextmanager
    def during_weight_sync(self) -> Iterator[None]:
        with self._timed():
            with self._step("actor_offload"):
                self._actor.keep_resident("weights")
            with self._step("engines_wake"):
                self._pool.wake(("weights",))
        yield
        with self._timed():
            self._leave_device_to_engines()

    @contextmanager
    def during_save(self) -> Iterator[None]:
        with self._timed():
            self._pool.pause_restarts()
            self._pool.sleep(("kv_cache",))
            self._actor.keep_resident("weights")
        yield
        with self._timed():
            self._leave_device_to_engines()

    @contextmanager
    def during_catch_up(self) -> Iterator[None]:
        self._pool.pause_requests()
        with self.during_save():
            yield
        self._pool.resume_requests()

    def take_seconds(self) -> dict[str, float]:
        seconds, self._seconds = self._seconds, 0.0
        return {"sleep_wake": seconds}

    def take_metrics(self) -> dict[str, float]:
        steps, self._steps = self._steps, {}
        return {f"sleep_wake/{step}_seconds": seconds for step, seconds in steps.items()}

    @property
    def _kept(self) -> "Resident":
        """What of the actor stays on the device while engines generate. Asked for first when it holds its weights and
        nothing else."""
        if self._beside_engines is None:
            fits = self._actor.resident_bytes() <= self._limit_bytes
            self._beside_engines = "weights" if fits else "nothing"
            self._actor.share_with_engines(self._limit_bytes)
        return self._beside_engines

    @property
    def _limit_bytes(self) -> int:
        return int(USED_SHARE_OF_SPARE * self._spare_bytes)

    def _leave_device_to_engines(self) -> None:
        kept = self._kept
        with self._step("actor_offload"):
            self._actor.keep_resident(kept, self._limit_bytes)
        with self._step("engines_wake"):
            self._pool.resume_restarts()
            self._pool.wake(("kv_cache",))

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._steps[name] = self._steps.get(name, 0.0) + time.perf_counter() - start

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - start
