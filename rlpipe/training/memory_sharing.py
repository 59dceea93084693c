"""The device memory of engines and actor: colocated they share it, separate ones have their own."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from rlpipe.config.root import Config
from rlpipe.training.placement import cluster_gpus

if TYPE_CHECKING:
    from actor.group import ActorGroup
    from rollout.pool import RolloutPool


class MemorySharing(Protocol):
    """Engines generate outside of these calls, and after `onload_actor` only once `during_weight_sync` has ended."""

    def start_actor(self) -> None:
        """Call before the actor is started, on devices where engines start."""

    def attach(self, actor: "ActorGroup") -> None:
        """The actor has started and is resident."""

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

    def take_seconds(self) -> dict[str, float]:
        """Seconds of offloading and onloading in the two blocks since the last call, as the phase `sleep_wake`."""
        raise NotImplementedError


def open_memory_sharing(config: Config, pool: "RolloutPool") -> MemorySharing:
    """As `ray.colocate` and `ray.sleep` say; Ray must be initialised."""
    return Colocated(pool) if config.ray.shares_memory(gpus=cluster_gpus() > 0) else Separate()


class Separate:
    """Engines and actor have memory of their own: nothing ever changes."""

    def start_actor(self) -> None: ...

    def attach(self, actor: "ActorGroup") -> None: ...

    def onload_actor(self) -> None: ...

    @contextmanager
    def during_weight_sync(self) -> Iterator[None]:
        yield

    @contextmanager
    def during_save(self) -> Iterator[None]:
        yield

    def take_seconds(self) -> dict[str, float]:
        return {}


class Colocated:
    """Either side frees its memory while the other works. Only weights are there twice, while they are handed over."""

    def __init__(self, pool: "RolloutPool") -> None:
        self._pool = pool
        self._actor: ActorGroup | None = None
        self._seconds = 0.0

    def start_actor(self) -> None:
        """Engines measure free memory when they start, so the actor must not take any meanwhile."""
        self._pool.wait_until_ready()
        self._pool.sleep(("kv_cache", "weights"))

    def attach(self, actor: "ActorGroup") -> None:
        self._actor = actor

    def onload_actor(self) -> None:
        self._pool.sleep(("kv_cache", "weights"))
        self._started_actor.keep_resident("all")

    @contextmanager
    def during_weight_sync(self) -> Iterator[None]:
        with self._timed():
            self._started_actor.keep_resident("weights")
            self._pool.wake(("weights",))
        yield
        with self._timed():
            self._started_actor.keep_resident("nothing")
            self._pool.wake(("kv_cache",))

    @contextmanager
    def during_save(self) -> Iterator[None]:
        with self._timed():
            self._pool.sleep(("kv_cache",))
            self._started_actor.keep_resident("weights")
        yield
        with self._timed():
            self._started_actor.keep_resident("nothing")
            self._pool.wake(("kv_cache",))

    def take_seconds(self) -> dict[str, float]:
        seconds, self._seconds = self._seconds, 0.0
        return {"sleep_wake": seconds}

    @property
    def _started_actor(self) -> "ActorGroup":
        if self._actor is None:
            raise RuntimeError("the actor was not attached")
        return self._actor

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - start
