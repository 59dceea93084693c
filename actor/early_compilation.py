"""Compiling kernels while engines start, in little device memory, since engines measure what is free meanwhile.

Those of Gated DeltaNet take longest: 140 candidates of tuning runs, and a TileLang kernel of half a minute. Tuning
itself waits for packs of true size and a GPU that nobody else uses. cuDNN plans attention for each of the lengths that
long sequences are filled up to.
"""

import torch

from actor.device import compute_device, release_cached_memory
from actor.layers.causal_attention import Heads, LongShapes, plan_long_sequences
from actor.layers.gdn_kernels import GdnKernels
from actor.layers.packed import PackedSequences
from rlpipe.config.actor import ParallelConfig
from rlpipe.config.root import Config
from rlpipe.jit_monitor import JitMonitor
from rlpipe.jit_monitor.compile_turns import after_the_first
from rlpipe.jit_monitor.hooks.parallel_tuning import compiling_only
from rlpipe.model.description import GatedDeltaNetSizes, TrainableModel

_TOKENS = 256  # of any sequence: no kernel of Gated DeltaNet has variants for lengths
_PLANNING_BYTES = 2**29


def compile_early(config: Config, model: TrainableModel, kernels: GdnKernels | None, monitor: JitMonitor) -> None:
    """What `model` needs of one rank; kernels: of Gated DeltaNet, None where no layer has it."""
    actor, dtype = config.actor, getattr(torch, config.actor.dtype)
    if kernels is not None and model.gated_delta_net is not None:
        compile_gated_delta_net(kernels, model.gated_delta_net, actor.parallel, dtype, monitor)
    if actor.parallel.context == 1 and model.latent_attention is None:
        heads = Heads.of_rank(model.heads, model.kv_heads, model.head_dim, actor.parallel.tensor, dtype)
        longest = min(config.longest_sequence_tokens, actor.pack_tokens)
        plan_attention(heads, longest, actor.recompute.chosen != "none")


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


def plan_attention(heads: Heads, longest_tokens: int, recomputes: bool) -> None:
    """Of whole sequences, as far as planning takes half a gigabyte at most; the warm-up plans the rest."""
    every = LongShapes.of(longest_tokens, context_parallel=1, rank=0)
    early = [tokens for tokens in every.squares if heads.planning_bytes(tokens) <= _PLANNING_BYTES]
    plan_long_sequences(heads, LongShapes(tuple(early)), compute_device(), recomputes)
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
