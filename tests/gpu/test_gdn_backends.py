"""Kernels of Gated DeltaNet layers give what plain torch gives, forward and backward, and are the ones asked for."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from actor.layers.gdn_backend import choose_gdn_backend
from actor.layers.gdn_kernels import load_kernels
from actor.layers.gdn_torch import chunked_delta_rule, projected_heads, unit_heads
from actor.layers.packed import PackedSequences
from rlpipe.jit_monitor import JitMonitor
from rlpipe.model.description import GatedDeltaNetSizes
from rlpipe.shared.errors import RlpipeError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: these kernels have no other device")

PROJECT = Path(__file__).parents[2]
SIZES = GatedDeltaNetSizes(4, 8, key_dim=128, value_dim=128, conv_width=4, fused_projections=False)
PACKS = {"one": (0, 700), "several": (0, 1, 100, 256, 640, 1200)}
FLA_ALONE = """
import sys, torch
from actor.layers.gdn_kernels import load_kernels
from actor.layers.packed import PackedSequences
device = torch.device("cuda")
sequences = PackedSequences(qkv_format="thd", ends=(0, 128), device=device)
heads = [torch.randn(128, *shape, device=device, dtype=torch.bfloat16) for shape in ((2, 128), (2, 128), (4, 128))]
gate = torch.rand(128, 4, device=device)
load_kernels("fla").delta_rule(*heads, -gate, gate, sequences)
print(sorted(name for name in sys.modules if name.split(".")[0] == "flash_qla"))
"""


@pytest.fixture(scope="module", autouse=True)
def monitor() -> Iterator[JitMonitor]:
    """With it all cores compile what Triton tunes."""
    installed = JitMonitor.install()
    yield installed
    installed.uninstall()


def _kernels(backend: str):
    try:
        return load_kernels(choose_gdn_backend(backend, SIZES, "bfloat16").backend)
    except RlpipeError as error:
        pytest.skip(str(error))


def _sequences(ends: tuple[int, ...]) -> PackedSequences:
    return PackedSequences(qkv_format="thd", ends=ends, device=torch.device("cuda"))


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("backend", ["fla", "flashqla"])
def test_the_delta_rule_and_its_gradients_are_those_of_plain_torch(backend, pack):
    kernels = _kernels(backend)
    assert kernels.backend == backend
    ends = PACKS[pack]
    torch.manual_seed(0)
    shapes = ((4, 128), (4, 128), (8, 128), (8,), (8,))
    narrow = [torch.randn(ends[-1], *shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    upstream = torch.randn(ends[-1], 8, 128, device="cuda")

    def run(rule, inputs):
        leaves = [one.detach().requires_grad_() for one in inputs]
        query, key, value, decay, beta = leaves
        out = rule(
            unit_heads(query),
            unit_heads(key),
            value,
            -decay.float().exp() * 0.2,
            beta.float().sigmoid(),
            _sequences(ends),
        )
        return out, torch.autograd.grad((out.float() * upstream).sum(), leaves)

    out, gradients = run(kernels.delta_rule, narrow)
    wanted, exact = run(chunked_delta_rule, [one.float() for one in narrow])
    assert _relative(out, wanted) < 0.01
    for name, found, right in zip(("query", "key", "value", "decay", "beta"), gradients, exact, strict=True):
        assert _relative(found, right) < 0.03, name


@pytest.mark.parametrize("pack", PACKS)
def test_the_heads_and_their_gradients_are_those_of_plain_torch(pack):
    """Both backends take them from the same kernels. The projection's columns are not a multiple of 16 bytes."""
    kernels, sequences = _kernels("fla"), _sequences(PACKS[pack])
    tokens = PACKS[pack][-1]
    torch.manual_seed(0)
    projected = torch.randn(tokens, 2 * 4 * 128 + 2 * 8 * 96 + 2 * 8 + 2, device="cuda", dtype=torch.bfloat16)[:, 1:-1]
    weights = [torch.randn(width, 4, device="cuda", dtype=torch.bfloat16) for width in (512, 512, 768)]
    shapes = ((4, 128), (4, 128), (8, 96), (768,), (8,), (8,))
    upstream = [torch.randn(tokens, *shape, device="cuda") for shape in shapes]

    def run(heads, *inputs):
        leaves = [one.detach().requires_grad_() for one in inputs]
        outputs = heads(leaves[0], leaves[1:], (128, 96), sequences)
        loss = sum((out.float() * direction).sum() for out, direction in zip(outputs, upstream, strict=True))
        return [*outputs, *torch.autograd.grad(loss, leaves)]

    exact = run(projected_heads, projected.float(), *(one.float() for one in weights))
    for found, right in zip(run(kernels.heads, projected, *weights), exact, strict=True):
        assert found.shape == right.shape
        assert _relative(found, right) < 0.01


def test_heads_of_packs_of_other_lengths_compile_nothing(monitor):
    kernels = _kernels("fla")
    weights = [torch.randn(width, 4, device="cuda", dtype=torch.bfloat16) for width in (64, 64, 128)]

    def run(tokens: int) -> None:
        projected = torch.randn(tokens, 388, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        sum(out.sum() for out in kernels.heads(projected, weights, (64, 64), _sequences((0, tokens)))).backward()

    run(96)
    monitor.drain()
    for tokens in (1, 77, 300, 4096, 70_000):
        run(tokens)
    assert not [event for event in monitor.drain().events if event.compiled]


def test_fla_is_not_replaced_by_flashqla():
    """fla runs FlashQLA in its place wherever it can import it, unless told otherwise."""
    _kernels("fla")
    done = subprocess.run(
        [sys.executable, "-c", FLA_ALONE], cwd=PROJECT, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
