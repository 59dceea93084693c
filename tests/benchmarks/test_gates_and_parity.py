"""Whole gates and the whole ladder, as `make gates` and `make parity` run them."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

PROJECT = Path(__file__).resolve().parents[2]


def _run(*command):
    return subprocess.run([sys.executable, "-W", "ignore", *command], cwd=PROJECT, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_gates_are_green_with_their_history_and_red_with_another(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(PROJECT / "benchmarks"))
    import gate_verdicts as gates

    done = _run("benchmarks/learning_gates.py", "sft", "grpo", "--seeds", "0")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == ["gate", "sft", "grpo"] and not any("red" in row for row in rows)

    history = [run for run in gates.read_history() if run.gate == "grpo"]
    better = [replace(run, accuracy=run.accuracy + 0.3) for run in history]
    verdicts = gates.verdicts_on(history[0], gates.read_gates()["grpo"], gates.read_gates(), better)
    assert any("is too low" in verdict for verdict in verdicts)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("gate", ["grpo"])
def test_a_gate_sees_a_defect_that_no_loss_shows(gate):
    """The others: `python benchmarks/learning_gates.py --planted`."""
    done = _run("benchmarks/learning_gates.py", gate, "--planted")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "planted in gates: 1 of 1 seen" in done.stdout


def test_responses_are_compared_until_they_part(monkeypatch):
    monkeypatch.syspath_prepend(str(PROJECT / "benchmarks"))
    import parity

    def answers(*tokens):
        return {"r": SimpleNamespace(token_ids=tokens, logprobs=[-1.0 - token / 8 for token in tokens])}

    first = answers(1, 2, 3, 4)
    other = answers(1, 2, 9, 4)
    other["r"].logprobs[0] -= 0.5
    assert parity.until_they_part(first, first) == 0
    assert parity.until_they_part(first, other) == 0.25  # of two tokens, whatever comes behind them
    assert parity.until_they_part(first, answers(1, 9, 3, 4)) == float("inf")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_rung_of_the_ladder_holds(tmp_path):
    done = _run("benchmarks/parity.py")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count(" ok") >= 18 and "TOO FAR" not in done.stdout
