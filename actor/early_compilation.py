"""Compiling the kernels of Gated DeltaNet while engines start, in next to no device memory.

They are the ones that take longest: 140 candidates of tuning runs, and a TileLang kernel of half a minute. Engines
measure free memory meanwhile, so this holds megabytes, and tuning itself waits for packs of true size and a GPU that
nobody else uses.
"""

import torch

from actor.device import compute_device, release_cached_memory
from actor.layers.gdn_kernels import GdnKernels
from actor.layers.packed import PackedSequences
from rlpipe.config.actor import ParallelConfig
from rlpipe.jit_monitor import JitMonitor
from rlpipe.jit_monitor.hooks.parallel_tuning import compiling_only
from rlpipe.model.description import GatedDeltaNetSizes

_TOKENS = 512  # of any pack: no kernel has variants for lengths


def compile_gated_delta_net(
    kernels: GdnKernels, sizes: GatedDeltaNetSizes, parallel: ParallelConfig, dtype: torch.dtype, monitor: JitMonitor
) -> None:
    """Compile forward and backward for the heads of one rank; nothing where the kernels are plain torch."""
    if kernels.backend == "torch":
        return
    with compiling_only(monitor.recorder):
        _run(kernels, sizes, parallel.tensor * parallel.context, dtype)
    release_cached_memory()


def _run(kernels: GdnKernels, sizes: GatedDeltaNetSizes, ranks: int, dtype: torch.dtype) -> None:
    """One pack of two sequences through convolution and delta rule, with tensors laid out as in `GatedDeltaNet`."""
    device = compute_device()
    sequences = PackedSequences(qkv_format="thd", ends=(0, _TOKENS // 3, _TOKENS), device=device)
    key_heads, value_heads = sizes.key_heads // ranks, sizes.value_heads // ranks
    keys, values = key_heads * sizes.key_dim, value_heads * sizes.value_dim
    widths = [keys, keys, values]
    projected = torch.zeros(
        _TOKENS, sum(widths) + values + 2 * value_heads, dtype=dtype, device=device, requires_grad=True
    )
    weights = [torch.zeros(width, sizes.conv_width, dtype=dtype, device=device, requires_grad=True) for width in widths]
    channels = (sizes.key_dim, sizes.value_dim)
    query, key, value, _, beta, alpha = kernels.heads(projected, weights, channels, sequences)
    out = kernels.delta_rule(query, key, value, -alpha.float().exp(), beta.float().sigmoid(), sequences)
    out.backward(torch.zeros_like(out))
