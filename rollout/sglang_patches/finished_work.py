"""A device finishes what it was given before its memory is given back.

SGLang calls itself idle when every answer is out, and unmaps memory before it waits for the device. With drafts, the
next ones are computed after an answer's last token has left: a kernel that still runs then reads memory that is gone,
which ends the engine with an illegal memory access.
"""

from typing import Any

from rlpipe.shared.replaced_parts import replaces

_RELEASE = replaces(
    "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager.release_memory_occupation",
    why="kernels that follow the last token run on while their memory is unmapped",
    drop_when="SGLang waits for the device before it pauses the memory saver",
)


def install() -> None:
    """In a scheduler's process, before it starts."""
    import torch
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    release = _RELEASE.original()

    def finish_and_release(self: SchedulerWeightUpdaterManager, request: Any) -> Any:
        torch.get_device_module().synchronize()
        return release(self, request)

    SchedulerWeightUpdaterManager.release_memory_occupation = finish_and_release
