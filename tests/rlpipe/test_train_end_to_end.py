"""Whole runs by the command line: real Ray, SGLang and Megatron-core on a CPU; exact resume; nothing left behind."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import time
import uuid
from pathlib import Path

import pytest
from parity_grader import response_is_even
from prometheus_scrape import scraped
from run_support import (
    SHORT_WARM_START,
    TRACKED,
    UNTRACKED,
    assert_no_process_is_left,
    engine_instances,
    marked_processes,
    metric_rows,
    run_arguments,
    run_command,
    start_command,
)
from safetensors.torch import load_file, save_file

from rlpipe.monitoring.metric_dictionary import check_names
from rlpipe.monitoring.report.history import read_history
from rlpipe.shared.phases import PHASES
from tests.chaos.chaos_schedule import Strike
from tests.chaos.chaos_support import assert_healed, disturbed_run


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
    shares = [row["time/unaccounted_share"] for row in rows[1:]]
    assert min(shares) < 0.05, "what no phase measures is missing in every iteration; a busy machine pauses in some"
    assert "held-out accuracy (held_out):" in output


def test_a_run_leaves_its_files(four):
    folder, output = four
    run = folder / "small"
    for name in ("config.yaml", "samples.jsonl", "report.png", "report.html", "policy/config.json", "wandb_run_id"):
        assert (run / name).exists(), name
    assert str(run / "report.png") in output
    assert list((run / "tensorboard").iterdir())
    (curves,) = run.glob("wandb/offline-run-*/*.wandb")
    assert b"of-the-tests" in curves.read_bytes()


def test_every_sample_has_the_reward_of_its_own_response(four):
    rows = [json.loads(line) for line in (four[0] / "small/samples.jsonl").read_text().splitlines()]
    assert len({row["reward"] for row in rows}) > 1
    assert [row["reward"] for row in rows] == [response_is_even(row["response"], row["label"]).score for row in rows]


@pytest.mark.slow
def test_an_evaluation_of_the_trained_policy_says_what_the_run_said_of_it(four):
    folder, _ = four
    output = run_command("eval", *run_arguments(folder, f"model.path={folder}/small/policy"))
    printed, _ = json.JSONDecoder().raw_decode(output[output.rindex("{") :])
    last = metric_rows(folder / "small")[-1]
    assert printed == {name: value for name, value in last.items() if name.startswith("eval/")}


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_weight_that_is_not_finite_ends_a_command_in_a_sentence(four, tmp_path, command):
    policy = shutil.copytree(four[0] / "small/policy", tmp_path / "policy")
    tensors = load_file(policy / "model.safetensors")
    tensors["model.embed_tokens.weight"][-1, 0] = math.nan  # of a token that no text has
    save_file(tensors, policy / "model.safetensors", {"format": "pt"})
    mark = uuid.uuid4().hex
    process = start_command(command, *run_arguments(tmp_path, *UNTRACKED, f"model.path={policy}"), mark=mark)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 2, output
    assert f"error: model.embed_tokens.weight in {policy}/model.safetensors holds values that are not finite" in output
    assert "Traceback" not in output
    assert_no_process_is_left(mark)


def test_a_run_cut_off_after_two_iterations_ends_in_the_same_bits(four, tmp_path):
    """What a crash in the fourth iteration leaves. In the other two, engine and actor take turns: weights pass through
    shared buffers, and each side gives its memory back while the other works; and the actor is built beside the engine
    that starts."""
    whole, resumed = four[0] / "small", tmp_path / "small"
    shutil.copytree(whole, resumed)
    shutil.rmtree(max((resumed / "checkpoints").iterdir()))
    shutil.rmtree(resumed / "policy")
    turns = ("ray.colocate=true", "ray.sleep=always", "ray.start=beside")
    output = run_command("train", *run_arguments(tmp_path, *UNTRACKED, *turns), "--resume")
    assert "the actor is built beside the engines" in output
    for row in metric_rows(resumed)[3:]:
        claimed = sum(row[f"time/{phase}_seconds"] for phase in PHASES)
        assert claimed + row["time/unaccounted_seconds"] == pytest.approx(row["time/step_seconds"])
        assert row["time/sleep_wake_seconds"] > 0
        assert row["time/weight_sync_seconds"] > 0
    assert_same_run(whole, resumed)


@pytest.mark.slow
def test_a_run_whose_engine_is_killed_and_stopped_ends_in_the_same_bits(four, tmp_path):
    """Its scheduler is killed in its first start; the next one while it generates; the engine that comes then is
    stopped in an update of weights. A grader is killed, too."""
    losses = [
        Strike("scheduler", "kill", "starting engines", None),
        Strike("scheduler", "kill", "rollout", 2, 0.04),
        Strike("engine", "stop", "weight_sync", 3),
    ]
    strikes = [*losses, Strike("grader", "kill", "rollout", 4)]
    run = disturbed_run(tmp_path, strikes, SHORT_WARM_START)
    assert_healed(run, None, iterations=4)
    assert_same_run(four[0] / "small", run.folder)
    assert [row["strike"] for row in run.strikes] == [strike.name for strike in strikes]
    assert len(run.faults) == len(losses)
    assert sum(row.get("fault/engine_restarts_count", 0) for row in run.rows) == len(losses)
    for strike in run.strikes[: len(losses)]:
        assert run.fault_after(strike)["noticed"] - strike["time"] < 60  # a hang would be noticed after 300
    assert "engine 0 serves again" in run.output


@pytest.mark.slow
def test_two_iterations_and_two_more_give_the_bits_of_four(four, tmp_path):
    run_command("train", *run_arguments(tmp_path, *UNTRACKED, "run.iterations=2"))
    run_command("train", *run_arguments(tmp_path, *UNTRACKED), "--resume")
    assert_same_run(four[0] / "small", tmp_path / "small")


def assert_same_run(one: Path, other: Path) -> None:
    """The same policy, samples, metrics, lengths and expected lengths, bit by bit."""
    assert (one / "policy/model.safetensors").read_bytes() == (other / "policy/model.safetensors").read_bytes()
    assert (one / "samples.jsonl").read_text() == (other / "samples.jsonl").read_text()
    same = ("rollout/reward_mean", "train/loss", "train/gradient_norm", "train/kl_loss", "eval/held_out/reward_mean")
    for row, again in zip(metric_rows(one), metric_rows(other), strict=True):
        assert {name: row.get(name) for name in same} == {name: again.get(name) for name in same}
    lengths = [[record.groups for record in read_history(run).responses] for run in (one, other)]
    assert lengths[0] == lengths[1]
    assert [groups[0].expected is None for groups in lengths[0]] == [True, False, False, False]


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


@pytest.mark.slow
def test_a_run_that_loses_its_actor_ends_in_the_same_bits(four, tmp_path):
    mark = uuid.uuid4().hex
    process = start_command("train", *run_arguments(tmp_path, *UNTRACKED, "fault.actor_restarts=1"), mark=mark)
    wait_for_rows(process, tmp_path, 2)
    (actor,) = [one for one in marked_processes(mark) if "ray::_Process" in " ".join(one.cmdline())]
    actor.kill()
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert re.search(r"actor-0 \(pid \d+\) of the actor died", output)
    assert "restart 1 of 1 of the actor" in output
    assert [row["iteration"] for row in metric_rows(tmp_path / "small")] == [0, 1, 2, 3, 4]
    assert_same_run(four[0] / "small", tmp_path / "small")
    assert_no_process_is_left(mark)


@pytest.mark.slow
def test_terminated_runs_save_and_leave_no_process_and_no_engine_file(tmp_path):
    """While responses are generated ahead of training, none of which trains what is too old."""
    ahead = ("rollout.mode=async", "rollout.max_staleness=2", "algorithm.correction.weight=token")
    engines = engines_of_interrupted_run(tmp_path, signal.SIGTERM, *ahead, rows=5)
    (*rows, last) = metric_rows(tmp_path / "small")
    assert max(row["rollout/weight_version_lag_max"] for row in rows[1:]) in (1, 2)
    assert any(row["rollout/off_policy_share"] > 0 for row in rows[1:])
    assert (tmp_path / f"small/checkpoints/iteration_{last['iteration']:08d}/state.json").exists()
    assert (tmp_path / "small/report.html").exists()
    assert len(engines) == 1
    for folder in ("/dev/shm", "/tmp"):
        assert [name for name in os.listdir(folder) if any(engine in name for engine in engines)] == []


@pytest.mark.alone
def test_interrupted_runs_leave_no_shared_memory_at_all(tmp_path):
    before = set(os.listdir("/dev/shm"))
    engines_of_interrupted_run(tmp_path, signal.SIGINT)
    assert set(os.listdir("/dev/shm")) - before == set()


def wait_for_rows(process: subprocess.Popen[str], folder: Path, rows: int) -> None:
    metrics = folder / "small/metrics.jsonl"
    end = time.monotonic() + 400
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= rows):
        assert process.poll() is None and time.monotonic() < end, process.communicate()[0]
        time.sleep(0.2)


def engines_of_interrupted_run(folder: Path, number: signal.Signals, *settings: str, rows: int = 2) -> set[str]:
    """Start a run, interrupt it once it has written `rows`, and see its processes end; returns the names of its
    engines."""
    mark = uuid.uuid4().hex
    endless = (*UNTRACKED, "run.iterations=1000", "trackers.prometheus_port=0", *settings)
    process = start_command("train", *run_arguments(folder, *endless), mark=mark)
    wait_for_rows(process, folder, rows)
    assert_scraped(folder / "small")
    engines = engine_instances(mark)
    process.send_signal(number)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 130, output
    assert "interrupted" in output and "continue with --resume" in output
    assert_no_process_is_left(mark)
    return engines


def assert_scraped(run: Path) -> None:
    """A Prometheus server reads the values of a row that the run wrote."""
    end = time.monotonic() + 100
    while (found := scraped(run)).get(("rlpipe_iteration", "small"), 0) < 1:
        assert time.monotonic() < end, found
        time.sleep(0.1)
    assert found["rlpipe_train_loss", "small"] in {row.get("train/loss") for row in metric_rows(run)}
    assert found["rlpipe_perf_rollout_engine_engine_tokens_per_second", "0", "small"] > 0
    assert found["rlpipe_eval_dataset_accuracy", "held_out", "small"] >= 0
