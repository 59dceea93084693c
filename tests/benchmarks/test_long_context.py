"""What the benchmark of long sequences shows of a plan beside what it measures."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlpipe.commands.cards.record_file import read_record
from rlpipe.commands.clusters import load_cluster
from rlpipe.config.load import load_config
from rlpipe.estimate.run_estimate import plan
from rlpipe.training.trained_share import planned_model

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def long_context(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import long_context

    return long_context


def _options(long_context, monkeypatch, arguments):
    monkeypatch.setattr(sys, "argv", ["long_context", *arguments])
    return long_context._arguments()


def _plan(long_context, options, folder, tokens, **speeds):
    from layer_shapes import hybrid_config

    (folder / "config.json").write_text(json.dumps(hybrid_config(options.layers, 32_768, tiny=False)))
    config = load_config(long_context._write_configuration(options, folder, str(folder), tokens))
    cluster = load_cluster(f"local_{options.gpus}x141gb")
    cluster = cluster.model_copy(update={"speeds": cluster.speeds.model_copy(update=speeds)})
    return plan(config, planned_model(config), cluster)


@pytest.mark.parametrize(("gpus", "tokens"), [(1, 65_536), (2, 262_144)])
def test_the_plan_of_a_gpu_s_peak_holds_what_the_optimizer_keeps_there(
    gpus, tokens, tmp_path, monkeypatch, long_context
):
    layout = ["--gpus", str(gpus), "--context", str(gpus), "--expert", str(gpus)]
    options = _options(long_context, monkeypatch, layout)
    estimate = _plan(long_context, options, tmp_path, tokens)
    figures = long_context._planned(estimate, tokens, options)
    (actor,) = (need for need in estimate.needs if need.name == "actor GPU")
    assert estimate.kept_state_bytes > 0
    assert figures["memory/actor_gpu_peak_bytes"] == actor.total + estimate.kept_state_bytes
    assert figures["memory/actor_gpu_peak_bytes"] <= estimate.cluster.node.gpu_memory_gigabytes * 1e9
    assert figures.keys() <= {column.metric for column in long_context.COLUMNS}


def test_recorded_steps_are_planned_within_a_fifth_and_their_peaks_within_a_tenth(tmp_path, monkeypatch, long_context):
    recorded = read_record(BENCHMARKS / "results/long_context.cuda.json")
    options = _options(long_context, monkeypatch, shlex.split(recorded.command)[2:])
    rows = [line.split() for line in recorded.output.splitlines()]
    last = {int(row[0].replace(",", "")): row for row in rows if len(row) > 1 and row[1].isdigit()}
    assert set(last) == set(options.tokens)
    for tokens, row in last.items():
        assert int(row[1]) == options.iterations
        figures = long_context._planned(_plan(long_context, options, tmp_path, tokens), tokens, options)
        for column, cell, within in zip(long_context.COLUMNS, row[2:], (0.2, 0.2, 0.2, None, None, 0.1), strict=True):
            if within is not None:
                found, planned = float(cell.replace(",", "")), figures[column.metric] * column.scale
                assert planned == pytest.approx(found, rel=within), (tokens, column.title)


def test_a_long_sequence_takes_as_long_as_its_attention(tmp_path, monkeypatch, long_context):
    options = _options(long_context, monkeypatch, ["--layers", "8"])

    def passes(tokens, **speeds):
        return _plan(long_context, options, tmp_path, tokens, **speeds).seconds["forward_backward"]

    slower = {"attention_share_of_peak": 0.245}
    assert passes(2_048, **slower) / passes(2_048) < 1.05
    assert passes(131_072, **slower) / passes(131_072) > 1.5


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_is_interrupted_has_told_the_steps_that_ended_and_leaves_no_process(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "long_context.py"), "--tiny", "--tokens", "256", "--layers", "4"]
    places = ["--iterations", "2000", "--folder", str(tmp_path)]
    with subprocess.Popen(
        [*command, *places], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, process_group=0
    ) as process:
        for line in process.stdout:
            if line.split()[:2] == ["256", "1"]:
                break
        os.killpg(process.pid, signal.SIGINT)  # as benchmarks/record.py ends what takes too long
        assert process.wait(100) != 0
    assert line.split()[:2] == ["256", "1"] and len(line.split()) > 4
    running = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True)
    assert not running.stdout
