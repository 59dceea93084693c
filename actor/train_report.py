"""What the training side tells the driver. Pure data: imports no torch."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from rlpipe.jit_monitor import JitReport
from rlpipe.shared.phases import Span

Resident = Literal["nothing", "weights", "all"]
"""What the actor has in device memory; `all` is weights and gradients."""


@dataclass(frozen=True)
class Spread:
    """One quantity over all ranks."""

    minimum: float
    mean: float
    maximum: float
    largest_rank: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        largest = max(range(len(values)), key=lambda rank: values[rank])
        return cls(min(values), sum(values) / len(values), values[largest], largest)


@dataclass(frozen=True)
class StepReport:
    """One optimizer step.

    `metrics` has names of rlpipe.monitoring.metric_dictionary, reduced over all ranks: sums and counts are added
    before dividing, so that they do not depend on how the batch was split. `skip_reason` is None for an applied step;
    `culprit_sample_ids` are the samples of the packs in which something non-finite first appeared.
    """

    applied: bool
    metrics: dict[str, float]
    skip_reason: str | None = None
    culprit_sample_ids: tuple[str, ...] = ()

    def without(self, names: Collection[str]) -> "StepReport":
        """The same without the metrics `names`."""
        return replace(self, metrics={name: value for name, value in self.metrics.items() if name not in names})


@dataclass(frozen=True)
class UpdateCounts:
    """Optimizer steps since the run started, resumed parts included."""

    attempted: int = 0
    applied: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0

    def after(self, applied: bool) -> "UpdateCounts":
        return UpdateCounts(
            attempted=self.attempted + 1,
            applied=self.applied + applied,
            skipped=self.skipped + (not applied),
            skipped_in_a_row=0 if applied else self.skipped_in_a_row + 1,
        )


@dataclass(frozen=True)
class RankTrainReport:
    """The answer of one process to `train`. `steps` is empty except on the reporting ranks of the layout."""

    steps: tuple[StepReport, ...]
    counts: UpdateCounts


@dataclass(frozen=True)
class RankUsage:
    """What one process did since it was last asked.

    part_seconds: `forward`, `backward`, `optimizer`, `train` (the rest of a training call), `ref_logprob`,
        `old_logprob`, `weight_sync`, `checkpoint`, each without its exchanges between processes, and those as
        `train_exchange`, `ref_logprob_exchange` and so on. They do not overlap.
    spans: the same stretch by stretch, where a trace is wanted. device_name: empty for a CPU. gdn_backend: what Gated
        DeltaNet layers run on, empty without such layers. jit: what compiled.
    metrics: of this rank alone, to be reduced over ranks as the metric dictionary says.
    """

    rank: int
    host: str
    device_name: str
    gdn_backend: str
    part_seconds: dict[str, float]
    spans: tuple[Span, ...]
    jit: JitReport
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"actor-{self.rank}"


@dataclass(frozen=True)
class TrainReport:
    """One call of `ActorGroup.train`."""

    steps: tuple[StepReport, ...]
    updates_attempted: int
    updates_applied: int
    updates_skipped: int

    @property
    def metrics(self) -> dict[str, float]:
        """Mean over the applied steps (over all, if none was), the largest of `_max` metrics, and the counters."""
        steps = [step for step in self.steps if step.applied] or list(self.steps)
        names = dict.fromkeys(name for step in steps for name in step.metrics)
        merged = {name: _merge(name, [step.metrics[name] for step in steps if name in step.metrics]) for name in names}
        return merged | {
            "train/updates_attempted_count": float(self.updates_attempted),
            "train/updates_applied_count": float(self.updates_applied),
            "train/updates_skipped_count": float(self.updates_skipped),
        }


@dataclass(frozen=True)
class WeightSendReport:
    """One weight update as a sender saw it.

    size_bytes: what it handed over itself. checksums: one per bucket of the plan, empty for those of other senders, and
        unless asked for. failure: why the update did not reach the engines; empty where it did.
    """

    size_bytes: int
    seconds: float
    checksums: tuple[str, ...]
    failure: str = ""


def _merge(name: str, values: list[float]) -> float:
    return max(values) if name.endswith("_max") else sum(values) / len(values)
