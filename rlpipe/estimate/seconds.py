"""Seconds of each phase of an iteration, from FLOPs, bytes and bandwidths. How fast this code runs is in the cluster's
`speeds`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from rlpipe.config.cluster import ClusterConfig
from rlpipe.config.root import Config
from rlpipe.estimate.decoding import EnginePass, pass_seconds
from rlpipe.estimate.decoding_rounds import decoding_rounds
from rlpipe.estimate.engine_pools import LEAST_SHARED_TOKENS, forgets_prefixes
from rlpipe.estimate.exchanges import exchange_seconds
from rlpipe.estimate.gpu_generations import LONG_SEQUENCE_TOKENS
from rlpipe.estimate.memory import (
    ENGINE_STAYS,
    Memory,
    Model,
    gradients_stay,
    offloaded_bytes,
    room_beside_engines,
    states_beside_engines_bytes,
)
from rlpipe.estimate.parameters import fp8_parameters
from rlpipe.flops.breakdown import model_flops
from rlpipe.flops.convention import Convention
from rlpipe.flops.hardware import KernelWork, Recompute, hardware_flops
from rlpipe.flops.layers import (
    DenseFeedForward,
    FeedForward,
    GatedDeltaNet,
    LatentAttention,
    Mixer,
    MixtureOfExperts,
)
from rlpipe.flops.peaks import peak_bf16_tflops

_ADAM_BYTES = 34  # read and written for each parameter: gradient, master, moments, bf16 copy
_MASTER_BYTES = 4
_PARAMETER_BYTES = 2


@dataclass(frozen=True)
class Work:
    """Executed FLOPs of passes over sequences of one length, by what runs at a speed of its own.

    experts: products of routed experts. delta_rule: of Gated DeltaNet's states. attention: of queries with keys and
    weights with values, which grow with the square of a sequence. head: of the vocabulary. products: all others.
    forward_passes: how many there are, a backward pass counted as two.
    """

    sequences: int
    sequence_tokens: int
    forward_passes: int
    products: float
    experts: float
    delta_rule: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        return self.products + self.experts + self.delta_rule + self.attention + self.head


@dataclass(frozen=True)
class Lengths:
    """What an iteration trains on. `response_tokens`: assumed mean."""

    prompt_tokens: int
    response_tokens: int
    samples: int

    @property
    def sequence_tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens

    @property
    def mean_context_tokens(self) -> float:
        """Behind a token that is decoded."""
        return self.prompt_tokens + self.response_tokens / 2


def plan_seconds(
    config: Config, model: Model, cluster: ClusterConfig, memory: Memory, lengths: Lengths
) -> Mapping[str, float]:
    """By phase. ref_logprob and old_logprob only where the run needs them, rollout only where an engine has room for a
    request."""
    busy = _busy_share(config, lengths) / _last_stage(config, model, cluster, lengths)
    seconds = {
        "forward_backward": _training_seconds(config, model, cluster, lengths) / busy,
        "optimizer": config.algorithm.updates_per_iteration * _optimizer_seconds(config, model, cluster, memory),
    }
    if config.sft:
        return seconds
    forward = _forward_seconds(config, model, cluster, lengths) / busy
    adapting = _adapter_seconds(config, model, cluster, lengths) / (3 * config.actor.processes * busy)  # as of products
    needs_reference = config.algorithm.kl.coefficient > 0
    needs_old = config.algorithm.needs_old_pass(config.rollout.may_be_stale)
    seconds = {
        "rollout": _rollout_seconds(config, model, cluster, memory, lengths) if memory.engine.concurrency else 0.0,
        "ref_logprob": forward + _swap_seconds(config, memory, model, cluster) if needs_reference else 0.0,
        "old_logprob": forward + adapting if needs_old else 0.0,
        **seconds,
        "sleep_wake": _sleep_wake_seconds(config, model, cluster, memory),
        "weight_sync": _sync_seconds(config, model, cluster),
    }
    return {phase: value for phase, value in seconds.items() if value}


def _training_seconds(config: Config, model: Model, cluster: ClusterConfig, lengths: Lengths) -> float:
    """Of forward and backward passes over all sequences, when no rank waits for the fullest. A backward pass takes
    twice as long as a forward pass, of which full recomputation makes two."""
    training = _device_seconds(_training_work(config, model, cluster, lengths), config, model, cluster)
    training += _adapter_seconds(config, model, cluster, lengths)
    forward_passes = 2 if config.actor.recompute.chosen == "full" else 1
    forward = training / config.actor.processes / (forward_passes + 2)
    exchanging = _exchange_seconds(config, model, cluster, lengths)
    least = _launch_seconds(config, model, cluster, lengths)
    return forward_passes * max(forward + exchanging, least) + max(2 * forward + exchanging, least)


def _forward_seconds(config: Config, model: Model, cluster: ClusterConfig, lengths: Lengths) -> float:
    """Of a forward pass over all sequences, when no rank waits for the fullest."""
    forward = _device_seconds(_forward_work(model, lengths.sequence_tokens, lengths.samples), config, model, cluster)
    forward = forward / config.actor.processes + _exchange_seconds(config, model, cluster, lengths)
    return max(forward, _launch_seconds(config, model, cluster, lengths))


def _adapter_seconds(config: Config, model: Model, cluster: ClusterConfig, lengths: Lengths) -> float:
    """Of one device, what adapters take of training beside the FLOPs of the layers: their products are so narrow that
    the memory's bandwidth bounds them. An adapter of rank r has r weights for each of its inputs and outputs."""
    if model.adapters is None or config.actor.lora is None or not cluster.gpus:
        return 0.0
    routed = [one for layer in model.shape.layers if isinstance(one := layer.feed_forward, MixtureOfExperts)]
    used = routed[0].experts_per_token / routed[0].experts if routed else 0
    adapters = model.adapters
    ends = (adapters.tensor + adapters.whole + used * adapters.experts) / config.actor.lora.rank
    size = ends * lengths.samples * lengths.sequence_tokens * _PARAMETER_BYTES
    return cluster.speeds.adapter_memory_passes * size / (cluster.node.gpu_memory_gigabytes_per_second * 1e9)


