"""Seconds of a pass of an engine that decodes, or verifies drafts: bytes that are read, FLOPs, and the host's work."""

from dataclasses import dataclass, replace

from rlpipe.config.cluster import ClusterConfig, SpeedsConfig
from rlpipe.config.draft import DraftConfig
from rlpipe.config.rollout import RolloutConfig
from rlpipe.estimate.memory import Model
from rlpipe.estimate.parameters import embedding_parameters
from rlpipe.flops.breakdown import model_flops
from rlpipe.flops.layers import MixtureOfExperts
from rlpipe.flops.peaks import peak_bf16_tflops

_PARAMETER_BYTES = 2
_LOGIT_BYTES = 4

BREAK_EVEN_WITHIN = 1.6
"""How many times more tokens than were measured the model of drafts asks for at most, of recorded runs
(tests/benchmarks/test_planned_drafts.py)."""


@dataclass(frozen=True)
class EnginePass:
    """A pass of one engine over `requests`, each with `context_tokens` behind it and `tokens` to compute: 1 decodes,
    more verify a draft. attention: SGLang's kernels, where the configuration names them. plain_draw: tokens are drawn
    by kernels of our own (rollout/sglang_patches/plain_draw.py)."""

    requests: int
    context_tokens: float
    tokens: int = 1
    attention: str = ""
    plain_draw: bool = False

    @staticmethod
    def of(rollout: RolloutConfig, requests: int, context_tokens: float) -> "EnginePass":
        """That decodes."""
        engine, sampling = rollout.engine, rollout.sampling
        named = [engine.sglang.get(name) for name in ("decode_attention_backend", "attention_backend")]
        plain = not engine.deterministic and sampling.top_p == 1 and sampling.top_k == -1
        return EnginePass(requests, context_tokens, attention=next(filter(None, named), ""), plain_draw=plain)

    @property
    def rows(self) -> int:
        return self.requests * self.tokens


def pass_seconds(model: Model, cluster: ClusterConfig, ranks: int, work: EnginePass) -> float:
    """A GPU computes while the host schedules the next pass and hands out the last one's tokens, so the slower side
    counts. ranks: of the engine, over which it is divided."""
    if not cluster.gpus:
        speeds = cluster.speeds
        return speeds.cpu_decoding_step_seconds + _read_bytes(model, ranks, work) / (
            speeds.cpu_gigabytes_per_second * 1e9
        )
    return max(_host_seconds(cluster, work), _gpu_seconds(model, cluster, ranks, work))


def break_even_tokens(model: Model, cluster: ClusterConfig, ranks: int, draft: DraftConfig, work: EnginePass) -> float:
    """Tokens of a response that a verified pass must give to be no slower than passes of one token each, 1 or more.

    Of engines on GPUs. The prediction layer reads what was verified, which gives its first token, and goes on one token
    at a time. The host hands out each token, drafted or not. work: of the passes without drafts.
    """
    plain = max(_host_seconds(cluster, work), _gpu_seconds(model, cluster, ranks, work))
    verifying = replace(work, tokens=draft.verified_tokens)
    gpu = _gpu_seconds(model, cluster, ranks, verifying)
    if draft.predicts:
        layer = _prediction_layer(model)
        gpu += _gpu_seconds(layer, cluster, ranks, verifying)
        gpu += (draft.steps - 1) * _gpu_seconds(layer, cluster, ranks, work)
    speeds = cluster.speeds
    host = speeds.decoding_step_seconds + speeds.drafting_step_seconds
    return max(1.0, gpu / plain, host / (plain - work.requests * speeds.decoding_request_seconds))


def drafts_slow_down(pass_tokens: float, break_even: float) -> bool:
    """Whether a verified pass gives too few tokens of a response even if the model asks for more than it takes."""
    return pass_tokens < break_even / BREAK_EVEN_WITHIN


def _host_seconds(cluster: ClusterConfig, work: EnginePass) -> float:
    return cluster.speeds.decoding_step_seconds + work.requests * cluster.speeds.decoding_request_seconds


