"""Who has the device memory that engines and actor share: they take turns, or there is room for both at all times."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from rlpipe.config.root import Config
from rlpipe.placement import cluster_gpus

if TYPE_CHECKING:
    from actor.group import ActorGroup
    from rollout.pool import RolloutPool


class Turns(Protocol):
    """Engines generate outside of these calls, and after `to_actor` not before the next `sending_weights` has ended."""

    def start_actor(self) -> None:
        """Call before the actor is started, on devices where engines start."""

    def attach(self, actor: "ActorGroup") -> None:
        """The actor has started, and has its memory."""

    def to_actor(self) -> None:
        """From now on the actor works."""

    @contextmanager
    def sending_weights(self) -> Iterator[None]:
        """Within the block weights go from actor to engines; after it engines can generate."""
        raise NotImplementedError

    @contextmanager
    def reading_weights(self) -> Iterator[None]:
        """Within the block, on the engines' turn, the actor's weights can be read: saved, for instance."""
        raise NotImplementedError

    def take_seconds(self) -> dict[str, float]:
        """Seconds that the two blocks took to change turns since the last call, as the phase `sleep_wake`."""
        raise NotImplementedError


def open_turns(config: Config, pool: "RolloutPool") -> Turns:
    """As `ray.colocate` and `ray.sleep` say; Ray must be initialised."""
    return Alternating(pool) if config.ray.takes_turns(gpus=cluster_gpus() > 0) else SideBySide()


class SideBySide:
    """Engines and actor have memory of their own: nothing ever changes."""

    def start_actor(self) -> None: ...

    def attach(self, actor: "ActorGroup") -> None: ...

    def to_actor(self) -> None: ...

    @contextmanager
    def sending_weights(self) -> Iterator[None]:
        yield

    @contextmanager
    def reading_weights(self) -> Iterator[None]:
        yield

    def take_seconds(self) -> dict[str, float]:
        return {}


class Alternating:
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

    def to_actor(self) -> None:
        self._pool.sleep(("kv_cache", "weights"))
        self._there.hold("all")

    @contextmanager
    def sending_weights(self) -> Iterator[None]:
        with self._timed():
            self._there.hold("weights")
            self._pool.wake(("weights",))
        yield
        with self._timed():
            self._there.hold("nothing")
            self._pool.wake(("kv_cache",))

    @contextmanager
    def reading_weights(self) -> Iterator[None]:
        with self._timed():
            self._pool.sleep(("kv_cache",))
            self._there.hold("weights")
        yield
        with self._timed():
            self._there.hold("nothing")
            self._pool.wake(("kv_cache",))

    def take_seconds(self) -> dict[str, float]:
        seconds, self._seconds = self._seconds, 0.0
        return {"sleep_wake": seconds}

    @property
    def _there(self) -> "ActorGroup":
        if self._actor is None:
            raise RuntimeError("the actor was not attached")
        return self._actor

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - start
