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
from rlpipe.jit_monitor.compile_turns import after_the_first
from rlpipe.jit_monitor.hooks.parallel_tuning import compiling_only
from rlpipe.model.description import GatedDeltaNetSizes

_TOKENS = 256  # of any sequence: no kernel has variants for lengths


def compile_gated_delta_net(
    kernels: GdnKernels, sizes: GatedDeltaNetSizes, parallel: ParallelConfig, dtype: torch.dtype, monitor: JitMonitor
) -> None:
    """Compile forward and backward for the heads of one rank; nothing where the kernels are plain torch. Ranks of a
    machine have the same kernels: one compiles them, the others load them after it."""
    if kernels.backend == "torch":
        return
    ranks = parallel.tensor * parallel.context
    processors = torch.cuda.get_device_properties(compute_device()).multi_processor_count
    with after_the_first(f"{kernels.backend} {sizes} {ranks} {dtype}"), compiling_only(monitor.recorder):
        for count in sequence_counts(kernels.backend, sizes.value_heads // ranks, processors):
            _run(kernels, sizes, ranks, count, dtype)
    release_cached_memory()


def sequence_counts(backend: str, value_heads: int, processors: int) -> list[int]:
    """Numbers of sequences in a pack that meet every variant of a backend's kernels, the commonest first.

    FlashQLA splits heads in one, two or four by sequences times heads per multiprocessor of the GPU; as each of its
    classes but the last is twice as wide as it begins, powers of two meet them all. FLA has one variant.
    """
    if backend != "flashqla":
        return [2]
    counts = [1]
    while counts[-1] * value_heads < processors:
        counts.append(2 * counts[-1])
    return counts[::-1]


def _run(kernels: GdnKernels, sizes: GatedDeltaNetSizes, ranks: int, count: int, dtype: torch.dtype) -> None:
    """A pack of `count` sequences through convolution and delta rule, with tensors laid out as in `GatedDeltaNet`."""
    device = compute_device()
    tokens = count * _TOKENS
    sequences = PackedSequences(qkv_format="thd", ends=tuple(range(0, tokens + 1, _TOKENS)), device=device)
    key_heads, value_heads = sizes.key_heads // ranks, sizes.value_heads // ranks
    keys, values = key_heads * sizes.key_dim, value_heads * sizes.value_dim
    widths = [keys, keys, values]
    projected = torch.zeros(
        tokens, sum(widths) + values + 2 * value_heads, dtype=dtype, device=device, requires_grad=True
    )
    weights = [torch.zeros(width, sizes.conv_width, dtype=dtype, device=device, requires_grad=True) for width in widths]
    channels = (sizes.key_dim, sizes.value_dim)
    query, key, value, _, beta, alpha = kernels.heads(projected, weights, channels, sequences)
    out = kernels.delta_rule(query, key, value, -alpha.float().exp(), beta.float().sigmoid(), sequences)
    out.backward(torch.zeros_like(out))