def _swap_seconds(config: Config, memory: Memory, model: Model, cluster: ClusterConfig) -> float:
    """The reference comes from host memory into the place of what is trained, which goes there and comes back after
    it (`actor/reference.py`): three times over the link, one after another."""
    if not cluster.gpus:
        return 0.0
    size = memory.actor["parameters"] if model.adapters is None else memory.actor["adapters"]
    return 3 * size / (cluster.network.host_to_gpu_gigabytes_per_second * 1e9)


def _training_work(config: Config, model: Model, cluster: ClusterConfig, lengths: Lengths) -> Work:
    """Of forward and backward passes, recomputation included."""
    recompute = config.actor.recompute
    whole = _executed_work(
        model, cluster, lengths, Recompute(recompute.chosen, frozenset(recompute.modules)), config.actor.train_mtp
    )
    tokens = lengths.samples * lengths.sequence_tokens
    saved = lengths.samples * model.untrained.flops([lengths.sequence_tokens], idle=recompute.chosen != "full")
    of_head = 0 if model.adapters is None else tokens * model.shape.head_flops  # whose weight has no gradient either
    left = 1 - (saved - of_head) / (whole.products + whole.experts)
    return replace(whole, products=left * whole.products, experts=left * whole.experts, head=whole.head - of_head)


def _executed_work(
    model: Model, cluster: ClusterConfig, lengths: Lengths, recompute: Recompute, include_mtp: bool = False
) -> Work:
    """Of forward and backward passes, where everything is trained."""
    kernels = KernelWork(flash_attention=bool(cluster.gpus), head_recompute=True)
    heads = 4 * (1 + (len(model.shape.mtp_decoder_layers) if include_mtp else 0))

    def flops(tokens: int) -> int:
        return hardware_flops(model.shape, [tokens], recompute, kernels, include_mtp=include_mtp)

    passes = 4 if recompute.granularity == "full" else 3
    return _work(flops, model, lengths.sequence_tokens, lengths.samples, passes, heads)


def _forward_work(model: Model, tokens: int, sequences: int) -> Work:
    def flops(tokens: int) -> int:
        return model_flops(model.shape, [tokens], Convention.CAUSAL_HALF, include_mtp=False).forward

    return _work(flops, model, tokens, sequences, 1, 1)


