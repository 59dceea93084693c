"""What all monitoring together costs an iteration, as a share of it.

Measured are the parts of a rank's clock, the hooks around the start and the wait of exchanges, the monitor of
just-in-time compilation with its watchdog, and what the driver writes. Counts are those of one iteration of a mixture
of experts on 8 GPUs: 32 micro-batches, 40 layers, two exchanges a layer and direction.

    python benchmarks/monitoring_overhead.py --step-seconds 10
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch.distributed as dist

from actor.collectives.exchange_timer import ExchangeTimer
from actor.collectives.operations import WAIT
from actor.device import synchronize
from actor.rank_clock import MegatronTimers, RankClock
from actor.train_report import RankUsage
from rlpipe.jit_monitor import JitMonitor
from rlpipe.jit_monitor.watchdog import running_compilers
from rlpipe.monitoring.json_lines import append_json_line
from rlpipe.training.measurement import rank_metrics

RANKS = 8


def median_seconds(work: Callable[[], object], repeats: int = 7) -> float:
    """Of processor time, so that a busy machine changes nothing."""
    samples = []
    for _ in range(repeats):
        start = time.thread_time()
        work()
        samples.append(time.thread_time() - start)
    return statistics.median(samples)


def ignore(_: Any) -> None:
    """An exchange that takes no time."""


def training_call(clock: RankClock, micro_batches: int) -> None:
    """The marks of one training call without the work between them."""
    timers = MegatronTimers(clock)
    with clock.part("train"):
        for _ in range(micro_batches):
            for name in ("forward-compute", "backward-compute"):
                timers(name, log_level=2).start()
                timers(name).stop()
        for _ in range(4):
            with clock.part("optimizer"):
                pass
    synchronize()
    clock.take()


def exchanges(clock: RankClock, start: Callable[[Any], None], wait: Callable[[Any], None], count: int) -> None:
    """The hooks of `count` exchanges around nothing."""
    group = dist.group.WORLD
    with clock.part("train"):
        for _ in range(count):
            start(group)
            wait(group)
    clock.take()


def driver(folder: Path, seconds: dict[str, float], monitor: JitMonitor) -> None:
    """What the driver makes of the reports of all ranks."""
    usages = [RankUsage(rank, "node", "", "", seconds, (), monitor.drain()) for rank in range(RANKS)]
    append_json_line(folder / "metrics.jsonl", rank_metrics(usages))
    for usage in usages:
        append_json_line(folder / "ranks.jsonl", {"name": usage.name, "seconds": usage.part_seconds})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-seconds", type=float, default=10.0, help="length of the step that the share refers to")
    parser.add_argument("--micro-batches", type=int, default=32)
    parser.add_argument("--exchanges", type=int, default=160, help="in the two passes of a micro-batch")
    options = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monitor = JitMonitor.install()
    clock = RankClock(on_part=monitor.enter_phase)
    count = options.micro_batches * options.exchanges
    timer = ExchangeTimer(clock, monitor.first_use)
    start, wait = timer.around("allreduce", ignore), timer.around(WAIT, ignore)
    hooks = median_seconds(lambda: exchanges(clock, start, wait, count))
    call = median_seconds(lambda: training_call(clock, options.micro_batches))
    look = median_seconds(running_compilers)
    parts = {part: 1.0 for part in ("forward", "backward", "optimizer", "train", "train_exchange", "ref_logprob")}
    with tempfile.TemporaryDirectory() as folder:
        written = median_seconds(lambda: driver(Path(folder), parts, monitor))
    monitor.uninstall()
    dist.destroy_process_group()
    total = call + hooks + written + look * options.step_seconds
    result = {
        "parts_seconds": round(call, 6),
        "exchanges": count,
        "exchange_hooks_seconds": round(hooks, 6),
        "driver_seconds": round(written, 6),
        "watchdog_seconds": round(look * options.step_seconds, 6),
        "total_seconds": round(total, 6),
        "share_of_step": round(total / options.step_seconds, 6),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
