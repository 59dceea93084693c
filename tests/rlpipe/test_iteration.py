"""Phase times and the metric dictionary."""

import json
import time

import pytest

from rlpipe.monitoring.console import Console
from rlpipe.monitoring.metric_dictionary import METRICS, check_names
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.monitoring.trackers import JsonLines, Trackers
from rlpipe.shared.phases import PHASES, PhaseClock
from rlpipe.training.iteration import IterationLog, IterationRecord


class _Recorder:
    def __init__(self):
        self.rows = []

    def log(self, iteration, metrics):
        self.rows.append((iteration, dict(metrics)))

    def log_samples(self, iteration, rows):
        self.rows.append((iteration, rows))

    def close(self, failed):
        self.closed = failed


def test_phases_and_the_rest_add_up_to_the_iteration():
    recorder = _Recorder()
    log = IterationLog(Trackers([recorder]), Console(2), devices=4)
    for number in (1, 2):
        with log.iteration(number) as step:
            with step.phase("rollout"):
                time.sleep(0.05)
            time.sleep(0.03)
            with step.phase("train"):
                time.sleep(0.06)
            step.split("train", {"forward": 0.04, "optimizer": 0.01}, rest="train_other")
    assert [iteration for iteration, _ in recorder.rows] == [1, 2]
    for _, row in recorder.rows:
        claimed = sum(row[f"time/{phase}_seconds"] for phase in PHASES)
        assert claimed + row["time/unaccounted_seconds"] == pytest.approx(row["time/step_seconds"])
        assert row["time/rollout_seconds"] >= 0.05
        assert row["time/unaccounted_seconds"] >= 0.03
        assert row["time/forward_seconds"] == 0.04
        assert row["time/train_other_seconds"] >= 0.01


def test_an_iteration_begins_where_the_one_before_ended_and_its_rest_is_told_as_shares():
    # The row before was written since then.
    record = IterationRecord(1, time.perf_counter() - 1000.0, Console(1), devices=4)
    for phase, parts in (("train", {"forward": 300.0, "backward": 200.0}), ("rollout", {"rollout": 250.0})):
        with record.phase(phase):
            pass
        record.split(phase, parts, rest="train_other")
    record.add({"perf/jit_seconds": 400.0, "perf/trained_tokens": 2e6})
    record.finish()
    assert [record.metrics[f"time/{one}_seconds"] for one in ("tracking", "step")] == pytest.approx(
        [1000, 1000], rel=0.01
    )
    shares = {"time/unaccounted_share": -0.75, "perf/actor_idle_share": 0.5, "perf/step_excluding_jit_seconds": 600.0}
    shares |= {"perf/tokens_per_gpu_per_second": 500.0}
    assert {name: record.metrics[name] for name in shares} == pytest.approx(shares, rel=0.02)
    other = IterationRecord(2, time.perf_counter() - 1.0, Console(2))
    other.add({"perf/jit_seconds": 40.0})  # of several processes at the same time
    other.finish()
    assert other.metrics["perf/step_excluding_jit_seconds"] == 0
    assert "perf/tokens_per_gpu_per_second" not in other.metrics  # nothing was trained


def test_what_belongs_to_the_start_is_in_the_first_row_and_samples_are_logged_after_theirs():
    recorder = _Recorder()
    log = IterationLog(Trackers([recorder]), Console(2), 4, {"start/ray_seconds": 3.0})
    for number in (1, 2):
        with log.iteration(number) as step:
            step.sample_rows += [{"sample": number}] * (number - 1)
    (_, first), (_, second), samples = recorder.rows
    assert ("start/ray_seconds" in first, "start/ray_seconds" in second) == (True, False)
    assert samples == (2, [{"sample": 2}])


def test_dialogues_of_an_iteration_are_kept_in_the_folder_of_its_run(tmp_path):
    run = RunDirectory(tmp_path)
    log = IterationLog(Trackers([], lines=JsonLines(run, 0)), Console(2), 4)
    with log.iteration(3) as step:
        step.transcripts = [{"episode": "g-0"}]
    (line,) = run.episodes.read_text().splitlines()
    assert json.loads(line) == {"iteration": 3, "episode": "g-0"}


def test_phases_do_not_nest():
    clock = PhaseClock()
    with pytest.raises(RuntimeError, match="do not nest"), clock.phase("a"), clock.phase("b"):
        pass


def test_every_phase_has_a_declared_metric_and_unknown_names_are_refused():
    check_names(f"time/{phase}_seconds" for phase in PHASES)
    check_names(["eval/gsm8k/accuracy", "perf/rollout_engine_3_tokens_per_second"])
    with pytest.raises(KeyError, match="train/los "):
        check_names(["train/loss", "train/los "])


def test_physical_units_are_in_the_names():
    for name, metric in METRICS.items():
        if metric.unit in ("seconds", "bytes"):
            assert name.endswith(metric.unit), name


def test_trackers_close_with_the_outcome():
    recorder = _Recorder()
    with pytest.raises(ValueError, match="boom"), Trackers([recorder]):
        raise ValueError("boom")
    assert recorder.closed is True
