"""Puts a function where SGLang looks for a torch operator."""

import torch


def operator(function):
    """Makes `function` available as `torch.ops.sgl_kernel.<its name>`."""
    setattr(torch.ops.sgl_kernel, function.__name__, function)
    return function
