"""Metrics of an iteration's samples, engines and packs."""

from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from rlpipe.batching import TrainingPacks
from rlpipe.config.root import Config
from rlpipe.flops import load_model_shape, model_flops, tflops_per_gpu
from rlpipe.iteration import IterationRecord
from rlpipe.sample import Sample, Status
from rollout.requests import EngineUsage

if TYPE_CHECKING:
    from actor.report import TrainReport


def rollout_metrics(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """What was generated and how it was graded. `version`: the weights that the engines hold now."""
    scores = [sample.reward.score for sample in samples if sample.reward]
    verdicts = [sample.reward.correct for sample in samples if sample.reward and sample.reward.correct is not None]
    lengths = [sample.response_tokens for sample in samples]
    sampled = [sample.oldest_version for sample in samples if sample.versions]
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
    if sampled:
        metrics["rollout/weight_version_lag_max"] = float(version - min(sampled))
    return metrics


def generation_metrics(
    record: IterationRecord, samples: Sequence[Sample], usage: Sequence[EngineUsage]
) -> dict[str, float]:
    """Tokens per second of generation, in all and of each engine. Call when the phase `rollout` is over."""
    generated = sum(sample.response_tokens for sample in samples)
    metrics = {"perf/rollout_tokens_per_second": generated / record.seconds("rollout")}
    for engine in usage:
        if engine.busy_seconds > 0:
            name = f"perf/rollout_engine_{engine.engine}_tokens_per_second"
            metrics[name] = engine.response_tokens / engine.busy_seconds
    return metrics


def training_metrics(record: IterationRecord, config: Config, packs: TrainingPacks) -> dict[str, float]:
    """Tokens and FLOPs per second of training, from real lengths. Call when the phase `train` is over.

    TFLOPS are model FLOPs (causal half of attention, no recomputation) over the phase and the actor's processes.
    """
    lengths = [int(length) for step in packs.step_lengths_tokens for length in step]
    flops = model_flops(load_model_shape(config.model.path), lengths, include_mtp=config.actor.train_mtp)
    update = record.seconds("forward_backward", "optimizer", "train_other")
    passes = record.seconds("ref_logprob", "old_logprob")
    processes = config.actor.processes
    metrics = {
        "perf/trained_tokens": float(sum(lengths)),
        "perf/trained_tokens_per_second": sum(lengths) / (update + passes),
        "perf/actor_train_tflops_per_gpu": tflops_per_gpu(flops.train, update, processes),
    }
    if config.algorithm.kl.coefficient > 0 and record.seconds("ref_logprob"):
        rate = tflops_per_gpu(flops.logprob, record.seconds("ref_logprob"), processes)
        metrics["perf/ref_logprob_tflops_per_gpu"] = rate
    return metrics


def training_seconds(report: "TrainReport") -> dict[str, float]:
    """Phases inside the training call: the mean over ranks, so that they add up with what is left of the call."""
    return {
        "forward_backward": report.forward_backward_seconds.mean,
        "optimizer": report.optimizer_seconds.mean,
    }
