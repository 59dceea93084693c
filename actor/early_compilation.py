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

_TOTALS = (512, 500)  # FLA's convolution has a variant for multiples of 16


def compile_gated_delta_net(
    kernels: GdnKernels, sizes: GatedDeltaNetSizes, parallel: ParallelConfig, dtype: torch.dtype, monitor: JitMonitor
) -> None:
    """Compile forward and backward for the heads of one rank; nothing where the kernels are plain torch."""
    if kernels.backend == "torch":
        return
    with compiling_only(monitor.recorder):
        for total in _TOTALS:
            _run(kernels, sizes, parallel.tensor * parallel.context, dtype, total)
    release_cached_memory()


def _run(kernels: GdnKernels, sizes: GatedDeltaNetSizes, ranks: int, dtype: torch.dtype, total: int) -> None:
    """One pack of two sequences through convolution and delta rule, with tensors laid out as in `GatedDeltaNet`."""
    device = compute_device()
    sequences = PackedSequences(qkv_format="thd", ends=(0, total // 3, total), device=device)
    key_heads, value_heads = sizes.key_heads // ranks, sizes.value_heads // ranks
    keys, values = key_heads * sizes.key_dim, value_heads * sizes.value_dim
    widths = [keys, keys, values]
    projected = torch.zeros(
        total, sum(widths) + values + 2 * value_heads, dtype=dtype, device=device, requires_grad=True
    )
    weights = [torch.zeros(width, sizes.conv_width, dtype=dtype, device=device, requires_grad=True) for width in widths]
    *mixed, rest = projected.split([*widths, values + 2 * value_heads], -1)
    query, key, value = (kernels.convolve(part, weight, sequences) for part, weight in zip(mixed, weights, strict=True))
    gate = rest[:, :value_heads].float()
    out = kernels.delta_rule(
        query.unflatten(-1, (-1, sizes.key_dim)),
        key.unflatten(-1, (-1, sizes.key_dim)),
        value.unflatten(-1, (-1, sizes.value_dim)),
        -gate.exp(),
        gate.sigmoid(),
        sequences,
    )
    out.backward(torch.zeros_like(out))
