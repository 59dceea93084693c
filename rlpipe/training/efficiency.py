"""Tokens, FLOPs and their shares of the device's peak, for one iteration's training, from real lengths."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from actor.train_report import RankUsage
from rlpipe.batching import TrainingPacks
from rlpipe.config.root import Config
from rlpipe.flops import (
    KernelWork,
    ModelShape,
    Recompute,
    hardware_flops,
    model_flops,
    tflops_per_gpu,
    utilization,
)
from rlpipe.flops.peaks import peak_bf16_tflops
from rlpipe.flops.trained import UntrainedWork
from rlpipe.jit_monitor.jit_metrics import slowest_seconds
from rlpipe.model.model_reader import trainable_model
from rlpipe.shared.phases import TRAINING_PARTS
from rlpipe.training.iteration import IterationRecord
from rlpipe.training.trained_share import untrained_work

_CALL_PHASES = ("train", "forward", "backward", "optimizer")
_TRAIN_PHASES = ("ref_logprob", "old_logprob", "advantage", "pack", *TRAINING_PARTS)
_CHUNK_TOKENS = 64  # of FLA's and FlashQLA's delta rule


@dataclass(frozen=True)
class PolicyWork:
    """What training the policy costs: its shape, and what is left of training all of it."""

    shape: ModelShape
    untrained: UntrainedWork


def policy_work(config: Config) -> PolicyWork:
    return PolicyWork(trainable_model(config.model.path).shape, untrained_work(config))


def training_metrics(
    record: IterationRecord,
    config: Config,
    packs: TrainingPacks,
    usages: Sequence[RankUsage],
    work: PolicyWork,
) -> dict[str, float]:
    """Speed of training. Call when the phase `train` is divided.

    Model FLOPs count causal attention half and no recomputation, as both Megatrons do; they are divided by the training
    call and the actor's processes, never by rollout devices. MFU and HFU are there where the peak is known.
    """
    lengths = [int(length) for step in packs.step_lengths_tokens for length in step]
    flops = model_flops(work.shape, lengths, include_mtp=config.actor.train_mtp)
    trained = flops.train - work.untrained.flops(lengths)
    tokens, processes, seconds = sum(lengths), config.actor.processes, record.seconds(*TRAINING_PARTS)
    metrics = {
        "perf/trained_tokens": float(tokens),
        "perf/actor_train_seconds": seconds,
        "perf/train_seconds": record.seconds(*_TRAIN_PHASES),
        "perf/actor_tokens_per_second": tokens / seconds,
        "perf/actor_tokens_per_gpu_per_second": tokens / seconds / processes,
        "perf/actor_train_tflops_per_gpu": tflops_per_gpu(trained, seconds, processes),
    }
    metrics["perf/optimizer_exposed_share"] = record.seconds("optimizer") / seconds
    passes = record.seconds("ref_logprob")
    if config.algorithm.kl.coefficient > 0 and passes:
        metrics["perf/ref_logprob_tflops_per_gpu"] = tflops_per_gpu(flops.logprob, passes, processes)
    device = usages[0].device_name
    peak = peak_bf16_tflops(device, config.actor.peak_tflops) if device or config.actor.peak_tflops else None
    if peak is None:
        return metrics
    kernels = KernelWork(
        flash_attention=bool(device),
        delta_rule_chunk_tokens=_CHUNK_TOKENS if usages[0].gdn_backend in ("fla", "flashqla") else None,
        head_recompute=True,
    )
    executed = executed_flops(work, config, packs, kernels)
    without_jit = max(1e-9, seconds - slowest_seconds([usage.jit for usage in usages], _CALL_PHASES))
    rates = {
        "perf/actor_train_mfu": utilization(trained, seconds, processes, peak),
        "perf/actor_train_mfu_excluding_jit": utilization(trained, without_jit, processes, peak),
        "perf/actor_train_hfu": utilization(executed, seconds, processes, peak),
    }
    return metrics | {name: rate for name, rate in rates.items() if rate is not None}


def rollout_rate_per_gpu(record: IterationRecord, config: Config) -> dict[str, float]:
    """The rate of the rollout phase over the devices of all engines; {} where nothing was rolled out."""
    rate = record.metrics.get("perf/rollout_tokens_per_second")
    devices = config.rollout.engines * config.rollout.engine.tensor_parallel
    return {} if rate is None else {"perf/rollout_tokens_per_gpu_per_second": rate / devices}


def executed_flops(work: PolicyWork, config: Config, packs: TrainingPacks, kernels: KernelWork) -> int:
    """What the devices executed: padding and dummy packs, recomputation, and what kernels compute twice."""
    recompute = config.actor.recompute
    lengths = [
        int(length)
        for rank in packs.ranks
        for step in rank
        for pack in step
        for length in np.diff(pack.cu_seqlens_padded)
    ]
    flops = hardware_flops(
        work.shape,
        lengths,
        Recompute(recompute.chosen, frozenset(recompute.modules)),
        kernels,
        include_mtp=config.actor.train_mtp,
    )
    # Layers that are computed again are passed by gradients whatever is trained.
    return flops - work.untrained.flops(lengths, idle=recompute.chosen != "full")
