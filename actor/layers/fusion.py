"""Element-wise stretches between matrix products, each one kernel on a GPU instead of one for every operator.

These stretches move bytes and compute almost nothing: a norm in float32 written as single operators moves its input
eight times, as one kernel once. What every layer has is a Triton kernel of ours, which the host starts quickly; of the
rest `torch.compile` generates the kernel and that of the backward pass. The number of rows is dynamic, so packs of
another length compile nothing (docs/jit.md). On a CPU the function itself runs.
"""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, TypeVar

import torch

from rlpipe.shared.replaced_parts import relies_on

_RECOMPILE_LIMIT = relies_on(
    "torch._dynamo.config:recompile_limit",
    why="a process-wide setting: a function compiled for more kinds of input runs uncompiled for the rest",
    drop_when="torch.compile takes the limit of one function",
)
relies_on(
    "torch._dynamo:maybe_mark_dynamic",
    why="the number of rows is dynamic, so that packs of another length compile nothing",
    drop_when="torch.compiler has it",
)

Returned = TypeVar("Returned")

# A norm alone meets about eight kinds: hidden states, queries and keys, with gradients, without, and in recomputation.
_RECOMPILE_LIMIT.original()
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


def computed_by(module: str) -> Callable[[Callable[..., Returned]], Callable[..., Returned]]:
    """A pure function of tensors, which the function of the same name in `module` computes where its first argument
    lies on a GPU; the module is imported only then."""

    def with_kernel(function: Callable[..., Returned]) -> Callable[..., Returned]:
        @wraps(function)
        def call(*arguments: Any) -> Returned:
            if not arguments[0].is_cuda:
                return function(*arguments)
            result: Returned = getattr(import_module(module), function.__name__)(*arguments)
            return result

        return call

    return with_kernel
