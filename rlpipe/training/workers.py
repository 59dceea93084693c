"""Starting what a run works with, Ray, engines and actor, as much as possible at the same time."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from actor.group import ActorGroup
from rlpipe.config.algorithm import AlgorithmConfig
from rlpipe.config.root import Config
from rlpipe.estimate.memory import host_state_bytes
from rlpipe.monitoring.console import Console
from rlpipe.monitoring.json_lines import append_json_line
from rlpipe.shared.interrupts import CleanupStack
from rlpipe.training.adapter_updates import engine_room, merged_note
from rlpipe.training.memory_sharing import MemorySharing, open_memory_sharing
from rlpipe.training.placement import Placement, placements
from rlpipe.training.ray_cluster import ray_cluster
from rlpipe.training.trained_share import planned_model
from rlpipe.training.warm_up import warm_up_actor
from rollout.pool import RolloutPool
from rollout.requests import EngineHealth


class StartClock:
    """Seconds from the command to the first iteration, part by part, as the metrics `start/*_seconds`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begin = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._beside: dict[str, float] = {}
        self._facts: dict[str, float] = {}

    @contextmanager
    def task(self, part: str, text: str) -> Iterator[None]:
        """A part of the start that the driver waits for; `text` is its line on the console."""
        begin = time.perf_counter()
        with self._console.task(text):
            yield
        self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - begin

    def add(self, parts: Mapping[str, float]) -> None:
        """Parts that workers spent beside each other and the driver."""
        self._beside.update(parts)

    def tell(self, metric: str, value: float) -> None:
        """What the start led to, as a metric beside the seconds."""
        self._facts[metric] = value

    def metrics(self) -> dict[str, float]:
        """Up to now; the seconds are said on the console, too."""
        seconds = {**self._seconds, **self._beside, "total": time.perf_counter() - self._begin}
        waited = ", ".join(f"{part} {spent:.1f}" for part, spent in self._seconds.items())
        beside = ", ".join(f"{part} {spent:.1f}" for part, spent in self._beside.items())
        self._console.say(f"started in {seconds['total']:.1f} s: {waited}; beside each other: {beside}")
        return {f"start/{part}_seconds": spent for part, spent in seconds.items()} | self._facts


@dataclass(frozen=True)
class Workers:
    """The actor, ready to work and with kernels warm, and engines, which may still be starting."""

    pool: RolloutPool
    actor: ActorGroup
    memory_sharing: MemorySharing

    def wait_for_engines(self, console: Console, clock: StartClock) -> None:
        """Until they are ready and warm."""
        with clock.task("engines", "waiting for the engines"):
            engines = self.pool.wait_until_ready()
        for note in dict.fromkeys(note for engine in engines for note in engine.notes):
            console.say(note)
        clock.tell("start/kv_pool_tokens", float(min(engine.kv_cache_tokens for engine in engines)))
        clock.add(_slowest_parts(engines))
        clock.add({f"actor_{part}": spent for part, spent in self.actor.start_seconds.items()})


@dataclass(frozen=True)
class Bundles:
    """What is reserved for actor and engines."""

    actor: Placement
    engines: Placement


@contextmanager
def open_cluster(
    config: Config, clock: StartClock, last_words: Callable[[], Iterable[str]] = tuple
) -> Iterator[Bundles]:
    """Ray with everything reserved. last_words: see `ray_cluster`."""
    with CleanupStack() as stack:
        with clock.task("ray", "starting Ray"):
            stack.enter_context(ray_cluster(config, last_words))
            actor, engines = stack.enter_context(placements(config))
        yield Bundles(actor, engines)


@contextmanager
def open_workers(
    config: Config,
    algorithm: AlgorithmConfig,
    bundles: Bundles,
    log_directory: str,
    console: Console,
    clock: StartClock,
) -> Iterator[Workers]:
    """The actor's processes start and import while engines load and warm up. On devices that both share, they take
    memory after that, or, where engines leave room, build the model beside them."""
    with CleanupStack() as stack:
        for note in merged_note(config):
            console.say(note)
        faults = Path(log_directory) / "faults.jsonl"
        pool = RolloutPool.start(
            config,
            config.model.path,
            bundles.engines,
            log_directory,
            say=console.say,
            on_fault=lambda fault: append_json_line(faults, asdict(fault)),
            adapter=engine_room(config),
            with_text=config.rollout.generate.function != "agent",  # which reads what its endpoint makes of tokens
        )
        stack.callback(pool.stop)
        states = host_state_bytes(config, planned_model(config))
        actor = ActorGroup.launch(config, bundles.actor, log_directory, states)
        stack.callback(actor.stop)
        with clock.task("engines", "starting engines"):
            memory_sharing = open_memory_sharing(config, pool, actor)
            if not memory_sharing.beside:
                memory_sharing.give_device_to_actor()
        for note in memory_sharing.notes:
            console.say(note)
        with clock.task("actor", "starting the actor"):
            actor.join()
        if memory_sharing.beside:
            with clock.task("engines", "waiting for the engines"):
                memory_sharing.give_device_to_actor()
        for note in actor.notes:
            console.say(note)
        with clock.task("warm_up", "warming up kernels"):
            warm_up_actor(config, actor, algorithm)
        yield Workers(pool, actor, memory_sharing)


def _slowest_parts(engines: tuple[EngineHealth, ...]) -> dict[str, float]:
    """Parts of the start of the engine that took longest."""
    slowest = max(engines, key=lambda engine: sum(engine.start_seconds.values()))
    return {f"engine_{part}": spent for part, spent in slowest.start_seconds.items()}
