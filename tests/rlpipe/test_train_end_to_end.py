"""Whole runs by the command line: real Ray, SGLang and Megatron-core on a CPU; exact resume; nothing left behind."""

import os
import signal
import time
import uuid

import pytest
from run_support import (
    TRACKED,
    UNTRACKED,
    assert_nothing_is_left,
    metric_rows,
    run_arguments,
    run_command,
    start_command,
)

from rlpipe.iteration import PHASES
from rlpipe.metrics import check_names


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """A run of four iterations."""
    folder = tmp_path_factory.mktemp("four")
    output = run_command("train", *run_arguments(folder, *TRACKED))
    return folder, output


def test_a_run_logs_every_phase_and_agrees_with_the_engine(four):
    folder, output = four
    rows = metric_rows(folder / "small")
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


def test_two_iterations_and_two_more_give_the_bits_of_four(four, tmp_path):
    """In the first two, engine and actor take turns: weights pass through shared buffers, and each side gives its
    memory back while the other works."""
    folder, _ = four
    turns = ("run.iterations=2", "ray.colocate=true", "ray.sleep=always")
    run_command("train", *run_arguments(tmp_path, *UNTRACKED, *turns))
    for row in metric_rows(tmp_path / "small")[1:]:
        claimed = sum(row[f"time/{phase}_seconds"] for phase in PHASES)
        assert claimed + row["time/unaccounted_seconds"] == pytest.approx(row["time/step_seconds"])
        assert row["time/sleep_wake_seconds"] > 0
        assert row["time/weight_sync_seconds"] > 0
    run_command("train", *run_arguments(tmp_path, *UNTRACKED), "--resume")
    whole, resumed = folder / "small", tmp_path / "small"
    assert (resumed / "policy/model.safetensors").read_bytes() == (whole / "policy/model.safetensors").read_bytes()
    assert (resumed / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
    same = ("rollout/reward_mean", "train/loss", "train/gradient_norm", "train/kl_loss", "eval/held_out/reward_mean")
    for one, other in zip(metric_rows(whole), metric_rows(resumed), strict=True):
        assert {name: one.get(name) for name in same} == {name: other.get(name) for name in same}


@pytest.mark.slow
@pytest.mark.alone
def test_an_engine_of_two_processes_reads_the_buffers_of_two_actor_processes(tmp_path):
    before = set(os.listdir("/dev/shm"))
    turns = ("run.iterations=2", "ray.colocate=true", "ray.sleep=always")
    two = ("actor.processes=2", "actor.parallel.tensor=2", "rollout.engine.tensor_parallel=2")
    run_command("train", *run_arguments(tmp_path, *UNTRACKED, *two, *turns))
    for row in metric_rows(tmp_path / "small")[1:]:
        assert row["mismatch/logprob_abs_max"] < 1e-4
        assert row["weight_sync/version"] == row["iteration"]
        assert row["train/updates_applied_count"] > 0
    assert set(os.listdir("/dev/shm")) - before == set()


def test_a_second_run_of_the_same_name_is_refused(four):
    folder, _ = four
    process = start_command("train", *run_arguments(folder))
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 2
    assert "already holds a run: continue it with --resume, replace it with --overwrite" in output


@pytest.mark.alone
def test_interrupted_runs_leave_no_process_and_no_shared_memory(tmp_path):
    before = set(os.listdir("/dev/shm"))
    mark = uuid.uuid4().hex
    process = start_command("train", *run_arguments(tmp_path, *UNTRACKED, "run.iterations=1000"), mark=mark)
    metrics = tmp_path / "small/metrics.jsonl"
    end = time.monotonic() + 200
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 1):
        assert process.poll() is None and time.monotonic() < end, process.communicate()[0]
        time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 130, output
    assert "interrupted" in output
    assert_nothing_is_left(mark, before)
