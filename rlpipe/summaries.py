"""Metrics of an iteration's samples, engines and packs."""

from collections.abc import Sequence
from statistics import fmean, pstdev

from rlpipe.batching import TrainingPacks
from rlpipe.config.root import Config
from rlpipe.flops import load_model_shape, model_flops, tflops_per_gpu
from rlpipe.iteration import TRAINING_PARTS, IterationRecord
from rlpipe.rollouts.source import Batch
from rlpipe.sample import Sample, Status
from rollout.requests import EngineUsage


def rollout_metrics(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """What was generated and how it was graded. `version`: the weights that the engines hold now."""
    scores = [sample.reward.score for sample in samples if sample.reward]
    verdicts = [sample.reward.correct for sample in samples if sample.reward and sample.reward.correct is not None]
    lengths = [sample.response_tokens for sample in samples]
    spans = [span for sample in samples for span in sample.versions]
    metrics = {
        "rollout/samples_count": float(len(samples)),
        "rollout/failed_count": float(sum(sample.status is Status.FAILED for sample in samples)),
        "rollout/reward_mean": fmean(scores),
        "rollout/reward_std": pstdev(scores),
        "rollout/response_tokens_mean": fmean(lengths),
        "rollout/response_tokens_max": float(max(lengths)),
        "rollout/truncated_share": fmean(sample.status is Status.TRUNCATED for sample in samples),
    }
    if verdicts:
        metrics["rollout/accuracy"] = fmean(verdicts)
    if spans:
        tokens = sum(span.tokens for span in spans)
        metrics |= {
            "rollout/weight_version_lag_max": float(version - min(span.version for span in spans)),
            "rollout/weight_version_lag_mean": sum((version - span.version) * span.tokens for span in spans) / tokens,
            "rollout/off_policy_share": sum(span.tokens for span in spans if span.version != version) / tokens,
        }
    return metrics


def generation_metrics(batch: Batch, usage: Sequence[EngineUsage]) -> dict[str, float]:
    """Speed and idle time of generation, in all and of each engine, and what became of the groups."""
    rates = {f"perf/rollout_engine_{one.engine}_tokens_per_second": one.tokens_per_second for one in usage}
    return {
        "perf/rollout_tokens_per_second": batch.tokens / batch.seconds,
        "perf/rollout_idle_share": fmean(1.0 - one.busy_seconds / one.interval_seconds for one in usage),
        **{name: rate for name, rate in rates.items() if rate},
        **batch.metrics,
    }


def training_metrics(record: IterationRecord, config: Config, packs: TrainingPacks) -> dict[str, float]:
    """Tokens and FLOPs per second of training, from real lengths. Call when the phase `train` is divided.

    TFLOPS are model FLOPs (causal half of attention, no recomputation) over the phase and the actor's processes.
    """
    lengths = [int(length) for step in packs.step_lengths_tokens for length in step]
    flops = model_flops(load_model_shape(config.model.path), lengths, include_mtp=config.actor.train_mtp)
    update = record.seconds(*TRAINING_PARTS)
    passes = record.seconds("ref_logprob", "old_logprob")
    processes = config.actor.processes
    metrics = {
        "perf/actor_train_seconds": update,
        "perf/trained_tokens": float(sum(lengths)),
        "perf/trained_tokens_per_second": sum(lengths) / (update + passes),
        "perf/actor_train_tflops_per_gpu": tflops_per_gpu(flops.train, update, processes),
    }
    if config.algorithm.kl.coefficient > 0 and record.seconds("ref_logprob"):
        rate = tflops_per_gpu(flops.logprob, record.seconds("ref_logprob"), processes)
        metrics["perf/ref_logprob_tflops_per_gpu"] = rate
    return metrics
