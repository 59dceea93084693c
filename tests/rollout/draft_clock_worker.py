"""Passes through the stages that SGLang's worker of drafts marks, timed as in a scheduler; prints the seconds."""

import json
import sys
import time
from pathlib import Path

import torch
from sglang.srt.speculative import eagle_worker_v2

from rollout.sglang_patches import draft_clock


class Moment:
    """Of a device that is as fast as its host."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Moment") -> float:
        return 1e3 * (end.seconds - self.seconds)


def main() -> None:
    seconds = draft_clock.DraftSeconds(Path(sys.argv[1]))
    torch.cuda.Event = Moment
    draft_clock.install()
    begin = time.perf_counter()
    for stage in ("draft", "draft_extend"):
        with eagle_worker_v2.spec_stage_span(stage):
            time.sleep(0.05)
    passed = time.perf_counter() - begin
    print(json.dumps([seconds.take(), passed]))


if __name__ == "__main__":
    main()
