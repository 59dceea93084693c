"""Element-wise stretches between matrix products, each one kernel on a GPU instead of one for every operator.

These stretches move bytes and compute almost nothing: a norm in float32 written as single operators moves its input
eight times, as one kernel once. `torch.compile` generates the kernel and that of the backward pass. The number of rows
is dynamic, so packs of another length compile nothing (docs/jit.md). On a CPU the function itself runs.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

Returned = TypeVar("Returned", torch.Tensor, tuple[torch.Tensor, ...])

# A process-wide setting of torch: a function that is compiled for more kinds of input runs uncompiled for the rest. A
# norm alone meets about eight: hidden states, queries and keys, with gradients, without, and in recomputation.
torch._dynamo.config.recompile_limit = 32


def fused(function: Callable[..., Returned]) -> Callable[..., Returned]:
    """A pure function of tensors as one kernel where its first argument lies on a GPU.

    Tensor arguments of two or more dimensions have their rows, whose number changes from pack to pack, in dimension 0.
    Intermediate values keep float32 where separate operators would round them to the dtype of the tensors.
    """
    compiled = torch.compile(function)

    @wraps(function)
    def call(*arguments: Any) -> Returned:
        if not arguments[0].is_cuda:
            return function(*arguments)
        for argument in arguments:
            if isinstance(argument, torch.Tensor) and argument.ndim > 1:
                torch._dynamo.maybe_mark_dynamic(argument, 0)
        return compiled(*arguments)

    return call
