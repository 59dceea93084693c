"""Seconds of each phase of an iteration, from FLOPs, bytes and bandwidths; upper bounds: all responses at the limit."""

from collections.abc import Mapping
from dataclasses import dataclass

from rlpipe.config.cluster import ClusterConfig
from rlpipe.config.root import Config
from rlpipe.estimate.memory import Memory, Model
from rlpipe.flops.breakdown import model_flops
from rlpipe.flops.convention import Convention
from rlpipe.flops.hardware import KernelWork, Recompute, hardware_flops
from rlpipe.flops.layers import MixtureOfExperts
from rlpipe.flops.peaks import peak_bf16_tflops

# In packs of 16,384 tokens and more the actor's layers reach 342 to 362 of 989 TFLOP/s on one H200
# (benchmarks/actor_layers.py in docs/performance.md).
_LAYER_UTILIZATION = 0.34
_EXCHANGE_SHARE = 0.5  # of that, where ranks exchange activations: an assumption, no run over several GPUs was measured
_MEMORY_UTILIZATION = 0.55  # of decoding on one H200: 22,600 tokens/s where memory alone would allow 40,000
_CPU_TFLOPS = 0.05
_CPU_BYTES_PER_SECOND = 1e10  # of one core, for what is bound by memory
_NODE_BYTES_PER_SECOND = 3e11
_ADAM_BYTES = 34  # read and written for each parameter: gradient, master, moments, bf16 copy
_GLOO_BYTES_PER_SECOND = 2e9
_SHARED_BYTES_PER_SECOND = 4.2e11  # through buffers in one GPU's memory (benchmarks/weight_sync.py on an H200)
_LINK_SHARE = 0.68  # of the link between two GPUs, which separate engines reach (the same benchmark)
_PARAMETER_BYTES = 2


@dataclass(frozen=True)
class Lengths:
    """What an iteration trains on. `response_tokens`: assumed mean."""

    prompt_tokens: int
    response_tokens: int
    samples: int


def plan_seconds(
    config: Config, model: Model, cluster: ClusterConfig, memory: Memory, lengths: Lengths
) -> Mapping[str, float]:
    """By phase. ref_logprob and old_logprob only where the run needs them."""
    sequences = [lengths.prompt_tokens + lengths.response_tokens] * lengths.samples
    forward = model_flops(model.shape, sequences, Convention.CAUSAL_HALF, include_mtp=False).forward
    recompute = config.actor.recompute
    train = hardware_flops(
        model.shape,
        sequences,
        Recompute(recompute.granularity, frozenset(recompute.modules)),
        KernelWork(flash_attention=bool(cluster.gpus), head_recompute=True),
        include_mtp=config.actor.train_mtp,
    )
    actor_flops = config.actor.processes * _device_tflops(cluster) * 1e12 * _utilization(config)
    seconds = {
        "rollout": _rollout_seconds(config, model, cluster, memory, lengths),
        "ref_logprob": forward / actor_flops if config.algorithm.kl.coefficient > 0 else 0.0,
        "old_logprob": forward / actor_flops if _needs_old(config) else 0.0,
        "forward_backward": train / actor_flops,
        "optimizer": config.algorithm.updates_per_iteration * _optimizer_seconds(config, model, cluster),
        "weight_sync": _sync_seconds(config, model, cluster),
    }
    return {phase: value for phase, value in seconds.items() if value}


def _utilization(config: Config) -> float:
    parallel = config.actor.parallel
    alone = max(parallel.tensor, parallel.context, parallel.expert, parallel.pipeline) == 1
    return _LAYER_UTILIZATION * (1.0 if alone else _EXCHANGE_SHARE)


def _needs_old(config: Config) -> bool:
    algorithm = config.algorithm
    return algorithm.old_policy == "actor" and (algorithm.updates_per_iteration > 1 or algorithm.correction.active)


def _device_tflops(cluster: ClusterConfig) -> float:
    if not cluster.gpus:
        return _CPU_TFLOPS
    return peak_bf16_tflops(cluster.node.gpu or "unknown") or 300.0


def _rollout_seconds(config: Config, model: Model, cluster: ClusterConfig, memory: Memory, lengths: Lengths) -> float:
    """Decoding reads the touched weights once a step and each request's keys, values and states."""
    engines, engine = config.rollout.engines, config.rollout.engine
    running = max(1, min(memory.engine.concurrency, -(-lengths.samples // engines)))
    touched = _touched_parameters(model, running) * _PARAMETER_BYTES
    context = lengths.prompt_tokens + lengths.response_tokens / 2
    per_request = context * sum(2 * m.key_value_heads * m.head_dim * _PARAMETER_BYTES for m in model.attention_layers)
    per_request += 2 * sum(m.value_heads * m.key_head_dim * m.value_head_dim * 4 for m in model.gdn_layers)
    bandwidth = engine.tensor_parallel * (
        cluster.node.gpu_memory_gigabytes_per_second * 1e9 * _MEMORY_UTILIZATION
        if cluster.gpus
        else _CPU_BYTES_PER_SECOND
    )
    step = (touched + running * per_request) / bandwidth
    waves = -(-lengths.samples // (engines * running))
    return waves * lengths.response_tokens * step


def _touched_parameters(model: Model, running: int) -> float:
    """Parameters that a decoding step of `running` requests reads; experts that no token chose are not read."""
    total = float(model.parameters)
    for layer in model.shape.layers:
        part = layer.feed_forward
        if isinstance(part, MixtureOfExperts):
            routed = 3 * part.hidden_size * part.expert_intermediate_size * part.experts
            total -= routed * (1 - part.experts_per_token / part.experts) ** running
    return total


def _optimizer_seconds(config: Config, model: Model, cluster: ClusterConfig) -> float:
    """Transfers and the update of the offloaded share on the host; the rest is fast and left out."""
    fraction = config.actor.optimizer.cpu_offload_fraction
    share = model.parameters / config.actor.processes * fraction
    here = min(config.actor.processes, cluster.node.gpus) if cluster.gpus else config.actor.processes
    speed = min(config.actor.threads * _CPU_BYTES_PER_SECOND, _NODE_BYTES_PER_SECOND / here)
    transfer = 0.0
    if cluster.gpus:
        transfer = share * (4 + _PARAMETER_BYTES) / (cluster.network.host_to_gpu_gigabytes_per_second * 1e9)
    update = share * _ADAM_BYTES / speed
    return max(transfer, update) if config.actor.optimizer.overlap_transfers else transfer + update


def _sync_seconds(config: Config, model: Model, cluster: ClusterConfig) -> float:
    """All weights leave actor rank 0 once, or pass through the memory of each GPU that actor and engine share."""
    size = model.parameters * _PARAMETER_BYTES
    if not cluster.gpus:
        return size / _GLOO_BYTES_PER_SECOND
    network = cluster.network
    if config.ray.colocate:
        return size / _SHARED_BYTES_PER_SECOND
    speed = network.gpu_to_gpu_gigabytes_per_second
    if cluster.nodes > 1:
        speed = min(speed, network.node_to_node_gigabytes_per_second / cluster.node.gpus)
    return size / (speed * _LINK_SHARE * 1e9)
