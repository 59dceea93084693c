"""Digests of tensors, for workers to return: the test compares them, and says which differ."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch


def bits(value: Any) -> Any:
    """Of the bytes of a tensor or an array, with type and shape; of a list's or a mapping's values, each; other values
    as they are."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        return _digest(str(value.dtype), value.shape, value.view(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(value, np.ndarray):
        return _digest(str(value.dtype), value.shape, np.ascontiguousarray(value).tobytes())
    if isinstance(value, Mapping):
        return {name: bits(one) for name, one in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [bits(one) for one in value]
    return value


def _digest(dtype: str, shape: Iterable[int], content: bytes) -> str:
    return f"{dtype} {list(shape)} {hashlib.sha256(content).hexdigest()[:16]}"