def _work(flops: Callable[[int], int], model: Model, tokens: int, sequences: int, passes: int, heads: int) -> Work:
    """flops: of a sequence of so many tokens. What it has beyond as many sequences of one token is attention.
    heads: how often a product of the vocabulary is made."""
    linear = tokens * flops(1)
    total = sequences * tokens
    head = heads * model.shape.head_flops * total
    parts = ((layer.feed_forward, count) for layer, count in model.shape.layer_kinds)
    routed = sum(count * part.routed_flops for part, count in parts if isinstance(part, MixtureOfExperts))
    experts = passes * total * routed
    delta_rule = passes * total * sum(layer.core_flops for layer in model.gdn_layers)
    products = sequences * linear - head - experts - delta_rule
    attention = sequences * (flops(tokens) - linear)
    return Work(sequences, tokens, passes, products, experts, delta_rule, attention, head)


def _busy_share(config: Config, lengths: Lengths) -> float:
    """Of the actor's processes: the others wait for the fullest rank, and where stages of a pipeline fill and drain
    (arXiv 2104.04473, section 2.2)."""
    parallel, shares = config.actor.parallel, _Shares.of(config, lengths)
    packs = max(1.0, shares.packs) / config.algorithm.updates_per_iteration
    filling = (parallel.pipeline - 1) / (parallel.virtual_pipeline or 1)
    return shares.even(lengths) * packs / (packs + filling)


def _last_stage(config: Config, model: Model, cluster: ClusterConfig, lengths: Lengths) -> float:
    """Work of a pipeline's last stage, which has the head beside its layers, over the mean of all stages, which wait
    for it."""
    stages = config.actor.parallel.pipeline
    work = _forward_work(model, lengths.sequence_tokens, lengths.samples)
    whole = _device_seconds(work, config, model, cluster)
    layers = _device_seconds(replace(work, head=0), config, model, cluster)
    return (layers / stages + whole - layers) * stages / whole


