"""Gated DeltaNet: linear attention with a short convolution and a gated norm (Yang et al. 2024, arXiv:2412.06464).

Heads are cut over tensor-parallel ranks by the projections, and over context-parallel ranks by an all-to-all that
swaps "own tokens, all heads" for "all tokens, own heads": the recurrence needs every token of a sequence in order, and
memory per rank still falls with both sizes.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import _split_tensor_factory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)

from actor.layers.context_parallel import HeadsToTokens, TokensToHeads
from actor.layers.fusion import computed_by
from actor.layers.gdn_kernels import GdnKernels, load_kernels
from actor.layers.lora import LoraColumnLinear, LoraRowLinear
from actor.layers.norm import RmsNorm
from actor.layers.packed import PackedSequences
from rlpipe.model.description import GatedDeltaNetSizes
from rlpipe.shared.replaced_parts import relies_on

relies_on(
    "megatron.core.ssm.gated_delta_net:_split_tensor_factory",
    why="checkpoints hold the fused projections in parts, as Megatron's own layer saves them",
    drop_when="Megatron names it without an underscore",
)

_KERNELS = "actor.layers.triton_norms"
SECTIONS = ("query", "key", "value", "z", "beta", "alpha")


class GatedNorm(torch.nn.Module):
    """RMSNorm over a head's channels, times silu(gate), in float32.

    The weight is replicated over tensor-parallel ranks, each of which sees its own heads only; the marks make Megatron
    (under sequence parallelism) or `reduce_replicated_gradients` (without) add the ranks' gradients.
    """

    def __init__(self, config: Any, width: int) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        weight: Any = torch.nn.Parameter(
            torch.ones(width, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        weight.sequence_parallel = config.sequence_parallel
        weight.partial_over_tensor_parallel = True
        self.weight = weight

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x, gate: [t, heads, width]."""
        return gated_rms_norm(x, gate, self.weight, self.eps)


@computed_by(_KERNELS)
def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / rms(x) x weight x silu(gate) over the last dimension. x, gate: [t, heads, width]."""
    normed = RmsNorm.of(x.float(), weight.float(), epsilon)
    return (normed * F.silu(gate.float())).to(x.dtype)


@computed_by(_KERNELS)
def gates(
    alpha: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(-exp(a_log) x softplus(alpha + bias), the decay in log space; sigmoid(beta)), both in float32.

    alpha, beta: [t, heads]; a_log, bias: [heads].
    """
    return -a_log.float().exp() * F.softplus(alpha.float() + bias.float()), beta.float().sigmoid()


