"""What the training side tells about an iteration when it is over: its time, rank by rank, and what that amounts to."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from actor.report import RankUsage, Spread
from rlpipe.batching import TrainingPacks
from rlpipe.config.root import Config
from rlpipe.iteration import IterationRecord
from rlpipe.run_directory import RunDirectory, append_json_line, drop_rows_from
from rlpipe.summaries import training_metrics

if TYPE_CHECKING:
    from actor.group import ActorGroup

_COMPUTE = ("forward", "backward", "optimizer", "ref_logprob", "old_logprob")
# Name in the metrics, and in a rank's report where exchanges have the name of the call that they are part of.
_PARTS = {**{part: part for part in _COMPUTE}, "exchange": "train_exchange"}


class Measurement:
    """Asks all actor processes once an iteration. What they did before the first iteration belongs to none."""

    def __init__(self, config: Config, actor: "ActorGroup", directory: RunDirectory) -> None:
        self._config = config
        self._actor = actor
        self._directory = directory
        self._actor.take_usage()
        self._first = True

    def finish(self, record: IterationRecord, packs: TrainingPacks) -> None:
        """Add the training side's metrics to `record`; call after the last phase in which the actor works."""
        usages = self._actor.take_usage()
        record.split("train", training_parts(usages), rest="train_other")
        record.add(rank_metrics(usages))
        record.add(training_metrics(record, self._config, packs))
        self._write_ranks(record.number, usages)

    def _write_ranks(self, iteration: int, usages: Sequence[RankUsage]) -> None:
        if self._first:
            drop_rows_from(self._directory.ranks, iteration)
            self._first = False
        for usage in usages:
            seconds = {part: round(value, 6) for part, value in sorted(usage.part_seconds.items())}
            row = {"iteration": iteration, "name": usage.name, "host": usage.host, "seconds": seconds}
            append_json_line(self._directory.ranks, row)


def training_parts(usages: Sequence[RankUsage]) -> dict[str, float]:
    """Parts of the training call: the mean over ranks, so that they add up with what is left of the call."""
    return {
        part: Spread.of(_seconds(usages, (_PARTS[part],))).mean
        for part in ("forward", "backward", "optimizer", "exchange")
    }


def rank_metrics(usages: Sequence[RankUsage]) -> dict[str, float]:
    """Least, mean and most seconds of each part over the ranks, and the rank that computes longest.

    Ranks wait for each other in exchanges, so a training call takes all of them equally long: the slow one is the one
    that computes while the others wait.
    """
    compute = Spread.of(_seconds(usages, _COMPUTE))
    spreads = {name: Spread.of(_seconds(usages, (part,))) for name, part in _PARTS.items()} | {"compute": compute}
    metrics = {"ranks/slowest": float(usages[compute.largest_rank].rank)}
    for name, spread in spreads.items():
        if spread.maximum > 0:
            metrics[f"ranks/{name}_min_seconds"] = spread.minimum
            metrics[f"ranks/{name}_mean_seconds"] = spread.mean
            metrics[f"ranks/{name}_max_seconds"] = spread.maximum
    return metrics


def _seconds(usages: Sequence[RankUsage], parts: Sequence[str]) -> list[float]:
    """Of each rank, the given parts together."""
    return [sum(usage.part_seconds.get(part, 0.0) for part in parts) for usage in usages]
