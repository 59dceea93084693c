"""A device finishes what it was given before memory is taken away from it.

Pausing SGLang's memory saver unmaps memory and waits for nothing. SGLang calls itself idle by what it knows on the host
and begins to copy buffers of the model in the very call that unmaps them next. A kernel that is late, as where others
share the GPU, reads memory that is gone, and the engine ends with an illegal memory access.
"""

from typing import Any

from rlpipe.shared.replaced_parts import replaces

_PAUSE = replaces(
    "sglang.srt.utils.torch_memory_saver_adapter:_TorchMemorySaverAdapterReal.pause",
    "sglang.srt.utils.torch_memory_saver_adapter:_TorchMemorySaverAdapterReal",
    why="memory is unmapped under kernels that were launched before",
    drop_when="SGLang waits for the device before each pause of its memory saver, as its pull request 37932 does",
)


def install() -> None:
    """In a scheduler's process, before it starts."""
    import torch

    pause, saver = _PAUSE.original(0), _PAUSE.original(1)

    def finish_and_pause(self: Any, tag: str) -> Any:
        torch.get_device_module().synchronize()
        return pause(self, tag)

    saver.pause = finish_and_pause