class GatedDeltaNet(MegatronModule):
    """Parameters named and laid out as in Megatron's own GatedDeltaNet (in_proj holds q, k, v, z, beta, alpha).

    Megatron's refuses packed sequences and context parallelism and needs fla even on the CPU
    (ssm/gated_delta_net.py:103,297).
    """

    def __init__(self, config: Any, *, pg_collection: Any, **_: object) -> None:
        super().__init__(config)
        sizes: GatedDeltaNetSizes = config.gdn_sizes
        self.tensor_group, self.context_group = pg_collection.tp, pg_collection.cp
        ranks = self.tensor_group.size()
        self.key_heads, self.value_heads = sizes.key_heads // ranks, sizes.value_heads // ranks
        self.key_dim, self.value_dim = sizes.key_dim, sizes.value_dim
        self.kernels: GdnKernels = load_kernels(config.gdn_backend)
        linear = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tensor_group}
        self.in_proj = LoraColumnLinear(
            config.hidden_size,
            ranks * sum(self.section_widths()),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **linear,
        )
        self.conv1d = _ShortConvolution(config, sum(self.section_widths()[:3]), sizes.conv_width)
        self.dt_bias = self._per_head(config)
        self.A_log = self._per_head(config)
        self.out_norm = GatedNorm(config, self.value_dim)
        self.out_proj = LoraRowLinear(
            sizes.value_heads * self.value_dim,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **linear,
        )

    def _per_head(self, config: Any) -> torch.nn.Parameter:
        values = torch.zeros(self.value_heads, dtype=config.params_dtype, device=torch.cuda.current_device())
        return _tensor_parallel(torch.nn.Parameter(values))

    def section_widths(self) -> tuple[int, ...]:
        """Local channels of q, k, v, z, beta and alpha, in this order, as `in_proj` yields them."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        return (keys, keys, values, values, self.value_heads, self.value_heads)

    def forward(
        self, hidden_states: torch.Tensor, *args: object, packed_seq_params: PackedSequences, **_: object
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states: [t, 1, h] (a 1/TP slice of it under sequence parallelism); returns (output, bias)."""
        projected = self.in_proj(hidden_states)[0].squeeze(1)
        out = self._mix(self._to_heads(projected, packed_seq_params), packed_seq_params)
        return self.out_proj(self._to_tokens(out, packed_seq_params).unsqueeze(1))

    def _to_heads(self, x: torch.Tensor, sequences: PackedSequences) -> torch.Tensor:
        """[t, channels] of own tokens -> [T, channels / CP] of all tokens in pack order, sections kept apart."""
        if self.context_group.size() == 1:
            return x
        heads: torch.Tensor = TokensToHeads.apply(
            x, self.section_widths(), self.context_group, sequences.to_global, sequences.from_global
        )
        return heads

    def _to_tokens(self, x: torch.Tensor, sequences: PackedSequences) -> torch.Tensor:
        """[T, value channels / CP] in pack order -> [t, value channels] of own tokens."""
        if self.context_group.size() == 1:
            return x
        tokens: torch.Tensor = HeadsToTokens.apply(x, self.context_group, sequences.from_global, sequences.to_global)
        return tokens

    def _mix(self, x: torch.Tensor, sequences: PackedSequences) -> torch.Tensor:
        """The token mixer over whole sequences and this rank's heads: [T, channels / CP] -> [T, values / CP]."""
        query, key, value, z, beta, alpha = self.kernels.heads(
            x, self._own_conv_weights(), (self.key_dim, self.value_dim), sequences
        )
        decay, opened = gates(alpha, beta, self._own_heads(self.A_log), self._own_heads(self.dt_bias))
        out = self.kernels.delta_rule(query, key, value, decay, opened, sequences)
        return self.out_norm(out, z.unflatten(-1, (-1, self.value_dim))).flatten(1)

    def _own_heads(self, values: torch.Tensor) -> torch.Tensor:
        """This context-parallel rank's part of a per-head parameter; the gradient of the rest is zero here."""
        return values.chunk(self.context_group.size())[self.context_group.rank()]

    def _own_conv_weights(self) -> list[torch.Tensor]:
        """[channels / CP, width] of q, k and v."""
        weight = self.conv1d.weight.squeeze(1)
        return [self._own_heads(part) for part in weight.split(self.section_widths()[:3])]

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
        tp_group: object = None,
    ) -> dict[str, Any]:
        """Sections of in_proj and conv1d are saved as tensors of their own, so that any TP size can load them."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        group, replicas = self.tensor_group, metadata["dp_cp_group"]
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        axes = {"A_log": 0, "dt_bias": 0}
        state = make_sharded_tensors_for_checkpoint(
            own, prefix, axes, sharded_offsets=sharded_offsets, tp_group=group, dp_cp_group=replicas
        )
        conv = self.conv1d.state_dict(prefix="", keep_vars=True)
        state |= make_sharded_tensors_for_checkpoint(
            conv, f"{prefix}conv1d.", {"weight": 0}, sharded_offsets, tp_group=group, dp_cp_group=replicas
        )
        for name in ("in_proj", "out_norm", "out_proj"):
            module = getattr(self, name)
            state |= sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=group)
        for name, count in (("in_proj", 6), ("conv1d", 3)):
            key = f"{prefix}{name}.weight"
            state[key] = _split_tensor_factory(state[key], list(self.section_widths()[:count]), SECTIONS[:count], 0)
        return state


class _ShortConvolution(torch.nn.Module):
    """The weight of a depthwise causal convolution: [channels, 1, width]."""

    def __init__(self, config: Any, channels: int, width: int) -> None:
        super().__init__()
        values = torch.zeros(channels, 1, width, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight = _tensor_parallel(torch.nn.Parameter(values))


def _tensor_parallel(param: Any) -> torch.nn.Parameter:
    """Mark a parameter as cut over tensor-parallel ranks along dimension 0."""
    param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, 0, 1
    return param
