"""Prints the memory of every process of a run by iteration: `python -m tests.chaos.memory_growth [ITERATIONS [EVERY]]`.

The smallest run there is, 200 iterations of it by default, on a CPU. What stays resident of libraries' files is not
counted: it is read when it is first used, and the machine can take it back.
"""

import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from tests.chaos.chaos_schedule import TITLES
from tests.chaos.chaos_support import chaos_arguments
from tests.rlpipe.run_support import marked_processes, start_command

SMALLEST = (
    "warm_start.steps=1",
    "eval.interval_iterations=50",
    "checkpoint.interval_iterations=50",
    "rollout.prompts_per_iteration=2",
    "rollout.samples_per_prompt=2",
    "rollout.max_response_tokens=8",
    "weight_sync.verify=false",
)
ROLES = ("driver", "engine", "scheduler", "actor", "grader", "raylet", "gcs")

Sizes = dict[str, float]
"""Megabytes by role."""


def growing_run(folder: Path, iterations: int) -> Iterator[tuple[int, Sizes]]:
    """Runs it in `folder`; each iteration, as far as it is seen in time, with the megabytes of all roles."""
    mark = uuid.uuid4().hex
    arguments = chaos_arguments(folder, *SMALLEST, f"run.iterations={iterations}")
    log = folder / "output.log"
    process = start_command("train", *arguments, mark=mark, output=log)
    metrics, seen = folder / "small/metrics.jsonl", 0
    try:
        while process.poll() is None:
            rows = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            if rows > seen:
                seen = rows
                yield rows - 1, _sizes(mark)
            time.sleep(0.1)
    finally:
        if process.poll() is None:  # nobody asks for more
            process.terminate()
            process.wait()
    assert process.returncode == 0, log.read_text()


def growth(sizes: dict[int, Sizes], first: int, last: int) -> Sizes:
    """Megabytes that each role has more in iteration `last` than in `first`, or in those seen next to them."""
    begin, end = (sizes[min(sizes, key=lambda one: abs(one - wanted))] for wanted in (first, last))
    return {role: end[role] - begin[role] for role in begin if role in end}


def _sizes(mark: str) -> Sizes:
    sizes: Sizes = {}
    for process in marked_processes(mark):
        with suppress(psutil.NoSuchProcess, OSError):
            words = " ".join([process.name(), *process.cmdline()])
            role = next((role for role in ROLES if TITLES[role] in words), "")
            if role:
                sizes[role] = sizes.get(role, 0.0) + _anonymous_megabytes(process.pid)
    return sizes


def _anonymous_megabytes(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))) / 1024


def main() -> None:
    iterations, every = (*(int(word) for word in sys.argv[1:]), *(200, 10)[len(sys.argv) - 1 :])[:2]
    sizes: dict[int, Sizes] = {}
    print(f"{'MB after iteration':<20}" + "".join(f"{role:>11}" for role in ROLES))
    with tempfile.TemporaryDirectory() as folder:
        for iteration, now in growing_run(Path(folder) / "run", iterations):
            sizes[iteration] = now
            if iteration % every == 0:
                print(f"{iteration:<20}" + "".join(f"{now.get(role, 0):>11.1f}" for role in ROLES), flush=True)
    for first, last in ((10, iterations // 2), (iterations // 2, iterations)):
        grown = growth(sizes, first, last)
        print(f"{first:>6} to {last:<10}" + "".join(f"{grown.get(role, 0):>+11.1f}" for role in ROLES))


if __name__ == "__main__":
    main()
