"""Gives memory back as a scheduler's process does once it is set up; prints what was done in which order."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers import scheduler
from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.utils import torch_memory_saver_adapter

from rollout.sglang_patches.scheduler_process import run_scheduler

done: list[str] = []


def main() -> None:
    torch.get_device_module().synchronize = lambda: done.append("wait")
    torch.distributed.barrier = lambda *_: None
    torch_memory_saver_adapter._memory_saver = SimpleNamespace(pause=lambda tag: done.append(f"unmap {tag}"))
    scheduler.run_scheduler_process = release
    run_scheduler(SimpleNamespace(enable_deterministic_inference=False, device="cpu", speculative_algorithm=None))
    print(json.dumps(done))


def release(*_: Any) -> None:
    runner = SimpleNamespace(model=_Model(), server_args=SimpleNamespace(weight_cache_mode="off"))
    updater = SchedulerWeightUpdaterManager(
        tp_worker=SimpleNamespace(model_runner=runner),
        draft_worker=None,
        tp_cpu_group=None,
        memory_saver_adapter=torch_memory_saver_adapter._TorchMemorySaverAdapterReal(),
        flush_cache=lambda: True,
        is_fully_idle=lambda: True,
    )
    updater.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=["kv_cache", "weights", "cuda_graph"]))


class _Model:
    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        done.append("copy buffers")
        return iter([("one", torch.zeros(1))])


if __name__ == "__main__":
    main()
