"""What the JIT monitor costs in a step in which nothing compiles, in microseconds and as a share of a step.

A step has six phases, 500 collectives and one drain; beside it the watchdog looks at child processes once a second.
No hook lies on the path of a kernel launch.

    python benchmarks/jit_monitor_overhead.py --step-seconds 10
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

from rlpipe.jit_monitor import JitMonitor
from rlpipe.jit_monitor.watchdog import running_compilers

PHASES = ("ref_logprob", "old_logprob", "forward", "backward", "optimizer", "weight_sync")
COLLECTIVES = 500


def median_microseconds(work: Callable[[], object], repeats: int = 21) -> float:
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-seconds", type=float, default=10.0, help="length of the step that the share refers to")
    step_seconds = parser.parse_args().step_seconds
    monitor = JitMonitor.install()

    def one_step() -> None:
        with monitor.step(1):
            for phase in PHASES:
                with monitor.phase(phase):
                    pass
            for _ in range(COLLECTIVES):
                with monitor.first_use("tensor", "all_reduce"):
                    pass
        monitor.drain()

    one_step()
    step = median_microseconds(one_step)
    look = median_microseconds(running_compilers)
    monitor.uninstall()
    total = step + step_seconds * look
    result = {
        "step_and_drain_microseconds": round(step, 1),
        "watchdog_look_microseconds": round(look, 1),
        "total_microseconds_per_step": round(total, 1),
        "share_of_step": round(total / (step_seconds * 1e6), 6),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
