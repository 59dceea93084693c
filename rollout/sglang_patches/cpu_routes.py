"""SGLang's record of expert choices on a machine without CUDA: no pinned memory, and batches of any length."""

import torch

from rlpipe.shared.replaced_parts import replaces

replaces(
    "sglang.srt.state_capturer.base:BaseHostCache.__init__",
    "sglang.srt.state_capturer.base:BaseDeviceCache.capture",
    why="they pin memory, and size a buffer by the length of a chunk",
    drop_when="they do neither on a CPU",
)


def install() -> None:
    """Call in a scheduler process before the engine is made."""
    from sglang.srt.state_capturer import base

    base.BaseHostCache.__init__ = _host_cache
    base.BaseDeviceCache.capture = _capture


def _host_cache(cache: object, num_tokens: int, num_layers: int, topk_size: int, name: str) -> None:
    """As SGLang's, in memory that is not pinned."""
    buffer = torch.zeros((num_tokens, num_layers, topk_size), dtype=torch.int32)
    vars(cache).update(buffer=buffer, num_tokens=num_tokens, num_layers=num_layers, topk_size=topk_size, name=name)


def _capture(cache: object, layer_id: int, topk_indices: torch.Tensor) -> None:
    """As SGLang's, which sizes its buffer by the length of a chunk: without chunks a prefill can be longer."""
    state, tokens = vars(cache), len(topk_indices)
    if tokens > len(state["buffer"]):
        state["buffer"] = state["buffer"].new_zeros((tokens, *state["buffer"].shape[1:]))
    state["buffer"][:tokens, layer_id, :] = topk_indices
