"""Attention of packs on a GPU: the kernel that was meant ran, and gives what float32 gives, forward and backward."""

import time
from itertools import pairwise

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from actor.layers.causal_attention import Heads, LongShapes, Segments, causal_attention, plan_long_sequences
from actor.layers.cudnn_attention import Part, long_parts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: these kernels have no other device")

PACKS = {
    "short": (0, 100, 612, 2000),
    "long": (0, 3000),
    "mixed": (0, 100, 2700, 2750, 2751, 4800, 8000, 8000, 8010),
}
HEADS = {"wide": (8, 2, 256), "usual": (16, 8, 128), "narrow": (8, 4, 64)}
SCALE = 0.1


def _attend(inputs: list[torch.Tensor], *ends: tuple[int, ...]) -> torch.Tensor:
    """ends: of the segments of queries, and of those of keys."""
    segments = [Segments(one, torch.tensor(one, dtype=torch.int32, device="cuda")) for one in ends]
    return causal_attention(*inputs, *segments, SCALE)


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("pack", PACKS)
def test_values_and_gradients_are_those_in_float32(pack, heads):
    expected = pack != "short" and torch.cuda.get_device_capability() >= (9, 0)
    assert _cudnn_runs_beside_float32(PACKS[pack], PACKS[pack], heads) == expected


def _cudnn_runs_beside_float32(query_ends: tuple[int, ...], key_ends: tuple[int, ...], heads: str) -> bool:
    """Whether cuDNN ran, after values and gradients were compared."""
    queries, keys, channels = HEADS[heads]
    torch.manual_seed(0)
    sizes = ((query_ends[-1], queries), (key_ends[-1], keys), (key_ends[-1], keys))
    inputs = [torch.randn(*size, channels, device="cuda").bfloat16() for size in sizes]
    upstream = torch.randn(*sizes[0], channels, device="cuda")

    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [one.to(dtype).requires_grad_() for one in inputs]
        out = _attend(leaves, query_ends, key_ends)
        return [out, *torch.autograd.grad((out.float() * upstream).sum(), leaves)]

    wanted = run(torch.float32)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        found = run(torch.bfloat16)
    for name, one, right in zip(("out", "query", "key", "value"), found, wanted, strict=True):
        assert _relative(one, right) < 0.01, name
    return any("cudnn" in event.key for event in profiler.key_averages())


@pytest.mark.parametrize("tokens", [3000, 3072, 3500, 4352])
@pytest.mark.parametrize("heads", HEADS)
def test_cudnn_gives_what_float32_gives(heads, tokens):
    """At all widths, also those that causal_attention keeps from it."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("cuDNN is used from Hopper on")
    queries, keys, channels = HEADS[heads]
    torch.manual_seed(0)
    inputs = [torch.randn(tokens, count, channels, device="cuda").bfloat16() for count in (queries, keys, keys)]
    found = long_parts(*inputs, [Part(slice(0, tokens), slice(0, tokens))], [], SCALE)
    assert _relative(found, _attend([one.float() for one in inputs], (0, tokens), (0, tokens))) < 0.01


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("heads", HEADS)
def test_a_pack_keeps_its_inputs_and_its_result(pack, heads):
    """And once more what short sequences give, where they lie beside long ones."""
    ends, (queries, keys, channels) = PACKS[pack], HEADS[heads]
    inputs = [torch.randn(ends[-1], count, channels, device="cuda").bfloat16() for count in (queries, keys, keys)]
    leaves = [one.requires_grad_() for one in inputs]
    _attend(leaves, ends, ends).sum().backward()  # kernels are planned and workspaces there
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = _attend(leaves, ends, ends)
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    short = sum(end - start for start, end in pairwise(ends) if end - start < 3000) if pack == "mixed" else 0
    sums = 2 * ends[-1] * queries * 4
    assert kept <= out.nbytes * (1 + short / ends[-1]) + sums + 2**22


PIECES = {
    "first and last": ((0, 3000, 6000), (0, 3000, 15000)),
    "in the middle": ((0, 3500, 7000), (0, 7000, 17500)),
    "with short ones": ((0, 700, 1400, 4500, 7600), (0, 1400, 3500, 9700, 19000)),
}


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("pack", PIECES)
def test_pieces_of_long_sequences_give_what_float32_gives(pack, heads):
    assert _cudnn_runs_beside_float32(*PIECES[pack], heads) == (torch.cuda.get_device_capability() >= (9, 0))


@pytest.mark.parametrize("group", [(1, 0), (2, 1)])
def test_all_shapes_of_long_sequences_are_planned(group):
    shapes = LongShapes.of(14_000, *group)
    planned = plan_long_sequences(Heads(8, 2, 256, torch.bfloat16), shapes, torch.device("cuda"), recomputes=False)
    count = len(shapes.squares) + len(shapes.rectangles)
    assert planned == (count if torch.cuda.get_device_capability() >= (9, 0) else 0)


TIMED = Heads(4, 1, 256, torch.bfloat16)
"""No other test has as many heads, so that what is not planned here is planned nowhere."""


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="cuDNN runs on Hopper only"
)
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_planned_length_is_not_planned_again_where_passes_run(recomputes):
    """Forward on this thread, backward on autograd's, where layers are computed again."""
    planned, others = (11_264, (9_216, 10_240)) if recomputes else (5_632, (4_608, 5_120))
    plan_long_sequences(TIMED, LongShapes((planned,)), torch.device("cuda"), recomputes)
    _, unplanned = (_seconds_of_passes(tokens, recomputes) for tokens in others)  # the first loads what all need
    assert _seconds_of_passes(planned, recomputes) < unplanned / 3


def _seconds_of_passes(tokens: int, recomputes: bool) -> float:
    sizes = (TIMED.queries, TIMED.key_values, TIMED.key_values)
    inputs = [
        torch.randn(tokens, heads, TIMED.channels, dtype=TIMED.dtype, device="cuda", requires_grad=True)
        for heads in sizes
    ]
    torch.cuda.synchronize()
    begin = time.perf_counter()
    if recomputes:
        out = checkpoint(lambda *rows: _attend(list(rows), (0, tokens), (0, tokens)), *inputs, use_reentrant=True)
    else:
        out = _attend(inputs, (0, tokens), (0, tokens))
    out.sum().backward()
    torch.cuda.synchronize()
    return time.perf_counter() - begin
