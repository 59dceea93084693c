"""MKL's vector functions, each chosen by one thread before several share it.

MKL 2024.2, which torch's CPU builds hold, chooses the kernel of an elementwise function when that is first called.
Where the threads of one operation are the first to call it, one of them can be given a kernel of a quarter of the
digits, for that one call (https://github.com/pytorch/pytorch/issues/188792): on a busy machine about one process in a
hundred had a pass whose second half was off by 4e-5.
"""

import torch

_FUNCTIONS = (
    *("abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1", "floor", "log"),
    *("log10", "log1p", "log2", "round", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
)


def choose_vector_kernels() -> None:
    """Call it before the first operation of several threads; it takes a millisecond."""
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype)
        for function in _FUNCTIONS:
            getattr(torch, function)(one)
