"""Kernels of Gated DeltaNet layers give what plain torch gives, forward and backward, and are the ones asked for."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from actor.layers.gdn_backend import choose_gdn_backend
from actor.layers.gdn_kernels import load_kernels
from actor.layers.gdn_torch import causal_convolution, chunked_delta_rule
from actor.layers.packed import PackedSequences
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
        out = rule(query, key, value, -decay.float().exp() * 0.2, beta.float().sigmoid(), _sequences(ends))
        return out, torch.autograd.grad((out.float() * upstream).sum(), leaves)

    out, gradients = run(kernels.delta_rule, narrow)
    wanted, exact = run(chunked_delta_rule, [one.float() for one in narrow])
    assert _relative(out, wanted) < 0.01
    for name, found, right in zip(("query", "key", "value", "decay", "beta"), gradients, exact, strict=True):
        assert _relative(found, right) < 0.03, name


@pytest.mark.parametrize("backend", ["fla", "flashqla"])
def test_the_convolution_and_its_gradients_are_those_of_plain_torch(backend):
    kernels = _kernels(backend)
    sequences = _sequences(PACKS["several"])
    torch.manual_seed(0)
    x = torch.randn(1200, 256, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(256, 4, device="cuda", dtype=torch.bfloat16)
    upstream = torch.randn(1200, 256, device="cuda")

    def run(convolve, *inputs):
        leaves = [one.detach().requires_grad_() for one in inputs]
        out = convolve(*leaves, sequences)
        return [out, *torch.autograd.grad((out.float() * upstream).sum(), leaves)]

    exact = run(causal_convolution, x.float(), weight.float())
    for found, right in zip(run(kernels.convolve, x, weight), exact, strict=True):
        assert _relative(found, right) < 0.01


def test_fla_is_not_replaced_by_flashqla():
    """fla runs FlashQLA in its place wherever it can import it, unless told otherwise."""
    _kernels("fla")
    done = subprocess.run(
        [sys.executable, "-c", FLA_ALONE], cwd=PROJECT, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
