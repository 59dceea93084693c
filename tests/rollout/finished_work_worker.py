"""Gives memory back as a scheduler's process does once it is set up; prints what was done in which order."""

import json
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers import scheduler
from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

from rollout.sglang_patches.scheduler_process import run_scheduler

done: list[str] = []


def main() -> None:
    torch.get_device_module().synchronize = lambda: done.append("synchronize")
    scheduler.run_scheduler_process = release
    run_scheduler(SimpleNamespace(enable_deterministic_inference=False, device="cpu", speculative_algorithm=None))
    print(json.dumps(done))


def release(*_: Any) -> None:
    updater = SchedulerWeightUpdaterManager(
        tp_worker=None,
        draft_worker=None,
        tp_cpu_group=None,
        memory_saver_adapter=SimpleNamespace(pause=lambda tag: done.append(f"pause {tag}")),
        flush_cache=lambda: True,
        is_fully_idle=lambda: True,
    )
    updater.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=["kv_cache", "cuda_graph"]))


if __name__ == "__main__":
    main()
