"""Comes to where a scheduler begins; prints whether the collector works, and what it looks at and does not."""

import gc
import json

from sglang.srt.managers import scheduler

from rollout.sglang_patches.scheduler_entry import SchedulerEntry


class _Arguments:
    """What is looked at of SGLang's."""

    enable_deterministic_inference = False
    device = "cpu"
    speculative_algorithm = None


def _print(*_: object) -> None:
    print(json.dumps([gc.isenabled(), len(gc.get_objects()), gc.get_freeze_count()]))


if __name__ == "__main__":
    scheduler.run_scheduler_process = _print
    gc.disable()  # as where the entry arrives
    SchedulerEntry()(_Arguments())
