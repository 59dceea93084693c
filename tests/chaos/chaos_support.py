"""Disturbed runs as a test sees them: start one, and look at what it left."""

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.chaos.chaos_schedule import Strike
from tests.rlpipe.run_support import (
    MARK,
    PROJECT,
    UNTRACKED,
    assert_no_process_is_left,
    metric_rows,
    run_arguments,
    run_command,
)

LAYOUTS = {
    "one process": (),
    "two tensor ranks": ("actor.processes=2", "actor.parallel.tensor=2"),
    "two pipeline stages": ("actor.processes=2", "actor.parallel.pipeline=2", "prepare.policy.layers=2"),
    "shared memory": ("ray.colocate=true", "ray.sleep=always"),
}
"""Of the actor."""

UNEQUAL = ("time/", "perf/", "ranks/", "guard/", "start/", "memory/", "sleep_wake/", "fault/", "weight_sync/gigabytes")
"""Metrics of time, memory and losses, by how their names begin; all others are promised bit by bit."""


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
    return run_arguments(folder, *UNTRACKED, f"model.path={folder.parent}/policy{shape}", *settings)


def disturbed_run(folder: Path, strikes: Sequence[Strike], *settings: str, seconds: float = 800) -> DisturbedRun:
    """Runs the small run in `folder` to its end, whatever that is; it leaves no process."""
    folder.mkdir(parents=True, exist_ok=True)
    schedule, record = folder / "schedule.json", folder / "record.jsonl"
    schedule.write_text(json.dumps([asdict(strike) for strike in strikes]))
    mark, begin = uuid.uuid4().hex, time.monotonic()
    planted = PROJECT / "tests/chaos/planted"
    search = os.pathsep.join(filter(None, [str(planted), str(PROJECT), os.environ.get("PYTHONPATH")]))
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
        env={**os.environ, MARK: mark, "PYTHONPATH": search},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    output, _ = process.communicate(timeout=seconds)
    assert_no_process_is_left(mark)
    assert "Traceback" not in output, output
    run, took = folder / "small", time.monotonic() - begin
    rows = metric_rows(run) if (run / "metrics.jsonl").exists() else []
    return DisturbedRun(run, process.returncode, output, took, rows, _rows(record), _rows(run / "logs/faults.jsonl"))


def assert_healed(run: DisturbedRun, undisturbed: DisturbedRun | None, iterations: int) -> None:
    """The run ended well, every sample was trained once, and nothing is left; with the bits of `undisturbed`."""
    assert run.code == 0, run.output
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
        assert _promised(row) == _promised(expected)
    for name in ("policy/model.safetensors", "samples.jsonl"):
        assert (run / name).read_bytes() == (undisturbed / name).read_bytes()


def assert_no_file_is_left(run: DisturbedRun) -> None:
    """Of none of the engines that were ever started."""
    instances = [row["instance"] for row in run.record if "instance" in row]
    assert instances
    for folder in ("/dev/shm", "/tmp"):
        assert [name for name in os.listdir(folder) if any(one in name for one in instances)] == []


def _promised(row: dict) -> dict:
    return {name: value for name, value in row.items() if not name.startswith(UNEQUAL)}


def _rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
