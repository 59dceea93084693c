"""Disturbed runs as a test sees them: start one, and look at what it left."""

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import pytest

from rlpipe.shared.descendants import adopt_orphans
from tests.chaos.chaos_schedule import Strike
from tests.rlpipe.run_support import (
    MARK,
    PROJECT,
    UNTRACKED,
    assert_no_process_is_left,
    marked_processes,
    metric_rows,
    run_arguments,
    run_command,
)
from tests.search_path import search_path

LAYOUTS = {
    "one process": (),
    "two tensor ranks": ("actor.processes=2", "actor.parallel.tensor=2"),
    "two pipeline stages": ("actor.processes=2", "actor.parallel.pipeline=2", "prepare.policy.layers=2"),
    "shared memory": ("ray.colocate=true", "ray.sleep=always"),
}
"""Of the actor."""

_WARM_START = "warm_start.sequences_per_step=128"
"""A few seconds, in which a run can be struck."""

UNEQUAL = (
    *("time/", "perf/", "ranks/", "guard/", "start/", "memory/", "sleep_wake/", "fault/", "rollout/tail_"),
    *("weight_sync/bytes", "weight_sync/gigabytes", "rollout/prefix_hit_share", "rollout/prefill_saved_tokens"),
    *("weight_sync/sender_max_bytes", "rollout/turns_moved_count"),
)
"""Metrics of time, memory, losses, links and caches, by how their names begin; all others are promised bit by bit. No
bytes are sent where the one engine is lost at an update: it comes back with the weights that it starts from."""

LOG_LINES = 40
"""Of each log, where a run went otherwise."""


@dataclass(frozen=True)
class DisturbedRun:
    """A run that has ended. `rows` are its metrics, `record` what chaos_run.py noted."""

    folder: Path
    code: int
    output: str
    seconds: float
    rows: list[dict]
    record: list[dict]
    faults: list[dict]

    @property
    def evidence(self) -> str:
        """All that is needed to judge a run that went otherwise: what it said and noted, and the ends of its logs."""
        return evidence(self.folder, self.output)

    @property
    def strikes(self) -> list[dict]:
        return [row for row in self.record if "strike" in row]

    @property
    def trained(self) -> list[str]:
        """Ids of all samples that were trained, in their order."""
        return [name for row in self.record if "samples" in row for name in row["samples"]]

    def fault_after(self, strike: dict) -> dict | None:
        """The first loss that was noticed after a strike."""
        later = [fault for fault in self.faults if fault["noticed"] > strike["time"]]
        return min(later, key=lambda fault: fault["noticed"], default=None)


def chaos_arguments(folder: Path, *settings: str) -> list[str]:
    """Of the small run in `folder`. Runs beside each other share policies of the same shape."""
    shape = "".join(f"-{one.replace('=', '-')}" for one in settings if one.startswith("prepare.policy."))
    return run_arguments(folder, *UNTRACKED, _WARM_START, f"model.path={folder.parent}/policy{shape}", *settings)


def disturbed_run(
    folder: Path, strikes: Sequence[Strike], *settings: str, seconds: float = 800, notes: Path | None = None
) -> DisturbedRun:
    """Runs the small run in `folder` to its end, whatever that is; it leaves no process. notes: where its record lies,
    if not there."""
    adopt_orphans()  # as this process does anyway once a test has started a cluster in it
    folder.mkdir(parents=True, exist_ok=True)
    schedule, record = folder / "schedule.json", (notes or folder) / "record.jsonl"
    schedule.write_text(json.dumps([asdict(strike) for strike in strikes]))
    mark, begin = uuid.uuid4().hex, time.monotonic()
    planted = PROJECT / "tests/chaos/planted"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.chaos.chaos_run",
            str(schedule),
            str(record),
            *chaos_arguments(folder, *settings),
        ],
        cwd=PROJECT,
        env={**os.environ, MARK: mark, "PYTHONPATH": search_path(planted)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    run = folder / "small"
    output = _output_in_time(process, mark, run, seconds)
    took = time.monotonic() - begin
    assert_no_process_is_left(mark)
    assert "Traceback" not in output, evidence(run, output)
    rows = metric_rows(run) if (run / "metrics.jsonl").exists() else []
    return DisturbedRun(run, process.returncode, output, took, rows, _rows(record), _rows(run / "logs/faults.jsonl"))


def _output_in_time(process: subprocess.Popen[str], mark: str, run: Path, seconds: float) -> str:
    """What the process prints until it ends; one that takes too long is ended with all of its run, and that is why."""
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        states = [f"{one.pid} {one.status()} {' '.join(one.cmdline())[:100]}" for one in marked_processes(mark)]
        for one in marked_processes(mark):
            with suppress(psutil.NoSuchProcess):
                one.kill()
        output, _ = process.communicate()
    pytest.fail("\n".join([f"not done after {seconds:g} seconds; its processes were:", *states, evidence(run, output)]))


def evidence(run: Path, output: str) -> str:
    """`output` of the run in folder `run`, what was done to it, and the last lines of its logs and metrics."""
    parts = [output]
    for path in [*run.parent.glob("*.json*"), run / "metrics.jsonl", *sorted(run.glob("logs/**/*"))]:
        if path.is_file():
            lines = path.read_text(errors="replace").splitlines()
            parts += [f"--- {path} ({len(lines)} lines), its last ones:", *(line[:600] for line in lines[-LOG_LINES:])]
    return "\n".join(parts)


def assert_healed(run: DisturbedRun, undisturbed: DisturbedRun | None, iterations: int) -> None:
    """The run ended well, every sample was trained once, and nothing is left; with the bits of `undisturbed`."""
    assert run.code == 0, run.evidence
    assert [row["iteration"] for row in run.rows] == list(range(iterations + 1))
    assert len(run.trained) == len(set(run.trained)) == sum(row.get("rollout/samples_count", 0) for row in run.rows)
    assert_no_file_is_left(run)
    if undisturbed is not None:
        assert run.trained == undisturbed.trained
        assert_same_bits(run.folder, undisturbed.folder)


def assert_resumed(folder: Path, undisturbed: DisturbedRun, *settings: str) -> None:
    """What is left of a run in `folder` goes on, and ends with the bits of `undisturbed`."""
    run_command("train", *chaos_arguments(folder, *settings), "--requeued")
    assert_same_bits(folder / "small", undisturbed.folder)


def assert_same_bits(run: Path, undisturbed: Path) -> None:
    """Every row once, with the same metrics, samples and policy."""
    for row, expected in zip(metric_rows(run), metric_rows(undisturbed), strict=True):
        assert _differences(row, expected) == {}, f"in iteration {row['iteration']}"
    for name in ("policy/model.safetensors", "samples.jsonl"):
        assert (run / name).read_bytes() == (undisturbed / name).read_bytes()


def assert_no_file_is_left(run: DisturbedRun) -> None:
    """Of none of the engines that were ever started."""
    instances = [row["instance"] for row in run.record if "instance" in row]
    assert instances
    for folder in ("/dev/shm", "/tmp"):
        assert [name for name in os.listdir(folder) if any(one in name for one in instances)] == []


def _differences(row: dict, expected: dict) -> dict:
    names = {name for name in row.keys() | expected.keys() if not name.startswith(UNEQUAL)}
    pairs = {name: (row.get(name), expected.get(name)) for name in sorted(names)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
