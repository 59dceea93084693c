"""Learning gates: every row is a run that can start, and bands are red on both sides."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from rlpipe.config.load import load_config

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture
def gates(monkeypatch):
    monkeypatch.syspath_prepend(str(PROJECT / "benchmarks"))
    import learning_gates

    return learning_gates


def _run(gates, gate, seed, accuracy, rewards):
    return gates.Run(gate.name, seed, gate.digest(), accuracy, tuple(rewards))


def test_every_gate_has_a_configuration_and_a_start(gates):
    found = gates.read_gates()
    wanted = {"arithmetic", "hybrid", "calculator", "lora", "sft", "async", "one_step_off", "partial", "kl", "gspo"}
    assert wanted | {"cispo", "tp2", "pp2", "cp2", "ep2", "colocated"} <= set(found)
    for gate in found.values():
        assert not gate.start or found[gate.start].command == "sft"
        assert not gate.curve_of or found[gate.curve_of].settings[: len(gate.settings)]
        config = load_config(gate.config, gates.settings_of(gate, 3, Path("work")))
        assert config.seed == 3 and bool(config.sft) is (gate.command == "sft")
        assert (config.warm_start is None) is bool(gate.start or gate.command == "sft")


def test_a_layout_changes_nothing_but_its_processes(gates):
    """Otherwise it could not follow the curve of the gate that it names."""
    found = gates.read_gates()
    for gate in found.values():
        if gate.curve_of:
            reference = found[gate.curve_of]
            further = set(gate.settings) ^ set(reference.settings)
            assert {one.split("=")[0].rsplit(".", 1)[0] for one in further} <= {"actor", "actor.parallel", "ray"}
            assert (gate.config, gate.start) == (reference.config, reference.start)


@pytest.mark.parametrize(
    ("accuracy", "reward", "verdict"),
    [(0.6, 0.5, ""), (0.4, 0.5, "too low"), (0.9, 0.5, "too good"), (0.6, 0.2, "too low"), (0.6, 0.9, "too good")],
)
def test_a_run_outside_its_band_is_red_on_either_side(gates, accuracy, reward, verdict):
    gate = gates.read_gates()["grpo"]
    history = [_run(gates, gate, seed, 0.6 + 0.01 * seed, [0.3, 0.5 + 0.01 * seed]) for seed in (-1, 0, 1)]
    found = gates.verdicts_on(_run(gates, gate, 5, accuracy, [0.3, reward]), gate, {"grpo": gate}, history)
    assert bool(found) == bool(verdict) and all(verdict in one for one in found)


def test_a_run_that_does_not_learn_is_red_though_its_seed_begins_high(gates):
    gate = gates.read_gates()["grpo"]
    starts = {0: 0.38, 1: 0.30, 2: 0.46}
    history = [_run(gates, gate, seed, 0.6, [start, start + 0.1 + 0.01 * seed]) for seed, start in starts.items()]

    def verdicts(rewards):
        return gates.verdicts_on(_run(gates, gate, 5, 0.6, rewards), gate, {"grpo": gate}, history)

    assert verdicts([0.4, 0.51]) == []
    assert [one.startswith("gain 0.000 is too low") for one in verdicts([0.48, 0.48])] == [True]
    assert [one.startswith("gain 0.200 is too good") for one in verdicts([0.3, 0.5])] == [True]


def test_a_gate_that_a_policy_without_a_reward_would_pass_is_red(gates):
    gate = gates.read_gates()["hybrid"]
    history = [_run(gates, gate, seed, 0.008, [0.01, 0.5]) for seed in (0, 1, 2)]
    (verdict,) = gates.verdicts_on(history[0], gate, {"hybrid": gate}, history)
    assert verdict.startswith("accuracy has a band down to 0 (-0.032 to 0.048)")


def test_without_enough_history_of_the_same_settings_there_is_no_band(gates):
    gate = gates.read_gates()["grpo"]
    run = _run(gates, gate, 0, 0.6, [0.5])
    other = replace(run, settings="other")
    (verdict,) = gates.verdicts_on(run, gate, {"grpo": gate}, [run, run, other, other])
    assert verdict.startswith("no band: 2 of 3 runs of grpo are known")


def test_a_layout_has_to_follow_the_curve_of_its_seed(gates):
    found = gates.read_gates()
    history = [_run(gates, found["grpo"], seed, 0.6, [0.3, 0.5, 0.5]) for seed in (0, 1, 2)]

    def verdicts(rewards):
        return gates.verdicts_on(_run(gates, found["cp2"], 1, 0.6, rewards), found["cp2"], found, history)

    assert verdicts([0.3, 0.52, 0.5]) == []
    itself = gates.verdicts_on(_run(gates, found["grpo"], 2, 0.6, [0.3, 0.6, 0.5]), found["grpo"], found, history)
    assert itself[-1] == "reward 0.600 of iteration 2 is off the curve (0.500)"
    assert verdicts([0.31, 0.5, 0.5]) == ["reward 0.310 of iteration 1 is off the curve (0.300)"]
    assert verdicts([0.3, 0.57, 0.45]) == ["reward 0.570 of iteration 2 is off the curve (0.500)"]


def test_the_summary_judges_each_run_by_all_the_others(gates):
    found = gates.read_gates()
    curve = {seed: [0.3 + 0.01 * seed, 0.5, 0.5] for seed in range(4)}
    history = [_run(gates, found["grpo"], seed, 0.6, curve[seed]) for seed in (0, 1, 2)]
    history += [_run(gates, found["cp2"], seed, 0.6, curve[seed]) for seed in (0, 1)]
    history.append(_run(gates, found["tp2"], 2, 0.6, [*curve[2][:2], 0.6]))

    def verdicts():
        return {line.split()[0]: line for line in gates.summary(found, history)}

    lines = verdicts()
    assert lines["cp2"].endswith("  ok") and "seed 2: " in lines["tp2"] and "is off the curve (0.500)" in lines["tp2"]
    assert not lines["grpo"].endswith("ok"), "two others draw no band"
    history.append(_run(gates, found["grpo"], 3, 0.9, curve[3]))
    assert "seed 3: accuracy 0.900 is too good" in verdicts()["grpo"]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"train/loss": float("nan")}, "train/loss of iteration 1 is nan"),
        ({"rollout/reward_mean": float("inf")}, "rollout/reward_mean of iteration 1 is inf"),
        ({"train/updates_skipped_count": 1.0}, "skipped an update"),
        ({"mismatch/logprob_abs_mean": 0.01}, "engine and actor differ by 1.0e-02 nats"),
    ],
)
def test_what_no_band_excuses_is_an_error(gates, row, sentence):
    gates.check_rows([{"iteration": 1, "mismatch/logprob_abs_mean": 1e-6}])
    with pytest.raises(ArithmeticError, match=sentence):
        gates.check_rows([{"iteration": 1, **row}])


def test_history_is_read_as_it_was_written(gates, tmp_path):
    gate = gates.read_gates()["kl"]
    run = _run(gates, gate, 0, 0.6, [0.1, 0.2])
    (tmp_path / "h.jsonl").write_text(json.dumps(asdict(run)) + "\n")
    assert gates.read_history(tmp_path / "h.jsonl") == [run]
    assert gates.read_history(tmp_path / "none.jsonl") == []
