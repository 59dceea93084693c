"""How long calls take on this process's device, and how fast it copies."""

import time
from collections.abc import Callable

import torch

from actor.device import compute_device, synchronize

_WARM_UP, _TRIES, _ROUNDS = 3, 3, 10


def seconds_per_call(call: Callable[[], object], rounds: int = _ROUNDS) -> float:
    """Mean of `rounds` calls that follow each other, after some that are not counted."""
    for _ in range(_WARM_UP):
        call()
    synchronize()
    begin = time.perf_counter()
    for _ in range(rounds):
        call()
    synchronize()
    return (time.perf_counter() - begin) / rounds


def best_seconds(call: Callable[[], object]) -> float:
    """Of a few tries of `seconds_per_call`: what the device can do."""
    return min(seconds_per_call(call) for _ in range(_TRIES))


def copied_bytes_per_second() -> float:
    """Read and written together, of copying a tensor that no cache holds."""
    source = torch.empty(2**29 if torch.cuda.is_available() else 2**24, dtype=torch.bfloat16, device=compute_device())
    target = torch.empty_like(source)
    return 2 * source.numel() * source.element_size() / best_seconds(lambda: target.copy_(source))


def product_flops_per_second(side: int, dtype: torch.dtype) -> float:
    """Of a product of square matrices: what no product of a layer or head is quicker than."""
    left, right = (torch.randn(side, side, device=compute_device(), dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)

    return float(2 * side**3 / best_seconds(lambda: torch.mm(left, right, out=out)))
