"""What becomes of compilations that workers report: lines on file, warnings, or the end of the run."""

import json
from pathlib import Path

import pytest

from actor.train_report import RankUsage
from rlpipe.batching import PackLimits, pack_sequences
from rlpipe.batching.sequences import supervised_sequence
from rlpipe.config.load import load_config
from rlpipe.jit_monitor import JitAlarm, JitEvent, JitReport, StepStall
from rlpipe.monitoring.console import Console
from rlpipe.monitoring.json_lines import append_json_line, read_json_lines
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.shared.errors import JitError
from rlpipe.training.iteration import IterationRecord
from rlpipe.training.measurement import Measurement
from rollout.requests import EngineRecord
from tests.small_config import SMALL_MODEL


class _Actor:
    """Stands for the processes: answers with what a monitor in a worker reports."""

    def __init__(self, events, stalls=(), gdn_backend=""):
        alarms = [JitAlarm("triton", "k", 1, 5, 2.0, 2, True)] if events else []
        seconds = {"forward": 1.0, "backward": 2.0, "optimizer": 0.5, "train_exchange": 0.25}
        report = JitReport(2, 0, tuple(events), tuple(alarms), stalls)
        self._answers = [JitReport(0, 0, ()), report, JitReport(3, 0, ())]
        self._seconds = seconds
        self._gdn_backend = gdn_backend
        self.asked = []

    def begin_take_usage(self, next_iteration, keep_spans=False):
        self.asked.append((next_iteration, keep_spans))
        return self

    def result(self):
        self.asked.append("waited for")
        return (RankUsage(0, "node", "", self._gdn_backend, self._seconds, (), self._answers.pop(0)),)


def _finish(tmp_path, actor, settings=(), model=None, rewards=(), pool=None, **jit):
    (tmp_path / "model").mkdir(parents=True)
    (tmp_path / "model" / "config.json").write_text(model or json.dumps(SMALL_MODEL))
    overrides = [f"model.path={tmp_path}/model", *(f"jit.{name}={value}" for name, value in jit.items())]
    config = load_config("configs/demo/arithmetic.yaml", [*overrides, "trace.iterations=[2]", *settings])
    directory = RunDirectory(tmp_path)
    for iteration in (1, 2, 3):  # of an earlier run that is resumed after iteration 1
        append_json_line(directory.ranks, {"iteration": iteration})
    packs = pack_sequences([supervised_sequence("a", (1, 2, 3), (4, 5))], PackLimits(16), data_parallel=1)
    measurement = Measurement(config, actor, directory, Console(3), first_iteration=2, pool=pool)
    records = [IterationRecord(iteration, 0.0, Console(3)) for iteration in range(2, 2 + max(1, len(rewards)))]
    for record, reward in zip(records, rewards, strict=False):
        record.add({"rollout/reward_mean": reward, "rollout/reward_std": 0.4})
    try:
        for record in records:
            with record.phase("train"):
                pass
            measurement.finish(record, packs)
    finally:
        events, ranks = read_json_lines(directory.jit_events).rows, read_json_lines(directory.ranks).rows
    return record, events, ranks, directory


def test_actor_and_engines_are_asked_at_the_same_time(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL_MODEL))
    config = load_config("configs/demo/arithmetic.yaml", [f"model.path={tmp_path}"])
    actor = _Actor([])

    class Pool:
        def take_records(self, iteration, keep_spans):
            actor.asked.append("engines")
            return ()

    Measurement(config, actor, RunDirectory(tmp_path), Console(3), first_iteration=2, pool=Pool())
    assert actor.asked == [(2, False), "engines", "waited for"]


_EVENT = JitEvent("triton", "k", "key", 2.0, True, "", "forward", 2)


def test_an_alarm_is_a_warning_with_worker_and_kernel_and_a_line_on_file(tmp_path, capsys):
    actor = _Actor([_EVENT], (StepStall(2, 90.0, 10.0, "stack"),))
    record, events, ranks, directory = _finish(tmp_path, actor)
    printed = capsys.readouterr().out
    assert "warning: actor-0: triton compiled k 1x in step 2" in printed
    assert "warning: actor-0: step 2 has been running for 90 s, the median is 10 s" in printed
    (event,) = events
    assert {"iteration": 2, "worker": "actor-0", "rank": 0, "kind": "triton", "name": "k"}.items() <= event.items()
    assert (event["seconds"], event["cache_hit"], event["phase"], event["step"]) == (2.0, False, "forward", 2)
    assert record.metrics["perf/jit_seconds"] == 2.0
    assert record.metrics["perf/jit_stalls"] == 1.0
    assert [row["iteration"] for row in ranks] == [1, 2]
    assert [one for one in actor.asked if one != "waited for"] == [(2, True), (3, False)]
    assert directory.trace(2).exists()


