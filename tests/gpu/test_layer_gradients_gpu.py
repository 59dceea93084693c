"""The actor's layers at true widths: in every gradient their kernels lose what bfloat16 costs, and no more.

python -m pytest tests/gpu/test_layer_gradients_gpu.py -q -s
"""

import importlib.util
import re
from collections import defaultdict
from math import fsum, sqrt

import pytest
import torch
from layer_gradient_workers import Comparison
from train_support import in_module_worker, run_processes

LENGTHS = (1, 63, 64, 65, 2, 1000, 3, 127, 4097, 31)
SMALL = (1, 5, 64, 65, 3)
FEW = 16
# An error that the layers are given, and the tensor that must show it.
KERNEL_ERRORS = {"convolution over ends": "worst token", "scaled gradients of weights": "router.weight"}
ERRORS = {"scaled gradients of gates": "shared_experts.gate_weight"}

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: elsewhere no kernel runs")


def _check(backend, lengths, tiny, planted):
    arguments = ("layer_gradient_workers", "compare", backend, lengths, tiny, tuple(planted))
    compared = run_processes(1, in_module_worker, *arguments)[0]
    found = {error: _few_together(comparisons) for error, comparisons in compared.items()}
    _print(found[""])
    assert len(compared[""]) > 50
    large = [one for one in found[""] if one.size >= 2048]
    assert all(one.plain_error < 0.1 for one in large), "plain layers lose so much that nothing is shown"
    assert not _wrong(found[""])
    for error, tensor in planted.items():
        wrong = _wrong(found[error])
        print(f"{error}: seen by {len(wrong)} of {len(found[error])} tensors")
        assert any(one.name.endswith(tensor) for one in wrong), error


def _few_together(comparisons):
    """Tensors of a few elements as one with those of the same name in other layers: of four elements two samples of the
    same roundings may differ by any factor."""
    groups = defaultdict(list)
    for one in comparisons:
        groups[re.sub(r"layers\.\d+", "layers", one.name) if one.size < FEW else one.name].append(one)
    return [_joined(name, group) for name, group in groups.items()]


def _joined(name, group):
    def mean_of(what):
        return fsum(getattr(one, what) for one in group) / len(group)

    def root_mean_square_of(what):
        return sqrt(fsum(getattr(one, what) ** 2 for one in group) / len(group))

    errors = root_mean_square_of("found_error"), root_mean_square_of("plain_error")
    size = sum(one.size for one in group)
    return Comparison(name, size, mean_of("norm"), *errors, mean_of("found_turn"), mean_of("plain_turn"))


def _wrong(comparisons):
    return [one for one in comparisons if _of_allowed(one) > 1]


def _of_allowed(one):
    """The share of what rounding explains: plain torch in the same dtype rounds more often than the kernels. Of a few
    elements two samples of the same roundings differ more."""
    most = 1.5 + 32 / one.size
    error = one.found_error / (most * one.plain_error + 2e-3)
    return max(error, one.found_turn / (most**2 * one.plain_turn + 4e-6))


def _print(comparisons):
    print(f"\n{'of allowed':>10}{'error':>10}{'plain':>10}{'1 - cos':>10}{'plain':>10}{'norm':>11}{'size':>14}  tensor")
    for one in sorted(comparisons, key=_of_allowed, reverse=True):
        errors = (one.found_error, one.plain_error, one.found_turn, one.plain_turn)
        shown = "".join(f"{value:10.1e}" for value in errors)
        print(f"{_of_allowed(one):10.2f}{shown}{one.norm:11.2e}{one.size:14,}  {one.name}")


@on_gpu
@pytest.mark.timeout(600)  # on a bare host most of it compiles
@pytest.mark.parametrize("backend", ["fla", "flashqla"])
def test_kernels_lose_no_more_than_their_dtype_and_wrong_ones_are_seen(backend):
    if backend == "flashqla" and importlib.util.find_spec("flash_qla") is None:
        pytest.skip("flash_qla is not installed")
    _check(backend, LENGTHS, tiny=False, planted=KERNEL_ERRORS | ERRORS)


@pytest.mark.slow
def test_the_comparison_sees_a_wrong_gradient_of_a_tiny_model():
    _check("torch", SMALL, tiny=True, planted=ERRORS)
