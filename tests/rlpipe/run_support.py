"""Whole runs by the command line, for tests."""

import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.search_path import search_path

PROJECT = Path(__file__).parents[2]
MARK = "RLPIPE_TEST_MARK"
SHORT_WARM_START = "warm_start.sequences_per_step=16"
SMALL = [
    "run.name=small",
    "run.iterations=4",
    "prepare.arithmetic.train_problems=64",
    "prepare.arithmetic.test_problems=16",
    "warm_start.steps=4",
    SHORT_WARM_START,
    "eval.interval_iterations=2",
    "rollout.prompts_per_iteration=8",
    "rollout.samples_per_prompt=4",
    "rollout.max_response_tokens=24",
    "algorithm.kl.coefficient=0.01",
    "algorithm.updates_per_iteration=1",
    "algorithm.old_policy=actor",
    "checkpoint.interval_iterations=2",
    "checkpoint.keep=4",
    "weight_sync.verify=true",
]
TRACKED = ["trackers.tensorboard=true", "trackers.wandb=offline", "trackers.wandb_project=of-the-tests"]
UNTRACKED = ["trackers.tensorboard=false", "trackers.wandb=off"]
DIRECTORY = "run.directory="
GRADER = "tests.rlpipe.parity_grader:response_is_even"


def run_arguments(folder: Path, *more: str, config: str = "configs/demo/arithmetic.yaml") -> list[str]:
    """Of a small run in `folder`. Folders beside each other share a policy and a task: making those takes seconds."""
    places = [
        f"{DIRECTORY}{folder}",
        f"model.path={folder.parent}/small-policy",
        f"prepare.directory={folder.parent}/small-task",
        f"reward.name={GRADER}",
    ]
    return [config, *SMALL, *places, *more]


def start_command(
    command: str, *arguments: str, mark: str = "", output: Path | None = None, **environment: str
) -> subprocess.Popen[str]:
    """output: file that gets what it prints; without it that has to be read from the process.

    Threads of the actor that wait do not spin: other tests run beside it.
    """
    ours = {MARK: mark or uuid.uuid4().hex, "PYTHONPATH": search_path(), "OMP_WAIT_POLICY": "PASSIVE"}
    environment = os.environ | ours | environment
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "rlpipe", command, *arguments],
        cwd=PROJECT,
        env=environment,
        stdout=output.open("w") if output else subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run_command(command: str, *arguments: str, **environment: str) -> str:
    """What it prints. It ends well, and not because something that was lost on the way was started again."""
    known = _faults(arguments)
    process = start_command(command, *arguments, **environment)
    output, _ = process.communicate(timeout=800)
    assert process.returncode == 0, output
    assert _faults(arguments) == known, output
    return output


def _faults(arguments: Sequence[str]) -> dict[Path, str]:
    """What runs in the folder that is meant have noted of engines that were lost and came back."""
    folders = [Path(one.removeprefix(DIRECTORY)) for one in arguments if one.startswith(DIRECTORY)]
    return {file: file.read_text() for folder in folders for file in folder.glob("*/logs/faults.jsonl")}


def metric_rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def marked_processes(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def engine_instances(mark: str) -> set[str]:
    """Names under which engines of a run keep files, told by what its processes hold open."""
    opened = {file.path for process in marked_processes(mark) for file in process.open_files()}
    return {match[1] for path in opened if (match := re.match(r"/tmp/rlpipe-engine-(\w+)/", path))}


def assert_no_process_is_left(mark: str) -> None:
    """At once, but for those of a killed driver that were just starting: they look around once they have imported what
    they need, which takes a machine at a load of 30 more than three minutes."""
    end = time.monotonic() + 480
    while (left := marked_processes(mark)) and time.monotonic() < end:
        _reap_adopted()
        time.sleep(0.5)
    assert not left, f"left over: {[_described(process) for process in left]}"


def _reap_adopted() -> None:
    """What an init does. A process that has started a cluster goes on adopting orphans, so also those of a run that it
    killed; and Ray's workers, which stay as long as there is a process with their raylet's number, find a dead one that
    nobody has waited for."""
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess, ChildProcessError):
            if child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def _described(process: psutil.Process) -> str:
    try:
        began = time.time() - process.create_time()
        return f"{process.status()} since {began:.0f} s, parent {process.ppid()}: {' '.join(process.cmdline())[:200]}"
    except psutil.NoSuchProcess:
        return f"{process.pid}, which ended meanwhile"