@dataclass(frozen=True)
class _Shares:
    """Data ranks, and of the fullest: samples, packs, and tokens of one of its context ranks."""

    ranks: int
    samples: int
    packs: float
    tokens: float

    @classmethod
    def of(cls, config: Config, lengths: Lengths) -> "_Shares":
        parallel = config.actor.parallel
        ranks = config.actor.processes // (parallel.tensor * parallel.pipeline * parallel.context)
        samples = -(-lengths.samples // ranks)
        tokens = samples * lengths.sequence_tokens / parallel.context
        return cls(ranks, samples, tokens / config.actor.pack_tokens, tokens)

    def even(self, lengths: Lengths) -> float:
        """What a rank would have if all had as much, over what the fullest has."""
        return lengths.samples / (self.ranks * self.samples)


def _launch_seconds(config: Config, model: Model, cluster: ClusterConfig, lengths: Lengths) -> float:
    """Of the host, which gives the device the work of a pass over all sequences: the same for a pack of any size."""
    if not cluster.gpus:
        return 0.0
    shares, speeds = _Shares.of(config, lengths), cluster.speeds
    packs = max(float(config.algorithm.updates_per_iteration), shares.packs) * shares.even(lengths)
    layer = speeds.host_dense_layer_seconds if model.is_dense else speeds.host_layer_seconds
    return packs * len(model.shape.layers) / config.actor.parallel.pipeline * layer


def _exchange_seconds(config: Config, model: Model, cluster: ClusterConfig, lengths: Lengths) -> float:
    """Of a forward pass over all sequences, when no rank waits for the fullest."""
    shares = _Shares.of(config, lengths)
    packs = max(float(config.algorithm.updates_per_iteration), shares.packs)
    return shares.even(lengths) * exchange_seconds(config, model.shape, cluster, shares.tokens, packs)


def _device_seconds(work: Work, config: Config, model: Model, cluster: ClusterConfig) -> float:
    """Of one device that did all of it, in the actor's packs, and exchanged nothing with others."""
    speeds, pack = cluster.speeds, config.actor.pack_tokens
    if not cluster.gpus:
        return work.total / (speeds.cpu_tflops * 1e12)
    is_short = work.sequence_tokens < LONG_SEQUENCE_TOKENS
    attention = work.attention / (speeds.short_attention_share_of_peak if is_short else speeds.attention_share_of_peak)
    layers = work.products / speeds.products_share_of_peak + work.experts / speeds.experts_share_of_peak
    layers += work.delta_rule / speeds.delta_rule_share_of_peak + attention
    peak = (peak_bf16_tflops(cluster.node.gpu or "unknown") or 300.0) * 1e12
    in_long_packs = layers / peak + _between_products_seconds(work, model, cluster)
    return in_long_packs * (pack + speeds.pack_overhead_tokens) / pack + work.head / speeds.head_share_of_peak / peak


def _between_products_seconds(work: Work, model: Model, cluster: ClusterConfig) -> float:
    """What lies between products and is bound by memory: norms, rotation, convolution, SwiGLU, sums and copies."""
    widths = sum(
        count * (_mixer_widths(layer.mixer) + _feed_forward_widths(layer.feed_forward))
        for layer, count in model.shape.layer_kinds
    )
    size = work.sequences * work.sequence_tokens * widths * _PARAMETER_BYTES
    passes = work.forward_passes * cluster.speeds.layer_memory_passes
    return passes * size / (cluster.node.gpu_memory_gigabytes_per_second * 1e9)


def _mixer_widths(mixer: Mixer) -> int:
    """Elements that one token has at both ends of a mixer's products."""
    if isinstance(mixer, GatedDeltaNet):
        values = mixer.value_heads * mixer.value_head_dim
        return 2 * mixer.hidden_size + 2 * mixer.key_heads * mixer.key_head_dim + 3 * values
    if isinstance(mixer, LatentAttention):
        query, values = mixer.heads * mixer.query_head_dim, mixer.heads * mixer.value_head_dim
        from_latents = 2 * mixer.key_value_rank + mixer.rope_head_dim + mixer.heads * mixer.nope_head_dim + values
        queries = query if mixer.query_rank is None else 2 * mixer.query_rank + query
        return 2 * mixer.hidden_size + queries + from_latents + values
    query, keys = mixer.heads * mixer.head_dim, 2 * mixer.key_value_heads * mixer.head_dim
    return 2 * mixer.hidden_size + (2 + mixer.output_gate) * query + keys


def _feed_forward_widths(part: FeedForward) -> int:
    """The same of a feed-forward. Rows that come out of experts are read where they are added up, and counted once."""
    if isinstance(part, DenseFeedForward):
        return 2 * part.hidden_size + 3 * part.intermediate_size
    routed = part.experts_per_token * (part.hidden_size + 3 * part.expert_intermediate_size)
    shared = 2 * part.hidden_size + 3 * part.shared_intermediate_size if part.shared_intermediate_size else 0
    return routed + shared


def _rollout_seconds(config: Config, model: Model, cluster: ClusterConfig, memory: Memory, lengths: Lengths) -> float:
    """Prompts come first, then steps of all that run at a time; requests that lose their places in between begin again
    with what they had. Samples of a group have their prompt in common."""
    engines, engine = config.rollout.engines, config.rollout.engine
    running = min(memory.engine.most_requests, -(-lengths.samples // engines))
    waves = -(-lengths.samples // (engines * running))
    sharing = samples_of_a_prompt(config, model, cluster, lengths.prompt_tokens)
    computed = -(-lengths.samples // sharing)
    prompts = _prefill_seconds(config, model, cluster, lengths.prompt_tokens, computed) / engines
    own_tokens = lengths.prompt_tokens / sharing
    common_tokens = lengths.prompt_tokens - own_tokens
    again = decoding = 0.0
    for part in decoding_rounds(running, own_tokens, lengths.response_tokens, memory.engine.kv_tokens):
        if part.again:
            again += _prefill_seconds(config, model, cluster, round(part.again_tokens), part.again)
        for stretch in part.stretches:
            work = EnginePass.of(config.rollout, stretch.requests, common_tokens + stretch.context_tokens)
            decoding += stretch.steps * pass_seconds(model, cluster, engine.tensor_parallel, work)
    return prompts + waves * (again + decoding)


def samples_of_a_prompt(config: Config, model: Model, cluster: ClusterConfig, prompt_tokens: float) -> int:
    """For how many requests an engine computes and keeps a prompt once: those of a group, where it has a cache of
    prefixes (rollout/shared_prompts.py), which on a CPU those of recurrent states have not."""
    engine = config.rollout.engine
    recurrent = any(isinstance(layer.mixer, GatedDeltaNet) for layer in model.shape.layers)
    forgets = recurrent and (not cluster.gpus or forgets_prefixes(engine, model.architecture, config.reuses_prefixes))
    if engine.sglang.get("disable_radix_cache", forgets) or prompt_tokens < LEAST_SHARED_TOKENS:
        return 1
    return config.rollout.samples_per_prompt


def _prefill_seconds(config: Config, model: Model, cluster: ClusterConfig, tokens: int, sequences: int) -> float:
    """Of one engine."""
    work = _forward_work(model, tokens, sequences)
    return _device_seconds(work, config, model, cluster) / config.rollout.engine.tensor_parallel


def _optimizer_seconds(config: Config, model: Model, cluster: ClusterConfig, memory: Memory) -> float:
    """The update at the speed of the device's memory, on GPUs with offloaded states on their way.

    States that have room beside the passes come under them. The others take the places of those that are updated, one
    chunk down while another comes up, so the link carries them once in either direction. What has no room beside
    engines goes back to the host anyway, those first (`actor/streamed_adam.py`).
    """
    actor, speeds = config.actor, cluster.speeds
    own = model.trained / actor.processes
    if not cluster.gpus:
        most = speeds.host_memory_gigabytes_per_second * 1e9 / _ADAM_BYTES / actor.processes
        return own / min(actor.threads * speeds.cpu_gigabytes_per_second * 1e9 / _ADAM_BYTES, most)
    stays = states_beside_engines_bytes(config, model, cluster, memory)
    moved = max(0.0, offloaded_bytes(config, model, cluster) - stays)
    is_alone = min(actor.processes, cluster.node.gpus) == 1
    share = speeds.lone_streaming_share_of_host_link if is_alone else speeds.streaming_share_of_host_link
    transfer = moved / (share * cluster.network.host_to_gpu_gigabytes_per_second * 1e9)
    return transfer + own * _ADAM_BYTES / (cluster.node.gpu_memory_gigabytes_per_second * 1e9)


def _sleep_wake_seconds(config: Config, model: Model, cluster: ClusterConfig, memory: Memory) -> float:
    """Where engines and actor share memory: the calls, what engines give back and map anew, and of what has no room
    beside them the gradients, likewise, and the masters on their way back to the device."""
    if not config.ray.shares_memory(gpus=cluster.gpus > 0):
        return 0.0
    seconds, speeds = cluster.speeds.call_seconds, cluster.speeds
    if not cluster.gpus or memory.actor["parameters"] > room_beside_engines(config, cluster, memory):
        size = model.parameters / config.actor.processes * _MASTER_BYTES  # each rank's own; all-gathers are quick
        seconds += size / (cluster.network.host_to_gpu_gigabytes_per_second * 1e9)
    if cluster.gpus:
        asleep = sum(size for name, size in memory.engine.parts.items() if name != ENGINE_STAYS)
        seconds += 2 * asleep / (speeds.engine_mapping_gigabytes_per_second * 1e9)
        if not gradients_stay(config, model, cluster, memory):
            seconds += 2 * memory.actor["gradients"] / (speeds.mapping_gigabytes_per_second * 1e9)
    return seconds


def _sync_seconds(config: Config, model: Model, cluster: ClusterConfig) -> float:
    """All weights, or adapters where they go alone, come over one link to each GPU of an engine, however many
    processes send, or pass through the memory of each GPU that actor and engine share, after ranks have gathered
    them."""
    if config.weight_sync.adapters == "alone":
        size = model.trained * _PARAMETER_BYTES
    else:
        size = model.parameters * _PARAMETER_BYTES
        size -= fp8_parameters(model.shape, config.rollout.engine.quantization)  # a byte instead of two
    speeds, network = cluster.speeds, cluster.network
    if not cluster.gpus:
        speed = speeds.gloo_gigabytes_per_second
    elif config.ray.colocate and config.actor.processes == 1:
        speed = speeds.weight_buffers_gigabytes_per_second
    elif config.ray.colocate:
        speed = speeds.gathering_share_of_link * network.gpu_to_gpu_gigabytes_per_second
    else:
        speed = network.gpu_to_gpu_gigabytes_per_second
        if cluster.nodes > 1:
            speed = min(speed, network.node_to_node_gigabytes_per_second / cluster.node.gpus)
        speed *= speeds.weight_sync_share_of_link
    return speeds.call_seconds + size / (speed * 1e9)