def _gpu_seconds(model: Model, cluster: ClusterConfig, ranks: int, work: EnginePass) -> float:
    """Attention reads keys and values, which begins anew in each layer; products read weights and compute, for which
    tokens of a step are too many to hide one and too few to hide the other, and take no less than starting their
    kernels; drawing tokens passes over the vocabulary; and ranks exchange."""
    speeds, bandwidth = cluster.speeds, cluster.node.gpu_memory_gigabytes_per_second * 1e9
    attention = _cache_bytes(model, ranks, work) / _attention_share(speeds, work) / bandwidth
    attention += len(model.attention_layers) * speeds.attention_step_seconds
    reading = _weight_and_state_bytes(model, work) / ranks / speeds.decoding_share_of_bandwidth / bandwidth
    peak = (peak_bf16_tflops(cluster.node.gpu or "unknown") or 300.0) * 1e12 * speeds.products_share_of_peak
    computing = work.rows * model_flops(model.shape, [1], include_mtp=False).forward / ranks / peak
    starting = len(model.shape.layers) * speeds.layer_step_seconds
    plain = work.plain_draw and work.tokens == 1
    passes = speeds.plain_drawing_memory_passes if plain else speeds.drawing_memory_passes
    drawing = passes * work.rows * model.shape.vocab_size * _LOGIT_BYTES / bandwidth
    products = max(reading + computing, starting)
    return attention + products + drawing + _exchange_seconds(model, cluster, ranks, work.rows)


def _attention_share(speeds: SpeedsConfig, work: EnginePass) -> float:
    if work.tokens > 1:
        return speeds.verifying_share_of_bandwidth
    if work.attention == "triton":
        return speeds.triton_attention_share_of_bandwidth
    return speeds.attention_share_of_bandwidth


def _read_bytes(model: Model, ranks: int, work: EnginePass) -> float:
    return _weight_and_state_bytes(model, work) / ranks + _cache_bytes(model, ranks, work)


def _weight_and_state_bytes(model: Model, work: EnginePass) -> float:
    """Touched weights, and recurrent states: read and written, or read, written after each token, and the last one that
    is kept copied."""
    states = 2 if work.tokens == 1 else 3 + work.tokens
    return _touched_parameters(model, work.rows) * _PARAMETER_BYTES + work.requests * states * _state_bytes(model)


def _cache_bytes(model: Model, ranks: int, work: EnginePass) -> float:
    """Keys and values that each of an engine's ranks reads; ranks beyond the key/value heads hold copies."""
    token_bytes = sum(
        2 * one.key_value_heads * one.head_dim * _PARAMETER_BYTES / min(ranks, one.key_value_heads)
        for one in model.attention_layers
    )
    return work.requests * work.context_tokens * token_bytes


def _state_bytes(model: Model) -> int:
    """Of recurrent states of a request, in float32."""
    return sum(one.value_heads * one.key_head_dim * one.value_head_dim * 4 for one in model.gdn_layers)


def _exchange_seconds(model: Model, cluster: ClusterConfig, ranks: int, rows: int) -> float:
    """Two all-reduces of one vector for each token in every layer, where an engine spans GPUs. In each of a ring's
    steps a rank sends one part of as many as there are ranks."""
    steps = 2 * (ranks - 1)
    part = rows * model.shape.hidden_size * _PARAMETER_BYTES / ranks
    one = cluster.speeds.all_reduce_step_seconds + part / (cluster.network.gpu_to_gpu_gigabytes_per_second * 1e9)
    return 2 * len(model.shape.layers) * steps * one


def _touched_parameters(model: Model, rows: int) -> float:
    """Parameters that a pass over `rows` tokens reads: neither experts that no token chose, nor an embedding that is
    not the head, too, of which each token needs a row. Tokens choose k of E experts as if by chance, so that
    E (1 - (1 - k/E)^rows) are expected to be read."""
    total = float(model.parameters if model.tied else model.parameters - embedding_parameters(model.shape).total)
    for layer in model.shape.layers:
        part = layer.feed_forward
        if isinstance(part, MixtureOfExperts):
            routed = 3 * part.hidden_size * part.expert_intermediate_size * part.experts
            total -= routed * (1 - part.experts_per_token / part.experts) ** rows
    return total


def _prediction_layer(model: Model) -> Model:
    """A layer like the last one with the model's head; its projection is small beside them."""
    return replace(model, shape=replace(model.shape, layers=model.shape.layers[-1:]), tied=False)
