"""What the monitor sees and says. Plain data: it travels from workers to the driver."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class JitEvent:
    """One compilation, cache load, tuning run or first use of a communicator.

    kind: `triton`, `triton_autotune`, `dynamo`, `tilelang`, `cute_dsl`, `flashinfer`, `tvm_ffi` or `communicator`.
    name: the kernel, function or group. key: what distinguishes its variants, as far as the compiler tells.
    seconds: of this event alone; events inside it have their own. compiled: machine code was made, not loaded.
    within: kind of the event around it, empty at the top. phase, step: what the worker was doing.
    """

    kind: str
    name: str
    key: str
    seconds: float
    compiled: bool
    within: str
    phase: str
    step: int


@dataclass(frozen=True)
class JitAlarm:
    """Something compiled that should not: `count` times in this step, `total` times since warm-up."""

    kind: str
    name: str
    count: int
    total: int
    seconds: float
    step: int
    recompiling: bool

    def __str__(self) -> str:
        what = f"{self.kind} compiled {self.name} {self.count}x in step {self.step} ({self.seconds:.1f} s)"
        if self.recompiling:
            return (
                f"{what}, {self.total}x since warm-up: its cache key changes with every call; pass lengths as Python "
                "integers, lay packs in buckets, or exclude the argument from specialization"
            )
        return f"{what}, after warm-up: add its shapes to the warm-up, or keep its cache directory between runs"


@dataclass(frozen=True)
class StepStall:
    """A step that takes much longer than its predecessors: the stacks of all threads while it was running."""

    step: int
    elapsed_seconds: float
    median_seconds: float
    stacks: str

    @property
    def headline(self) -> str:
        return (
            f"step {self.step} has been running for {self.elapsed_seconds:.0f} s, the median is "
            f"{self.median_seconds:.0f} s; its stacks are in the logs"
        )

    def __str__(self) -> str:
        return f"{self.headline}:\n{self.stacks}"


@dataclass(frozen=True)
class JitReport:
    """One step of one worker, which is process `rank` of its `role`.

    compiler_seconds: for each compiler process seen among the worker's children, the seconds it was seen; these
        overlap the events and are not part of `seconds`.
    grown_caches: of a slow step, the compilers whose cache directory got new entries during it; in a shared directory
        another process may have made them.
    """

    step: int
    rank: int
    events: tuple[JitEvent, ...]
    alarms: tuple[JitAlarm, ...] = ()
    stalls: tuple[StepStall, ...] = ()
    compiler_seconds: dict[str, float] = field(default_factory=dict)
    grown_caches: tuple[str, ...] = ()
    role: str = "actor"

    @property
    def worker(self) -> str:
        return f"{self.role}-{self.rank}"

    @property
    def seconds(self) -> float:
        return sum(event.seconds for event in self.events)

    @property
    def compiles(self) -> int:
        return sum(event.compiled for event in self.events)

    @property
    def seconds_by_phase(self) -> dict[str, float]:
        sums: dict[str, float] = {}
        for event in self.events:
            sums[event.phase] = sums.get(event.phase, 0.0) + event.seconds
        return sums
