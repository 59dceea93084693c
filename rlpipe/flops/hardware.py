"""Executed (hardware) FLOPs of a training step: recomputation, kernel overhead and padding included."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from rlpipe.flops.breakdown import Frozen, Part, feed_forward_flops, mixer_flops, model_flops
from rlpipe.flops.convention import Convention, doubled_pairs
from rlpipe.flops.layers import DecoderLayer, DenseFeedForward, GatedDeltaNet, LatentAttention, MixtureOfExperts
from rlpipe.flops.shape import ModelShape
from rlpipe.flops.vision import Grid
from rlpipe.shared.errors import ConfigError

Granularity = Literal["none", "selective", "full"]

_MODULES = frozenset({"core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"})


@dataclass(frozen=True)
class Recompute:
    """Which activations the backward pass makes again: `full` is each decoder layer, `selective` only `modules`.

    modules: Megatron-core's names; `layernorm` and `moe_act` hold no matmul and cost nothing here.
    """

    granularity: Granularity = "none"
    modules: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        unknown = sorted(self.modules - _MODULES)
        if self.granularity == "selective" and unknown:
            raise ConfigError(f"recompute modules {unknown} are unknown: choose among {', '.join(sorted(_MODULES))}")


@dataclass(frozen=True)
class KernelWork:
    """What kernels execute beyond the model's maths.

    flash_attention: its backward pass makes the product of queries and keys again (arXiv 2307.08691).
    delta_rule_chunk_tokens: the delta rule runs in chunks of that size, forward and backward as in FLA's kernels,
        in place of the model's `8 V^2`; None leaves the model's figure.
    head_recompute: a fused or chunked head makes its logits again in the backward pass.
    """

    flash_attention: bool = False
    delta_rule_chunk_tokens: int | None = None
    head_recompute: bool = False


def hardware_flops(
    shape: ModelShape,
    executed_lengths: Iterable[int],
    recompute: Recompute | None = None,
    kernels: KernelWork | None = None,
    convention: Convention = Convention.CAUSAL_HALF,
    *,
    include_mtp: bool = True,
    grids: Iterable[Grid] = (),
    frozen: Mapping[Part, Frozen] | None = None,
) -> int:
    """Executed FLOPs of forward and backward over sequences as they are laid out.

    executed_lengths: lengths with their padding (`Pack.cu_seqlens_padded`), the tail of a pack as one more sequence.
    Recomputation concerns the decoder and MTP layers; the head and the vision tower run once.
    """
    recompute, kernels = recompute or Recompute(), kernels or KernelWork()
    lengths = tuple(executed_lengths)
    model = model_flops(shape, lengths, convention, include_mtp=include_mtp, grids=grids)
    mtp_layers = shape.mtp_decoder_layers if include_mtp else ()
    total = model.train_with_frozen(frozen or {})
    for layer in shape.layers + mtp_layers:
        total += _recomputed(layer, lengths, convention, recompute)
        total += _kernel_extra(layer, lengths, convention, kernels, runs_forward_twice=recompute.granularity == "full")
    if recompute.granularity == "full":
        total += shape.mtp_projection_flops * len(mtp_layers) * sum(lengths)
    if kernels.head_recompute:
        total += shape.head_flops * (1 + len(mtp_layers)) * sum(lengths)
    return total


def _recomputed(layer: DecoderLayer, lengths: tuple[int, ...], convention: Convention, recompute: Recompute) -> int:
    """Forward FLOPs of the layer that run a second time."""
    if recompute.granularity == "none":
        return 0
    tokens, mixer, feed_forward = sum(lengths), layer.mixer, layer.feed_forward
    mixer_work = mixer_flops(layer, lengths, convention)
    if recompute.granularity == "full":
        return mixer_work.forward + feed_forward_flops(layer, tokens).forward
    modules, again = recompute.modules, 0
    if "core_attn" in modules and not isinstance(mixer, GatedDeltaNet):
        again += mixer_work.core
    if "mla_up_proj" in modules and isinstance(mixer, LatentAttention):
        again += mixer.up_projection_flops * tokens
    if isinstance(feed_forward, DenseFeedForward):
        return again + (feed_forward.weights_flops * tokens if "mlp" in modules else 0)
    return again + _recomputed_experts(feed_forward, modules) * tokens


def _recomputed_experts(experts: MixtureOfExperts, modules: frozenset[str]) -> int:
    """For each token; `moe` includes the shared expert."""
    if "moe" in modules:
        return experts.weights_flops
    return experts.shared_flops if "shared_experts" in modules else 0


def _kernel_extra(
    layer: DecoderLayer,
    lengths: tuple[int, ...],
    convention: Convention,
    kernels: KernelWork,
    *,
    runs_forward_twice: bool,
) -> int:
    """What the kernels of the layer's mixer execute beyond the model's figure, which may be negative for a core."""
    mixer = layer.mixer
    if isinstance(mixer, GatedDeltaNet):
        if kernels.delta_rule_chunk_tokens is None:
            return 0
        forwards = 2 if runs_forward_twice else 1
        executed = forwards * mixer.chunked_forward_flops(kernels.delta_rule_chunk_tokens)
        executed += mixer.chunked_backward_flops(kernels.delta_rule_chunk_tokens)
        return (executed - (forwards + 2) * mixer.core_flops) * sum(lengths)
    if not kernels.flash_attention:
        return 0
    pairs = sum(doubled_pairs(length, convention, mixer.window) for length in lengths)
    return mixer.score_flops_per_doubled_pair * pairs