def test_a_fall_of_the_reward_is_a_warning(tmp_path, capsys):
    actor = _Actor([])
    _finish(tmp_path, actor, rewards=(0.69, 0.1))
    assert "warning: the mean reward fell from 0.690 in iteration 2 to 0.100" in capsys.readouterr().out


def test_with_error_the_run_ends_and_the_line_is_on_file_all_the_same(tmp_path):
    with pytest.raises(JitError, match="actor-0: triton compiled k 1x in step 2"):
        _finish(tmp_path, _Actor([_EVENT]), after_warmup="error")
    assert [row["name"] for row in read_json_lines(RunDirectory(tmp_path).jit_events).rows] == ["k"]


def test_a_quiet_iteration_passes_with_error(tmp_path):
    record, events, _, _ = _finish(tmp_path, _Actor([]), after_warmup="error")
    assert events == ()
    assert record.metrics["perf/jit_alarms"] == 0


def test_frozen_weights_are_not_counted_as_trained(tmp_path):
    """Each token saves the product with the 3 x 32 x 64 weights of a feed-forward part; an embedding has none."""
    whole, part = (
        _finish(tmp_path / name, _Actor([]), settings=["actor.peak_tflops=1", *settings])[0]
        for name, settings in (
            ("whole", ()),
            ("part", ["actor.frozen_parameters=['layers[.]0[.]mlp', 'embed_tokens']"]),
        )
    )
    tokens = whole.metrics["perf/trained_tokens"]
    for figure in ("perf/actor_train_tflops_per_gpu", "perf/actor_train_mfu", "perf/actor_train_hfu"):
        flops, left = (one.metrics[figure] * one.metrics["perf/actor_train_seconds"] * 1e12 for one in (whole, part))
        assert flops - left == pytest.approx(2 * 3 * 32 * 64 * tokens)


def test_executed_work_is_that_of_the_backend_that_ran(tmp_path):
    model = Path("configs/models/Qwen3.5-35B-A3B/config.json").read_text()
    torch, fla = (
        _finish(tmp_path / backend, _Actor([], (), backend), ["actor.peak_tflops=1"], model)[0].metrics
        for backend in ("torch", "fla")
    )
    executed, counted = (
        [one[f"perf/actor_train_{figure}"] * one["perf/actor_train_seconds"] for one in (torch, fla)]
        for figure in ("hfu", "mfu")
    )
    assert counted[0] == pytest.approx(counted[1])
    assert executed[0] != pytest.approx(executed[1])


class _Pool:
    """One engine, which compiled something after its warm-up."""

    def take_records(self, iteration, keep_spans):
        alarm = JitAlarm("triton", "k", 1, 5, 2.0, 2, True)
        report = JitReport(iteration, 3, (_EVENT,), (alarm,), role="engine")
        return (EngineRecord(3, "node", report, (), {"memory/engine_host_peak_bytes": 7.0}),)


def test_what_engines_tell_is_in_the_row_and_on_file(tmp_path, capsys):
    record, events, _, directory = _finish(tmp_path, _Actor([]), pool=_Pool())
    assert (record.metrics.get("memory/engine_host_peak_bytes"), record.metrics["perf/jit_alarms"]) == (7.0, 1.0)
    assert "warning: engine-3: triton compiled k 1x" in capsys.readouterr().out
    assert [(row["iteration"], row["worker"]) for row in events] == [(1, "engine-3"), (2, "engine-3")]
    assert "engine-3 (node)" in directory.trace(2).read_text()


def test_with_error_the_run_ends_where_an_engine_compiles(tmp_path):
    with pytest.raises(JitError, match="engine-3: triton compiled k"):
        _finish(tmp_path, _Actor([]), pool=_Pool(), after_warmup="error")
