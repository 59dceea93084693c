"""MKL's vector functions, each chosen by one thread before several share it.

MKL 2024.2, which torch's CPU builds hold, chooses the kernel of an elementwise function when that is first called.
Where the threads of one operation are the first to call it, one of them can be given a kernel of half the digits, for
that one call (https://github.com/pytorch/pytorch/issues/188792): a rotary table was off by 4e-5 in its second half.
"""

import torch

FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "log", "log10", "log2", "sin", "sqrt", "tan"),
    *("tanh", "trunc"),
)
"""Those that torch leaves to MKL (ATen/cpu/vml.h)."""


def choose_vector_kernels() -> None:
    """Call it before the first operation of several threads; it takes milliseconds, once."""
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype)
        for function in FUNCTIONS:
            getattr(torch, function)(one)
