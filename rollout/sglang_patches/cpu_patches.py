"""What SGLang does differently in a scheduler process without a GPU: every replacement in one table.

Each replaced function launches a Triton kernel, assumes CUDA or is slow; the replacement is plain torch with the same
result.
The signatures are those of SGLang 0.5.17.
"""

import importlib
from typing import Any

import torch
import torch.nn.functional as F

from rlpipe.shared.errors import RolloutError
from rlpipe.shared.replaced_parts import replaces
from rollout.sglang_patches import batch_invariance, cpu_lora, cpu_routes
from rollout.sglang_patches.cpu_attention import PagedAttention

replaces(
    "sglang.srt.layers.attention.torch_native_backend:TorchNativeAttnBackend._run_sdpa_forward_decode",
    why="it decodes one request after the other",
    drop_when="SGLang decodes a batch in one call on a CPU, each row as if it were alone",
)
replaces(
    "sglang.srt.layers.attention.torch_native_backend:TorchNativeAttnBackend._run_sdpa_forward_extend",
    why="its answer for a token differs in the last bits from what decoding gives, and with the length of the prompt",
    drop_when="a token's answer on a CPU does not depend on what of its prompt is cached",
)
_BEGIN_PASS = replaces(
    "sglang.srt.layers.attention.torch_native_backend:TorchNativeAttnBackend.init_forward_metadata",
    why="which slots and lengths a pass has is worked out once, not in each layer",
    drop_when="SGLang decodes a batch in one call on a CPU, each row as if it were alone",
)
replaces(
    "sglang.kernels.ops.attention.fla.fused_norm_gate:layer_norm_gated_fwd",
    "sglang.kernels.ops.attention.fla.layernorm_gated:_layer_norm_fwd",
    "sglang.kernels.ops.elementwise.elementwise:fused_gate_sigmoid_mul_add",
    "sglang.srt.batch_invariant_ops:enable_batch_invariant_mode",
    why="each launches a Triton kernel",
    drop_when="SGLang has a form of it for CPUs without AMX",
)


def install() -> None:
    """Call once, before SGLang's model files are imported."""
    for path, replacement in _REPLACEMENTS.items():
        module_name, attribute = path.rsplit(".", 1)
        module = importlib.import_module(module_name)
        if not hasattr(module, attribute):
            raise RolloutError(
                f"{path} does not exist in the installed SGLang; rollout/sglang_patches/cpu_patches.py must be adapted"
            )
        setattr(module, attribute, replacement)
    _use_attention()
    _use_seeded_sampler()
    cpu_routes.install()
    cpu_lora.install()


def _use_attention() -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    attention, original = PagedAttention(), _BEGIN_PASS.original()

    def init_forward_metadata(self: TorchNativeAttnBackend, forward_batch: Any) -> None:
        attention.begin_pass()
        original(self, forward_batch)

    TorchNativeAttnBackend.init_forward_metadata = init_forward_metadata
    TorchNativeAttnBackend._run_sdpa_forward_decode = attention.decode
    TorchNativeAttnBackend._run_sdpa_forward_extend = attention.extend


def _use_seeded_sampler() -> None:
    from sglang.srt.layers import sampler

    from rollout.sglang_patches.cpu_sampler import SeededSampler

    def create() -> sampler.Sampler:
        # Without seeds SGLang's own sampler is right; only it knows whether there are seeds, and only after its start.
        plain = sampler.Sampler()
        return SeededSampler() if plain.enable_deterministic else plain

    sampler.register_sampler_backend("pytorch", create)


def _layer_norm_gated_fwd(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str = "swish",
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    is_rms_norm: bool = False,
) -> tuple[torch.Tensor, None, None, torch.Tensor]:
    """RMSNorm of x [rows, width] times silu(g), or sigmoid(g) when `activation` says so."""
    if not is_rms_norm or residual is not None or bias is not None:
        raise NotImplementedError("gated LayerNorm, residual and bias have no CPU form")
    wide = x.float()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    gate = torch.sigmoid(g.float()) if activation == "sigmoid" else F.silu(g.float())
    return (y * gate).to(out_dtype or x.dtype), None, None, x


def _layer_norm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    z: torch.Tensor,
    out: torch.Tensor | None = None,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    activation: str = "swish",
) -> tuple[torch.Tensor, None, None]:
    """The same under the name and signature that Qwen3-Next's layer uses."""
    if not norm_before_gate or group_size not in (None, x.shape[-1]) or out is not None:
        raise NotImplementedError("gate before norm, norm groups and a given output have no CPU form")
    gate = z.reshape(x.shape)
    return _layer_norm_gated_fwd(x, gate, weight, bias, activation, eps, is_rms_norm=is_rms_norm)[0], None, None


def _fused_gate_sigmoid_mul_add(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    final_hidden_states: torch.Tensor,
) -> None:
    """Adds sigmoid(hidden . gate) * shared expert to `final_hidden_states` [tokens, width], in place."""
    score = (hidden_states.float() * gate_weight.float().reshape(1, -1)).sum(-1, keepdim=True)
    gate = batch_invariance.by_row(torch.sigmoid, score)
    final_hidden_states.add_((gate * shared_output).to(final_hidden_states.dtype))


_REPLACEMENTS = {
    "sglang.kernels.ops.attention.fla.fused_norm_gate.layer_norm_gated_fwd": _layer_norm_gated_fwd,
    "sglang.kernels.ops.attention.fla.layernorm_gated._layer_norm_fwd": _layer_norm_fwd,
    "sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add": _fused_gate_sigmoid_mul_add,
    # Called by SGLang when deterministic inference is on; its own replaces CUDA matrix products by Triton kernels.
    "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode": batch_invariance.install,
}
