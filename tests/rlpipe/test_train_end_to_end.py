"""Whole runs by the command line: real Ray, SGLang and Megatron-core on a CPU; exact resume; nothing left behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from rlpipe.iteration import PHASES
from rlpipe.metrics import check_names

_PROJECT = Path(__file__).parents[2]
_MARK = "RLPIPE_TEST_MARK"
_SMALL = [
    "run.name=small",
    "run.iterations=4",
    "prepare.arithmetic.train_problems=64",
    "prepare.arithmetic.test_problems=16",
    "warm_start.steps=4",
    "eval.interval_iterations=2",
    "rollout.prompts_per_iteration=8",
    "rollout.samples_per_prompt=4",
    "rollout.max_response_tokens=24",
    "algorithm.kl.coefficient=0.01",
    "checkpoint.interval_iterations=2",
    "checkpoint.keep=4",
    "checkpoint.save_hf=true",
    "weight_sync.verify=true",
    "trackers.tensorboard=true",
    "trackers.wandb=offline",
]
_GRADER = "tests.rlpipe.parity_grader:response_is_even"


def _arguments(folder: Path, *more: str) -> list[str]:
    places = [
        f"run.directory={folder}",
        f"model.path={folder}/policy",
        f"prepare.directory={folder}/task",
        f"reward.name={_GRADER}",
    ]
    return ["configs/demo/arithmetic.yaml", *_SMALL, *places, *more]


def _start(command: str, *arguments: str, mark: str = "") -> subprocess.Popen[str]:
    environment = {**os.environ, _MARK: mark or uuid.uuid4().hex, "PYTHONPATH": str(_PROJECT)}
    return subprocess.Popen(
        [sys.executable, "-m", "rlpipe", command, *arguments],
        cwd=_PROJECT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _run(command: str, *arguments: str) -> str:
    process = _start(command, *arguments)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    return output


def _rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def _assert_nothing_is_left(mark: str, before: set[str]) -> None:
    end = time.monotonic() + 20
    while _marked(mark) and time.monotonic() < end:
        time.sleep(0.5)
    assert [process.cmdline() for process in _marked(mark)] == []
    assert set(os.listdir("/dev/shm")) - before == set()


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """A run of four iterations."""
    folder = tmp_path_factory.mktemp("four")
    output = _run("train", *_arguments(folder))
    return folder, output


@pytest.mark.timeout(300)
def test_a_run_logs_every_phase_and_agrees_with_the_engine(four):
    folder, output = four
    rows = _rows(folder / "small")
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["iteration"] for row in rows if "eval/held_out/accuracy" in row] == [0, 2, 4]
    for row in rows[1:]:
        check_names(name for name in row if name != "iteration")
        claimed = sum(row[f"time/{phase}_seconds"] for phase in PHASES)
        assert claimed + row["time/unaccounted_seconds"] == pytest.approx(row["time/step_seconds"])
        assert row["mismatch/logprob_abs_max"] < 1e-4
        assert row["rollout/samples_count"] == 32
        assert row["weight_sync/version"] == row["iteration"]
        assert row["train/updates_applied_count"] > 0
        assert row["perf/rollout_engine_0_tokens_per_second"] > 0
    assert rows[-1]["time/unaccounted_share"] < 0.05
    assert "held-out accuracy (held_out):" in output


def test_a_run_leaves_its_files(four):
    folder, output = four
    run = folder / "small"
    for name in ("config.yaml", "samples.jsonl", "report.png", "report.html", "policy/config.json", "wandb_run_id"):
        assert (run / name).exists(), name
    assert str(run / "report.png") in output
    assert list((run / "tensorboard").iterdir())
    assert list(run.glob("wandb/offline-run-*"))


@pytest.mark.timeout(300)
def test_two_iterations_and_two_more_give_the_bits_of_four(four, tmp_path):
    folder, _ = four
    _run("train", *_arguments(tmp_path, "run.iterations=2"))
    _run("train", *_arguments(tmp_path), "--resume")
    whole, resumed = folder / "small", tmp_path / "small"
    assert (resumed / "policy/model.safetensors").read_bytes() == (whole / "policy/model.safetensors").read_bytes()
    assert (resumed / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
    same = ("rollout/reward_mean", "train/loss", "train/gradient_norm", "train/kl_loss", "eval/held_out/reward_mean")
    for one, other in zip(_rows(whole), _rows(resumed), strict=True):
        assert {name: one.get(name) for name in same} == {name: other.get(name) for name in same}


def test_a_second_run_of_the_same_name_is_refused(four):
    folder, _ = four
    process = _start("train", *_arguments(folder))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "already holds a run: continue it with --resume, replace it with --overwrite" in output


@pytest.mark.timeout(300)
def test_interrupted_runs_leave_no_process_and_no_shared_memory(four, tmp_path):
    folder, _ = four
    shutil.copytree(folder / "policy", tmp_path / "policy")
    shutil.copytree(folder / "task", tmp_path / "task")
    before = set(os.listdir("/dev/shm"))
    mark = uuid.uuid4().hex
    process = _start("train", *_arguments(tmp_path, "run.iterations=1000"), mark=mark)
    metrics = tmp_path / "small/metrics.jsonl"
    end = time.monotonic() + 200
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 1):
        assert process.poll() is None and time.monotonic() < end, process.communicate()[0]
        time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 130, output
    assert "interrupted" in output
    _assert_nothing_is_left(mark, before)
