"""What the workers tell about an iteration when it is over: time rank by rank, compilations, utilization."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from actor.train_report import RankUsage, Spread
from rlpipe.batching import TrainingPacks
from rlpipe.config.root import Config
from rlpipe.jit_monitor import JitReport, jit_metrics, refuse_alarms
from rlpipe.monitoring.console import Console
from rlpipe.monitoring.json_lines import append_json_line, drop_rows_from
from rlpipe.monitoring.metric_dictionary import reduce_over_ranks
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.training.draft_costs import DraftCosts
from rlpipe.training.efficiency import policy_work, rollout_rate_per_gpu, training_metrics
from rlpipe.training.iteration import IterationRecord
from rlpipe.training.reward_watch import RewardWatch
from rlpipe.training.summaries import draft_warnings
from rlpipe.training.trace import write_trace

if TYPE_CHECKING:
    from actor.group import ActorGroup
    from rollout.pool import RolloutPool
    from rollout.requests import EngineRecord

_COMPUTE = ("forward", "backward", "optimizer", "ref_logprob", "old_logprob")
# Name in the metrics, and in a rank's report where exchanges have the name of the call that they are part of.
_PARTS = {**{part: part for part in _COMPUTE}, "exchange": "train_exchange"}
_MOST_WARNINGS = 5


class Measurement:
    """Asks all workers once an iteration. What they did before the first one belongs to their start-up."""

    def __init__(
        self,
        config: Config,
        actor: "ActorGroup",
        directory: RunDirectory,
        console: Console,
        first_iteration: int,
        pool: "RolloutPool | None" = None,
    ) -> None:
        self._config = config
        self._actor = actor
        self._pool = pool
        self._directory = directory
        self._console = console
        self._work = policy_work(config)
        self._draft_costs = DraftCosts.of(config)
        self._reward_watch = RewardWatch(config)
        for path in (directory.ranks, directory.jit_events):
            for note in drop_rows_from(path, first_iteration):
                console.say(note)
        usages, engines = self._take(first_iteration - 1)
        self._write_events(first_iteration - 1, [*(one.jit for one in usages), *(one.jit for one in engines)])

    def finish(self, record: IterationRecord, packs: TrainingPacks) -> None:
        """Add what the workers measured to `record`; call after the last phase in which they work.

        Raises JitError for a compilation after warm-up where `jit.after_warmup` says so.
        """
        usages, engines = self._take(record.number)
        record.split("train", training_parts(usages), rest="train_other")
        record.add(rank_metrics(usages))
        record.add(reduce_over_ranks([usage.metrics for usage in usages]))
        record.add(reduce_over_ranks([engine.metrics for engine in engines]))
        record.add(training_metrics(record, self._config, packs, usages, self._work))
        record.add(rollout_rate_per_gpu(record, self._config))
        record.add(self._draft_costs.metrics(record.metrics) if self._draft_costs else {})
        self._write_ranks(record.number, usages)
        if record.number in self._config.trace.iterations:
            workers = {f"engine-{one.engine} ({one.host})": one for one in engines}
            spans = {name: one.spans for name, one in workers.items()}
            spans |= {f"{one.name} ({one.host})": one.spans for one in usages}
            counters = {name: one.counters for name, one in workers.items()}
            write_trace(self._directory.trace(record.number), {"driver": record.spans} | spans, counters)
        self._judge(record, [*(one.jit for one in usages), *(one.jit for one in engines)])

    def _take(self, iteration: int) -> tuple[Sequence[RankUsage], Sequence["EngineRecord"]]:
        """What all workers did in `iteration`; they are told whether a trace of the next one is wanted."""
        keep_spans = iteration + 1 in self._config.trace.iterations
        usages = self._actor.begin_take_usage(iteration + 1, keep_spans)  # actor and engines answer at the same time
        records = self._pool.take_records(iteration, keep_spans) if self._pool else ()
        return usages.result(), records

    def _judge(self, record: IterationRecord, reports: Sequence[JitReport]) -> None:
        record.add(jit_metrics(reports))
        self._write_events(record.number, reports)
        warnings = self._reward_watch.warnings(record.number, record.metrics)
        warnings += [f"{report.worker}: {alarm}" for report in reports for alarm in report.alarms]
        warnings += [f"{report.worker}: {stall.headline}" for report in reports for stall in report.stalls]
        warnings += draft_warnings(record.metrics)
        for warning in warnings[:_MOST_WARNINGS]:
            self._console.say(f"warning: {warning}")
        if len(warnings) > _MOST_WARNINGS:
            rest = len(warnings) - _MOST_WARNINGS
            self._console.say(f"warning: {rest} more in iteration {record.number}, see {self._directory.jit_events}")
        if self._config.jit.after_warmup == "error":
            refuse_alarms(reports)

    def _write_ranks(self, iteration: int, usages: Sequence[RankUsage]) -> None:
        for usage in usages:
            seconds = {part: round(value, 6) for part, value in sorted(usage.part_seconds.items())}
            row = {"iteration": iteration, "name": usage.name, "host": usage.host, "seconds": seconds}
            append_json_line(self._directory.ranks, row)

    def _write_events(self, iteration: int, reports: Sequence[JitReport]) -> None:
        """One line for each event; compilers without a hook, as far as they were seen, on a line of their own."""
        path = self._directory.jit_events
        path.parent.mkdir(parents=True, exist_ok=True)
        for report in reports:
            where = {"iteration": iteration, "worker": report.worker, "rank": report.rank}
            for event in report.events:
                append_json_line(path, where | asdict(event) | {"cache_hit": not event.compiled})
            if report.compiler_seconds or report.grown_caches:
                seen = {"compiler_seconds": report.compiler_seconds, "grown_caches": report.grown_caches}
                append_json_line(path, where | {"kind": "compiler process"} | seen)


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
