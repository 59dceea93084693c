"""Learning gates: every row is a run that can start, and bands are red on both sides."""

import json
import sys
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from subprocess import CalledProcessError
from types import SimpleNamespace

import pytest
import yaml

from rlpipe.config.load import load_config

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture
def gates(monkeypatch):
    monkeypatch.syspath_prepend(str(PROJECT / "benchmarks"))
    import gate_verdicts

    return gate_verdicts


@pytest.fixture
def runs(monkeypatch):
    monkeypatch.syspath_prepend(str(PROJECT / "benchmarks"))
    import gate_runs

    return gate_runs


def _run(gates, gate, seed, accuracy, rewards):
    return gates.Run(gate.name, seed, gate.digest(), accuracy, tuple(rewards))


def test_every_gate_has_a_configuration_and_a_start(gates, runs):
    found = gates.read_gates()
    wanted = {"arithmetic", "hybrid", "calculator", "lora", "sft", "async", "one_step_off", "partial", "kl", "gspo"}
    assert wanted | {"cispo", "tp2", "pp2", "cp2", "ep2", "colocated"} <= set(found)
    for gate in found.values():
        assert not gate.start or found[gate.start].command == "sft"
        assert not gate.curve_of or found[gate.curve_of].settings[: len(gate.settings)]
        config = load_config(gate.config, runs.settings_of(gate, 3, Path("work"), "name"))
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
    assert verdict.startswith("no band: 1 of 3 draws of grpo are known")


def test_a_layout_has_to_follow_the_curve_of_its_seed(gates):
    found = gates.read_gates()
    history = [_run(gates, found["grpo"], seed, 0.6, [0.3, 0.5, 0.5]) for seed in (0, 1, 2)]

    def verdicts(rewards):
        return gates.verdicts_on(_run(gates, found["cp2"], 1, 0.6, rewards), found["cp2"], found, history)

    assert verdicts([0.3, 0.52, 0.5]) == []
    itself = gates.verdicts_on(_run(gates, found["grpo"], 2, 0.6, [0.3, 0.6, 0.5]), found["grpo"], found, history)
    assert itself[0] == "reward 0.600 of iteration 2 is off the curve (0.500)"
    assert verdicts([0.31, 0.5, 0.5]) == ["reward 0.310 of iteration 1 is off the curve (0.300)"]
    assert verdicts([0.3, 0.57, 0.45]) == ["reward 0.570 of iteration 2 is off the curve (0.500)"]


def test_a_run_follows_its_own_curve_on_its_kind_of_machine_until_its_draws_are_changed_on_purpose(gates):
    found = gates.read_gates()
    seeds = [replace(_run(gates, found["grpo"], seed, 0.6, [0.3, 0.5, 0.5]), machine="a") for seed in range(3)]
    again = replace(seeds[1], rewards=(0.31, 0.5, 0.5))

    def verdicts(run, history=seeds, **named):
        return gates.verdicts_on(run, found["grpo"], found, history, **named)

    assert verdicts(seeds[1]) == [] and gates.likeness(seeds[1], found["grpo"], seeds[1]) == "ok, as before"
    assert verdicts(again) == ["reward 0.310 of iteration 1 is off the curve (0.300)"]
    like = gates.likeness(again, found["grpo"], seeds[1])
    assert like == "ok, as before up to iteration 0, then up to 0.010 beside it"
    assert verdicts(replace(again, machine="b")) == [] == verdicts(again, redrawn=True)
    assert verdicts(again, [*seeds, again]) == [], "the latest curve counts"
    other = verdicts(replace(seeds[1], accuracy=0.67))
    assert other[0] == "accuracy 0.670 is not that of its seed before (0.600)"
    assert verdicts(replace(seeds[1], accuracy=float("nan"))) == [
        "accuracy nan is not that of its seed before (0.600)",
        "accuracy is nan",
    ]


def test_repeats_of_a_seed_do_not_narrow_a_band(gates):
    found = gates.read_gates()
    seeds = [_run(gates, found["grpo"], seed, 0.6 + 0.05 * seed, [0.3, 0.5]) for seed in range(3)]
    bands = gates.bands_of(gates.draws(seeds))
    assert gates.bands_of(gates.draws([*seeds, *seeds[1:], seeds[0]])) == bands


def test_every_kind_of_machine_is_a_draw_of_its_own_whichever_ran_last(gates):
    found = gates.read_gates()
    a = [replace(_run(gates, found["grpo"], seed, 0.6 + 0.01 * seed, [0.3, 0.5]), machine="a") for seed in range(3)]
    b = [replace(run, machine="b", accuracy=run.accuracy - 0.05) for run in a]

    def verdicts(history):
        new = replace(_run(gates, found["grpo"], 5, 0.8, [0.3, 0.5]), machine="c")
        return gates.verdicts_on(new, found["grpo"], found, history)

    assert verdicts(a) == ["accuracy 0.800 is too good (band 0.570 to 0.650)"]
    for history in ([*a, *b], [*b, *a], [a[0], *b, *a[1:], b[0]]):
        assert verdicts(history) == ["accuracy 0.800 is too good (band 0.492 to 0.678)"]
    (line,) = [one for one in gates.summary(found, [*b, *a]) if one.startswith("grpo")]
    assert line.split()[1:3] == ["6", "6"] and "0.492 to 0.678" in line


def test_a_layout_follows_the_curve_that_its_gate_drew_in_the_same_command(gates, monkeypatch, capsys, tmp_path):
    """On a kind of machine that the history does not know: another one's curve says nothing there."""
    import learning_gates

    monkeypatch.setattr(learning_gates, "HISTORY", tmp_path / "gates.jsonl")
    found, options = gates.read_gates(), SimpleNamespace(redrawn=False, record=True)
    history = [replace(_run(gates, found["grpo"], seed, 0.6, [0.3, 0.5]), machine="a") for seed in range(3)]

    def is_red(gate, rewards):
        run = replace(_run(gates, found[gate], 0, 0.6, rewards), machine="b")
        return learning_gates.judge(learning_gates.Task(found[gate], 0, tmp_path), run, found, history, options)

    assert not is_red("cp2", [0.31, 0.5]), "the curve of another machine was followed"
    assert "no curve of grpo on such a machine" in capsys.readouterr().out
    assert not is_red("grpo", [0.31, 0.5])
    assert is_red("cp2", [0.3, 0.5]) and "iteration 1 is off the curve (0.310)" in capsys.readouterr().out
    assert gates.read_history(tmp_path / "gates.jsonl") == history[3:]


def test_processors_of_one_name_and_other_generations_round_otherwise(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(PROJECT / "benchmarks"))
    import record

    def generation(text):
        (tmp_path / "cpuinfo").write_text(text)
        monkeypatch.setattr(record, "Path", lambda _: tmp_path / "cpuinfo")
        return record.processor_generation()

    zen3 = "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC\nflags\t: a:b\n\n"
    assert generation(zen3 + zen3.replace("25", "99")) == "AMD EPYC 25/1"
    assert generation(zen3.replace("model\t\t: 1", "model\t\t: 17")) == "AMD EPYC 25/17"
    assert generation("processor\t: 0\nBogoMIPS\t: 50.00\n") == record.platform.machine()


def test_a_defect_is_seen_by_what_was_learned_alone(monkeypatch):
    monkeypatch.syspath_prepend(str(PROJECT / "benchmarks"))
    import gate_verdicts
    import learning_gates

    run = _run(gate_verdicts, gate_verdicts.read_gates()["grpo"], 0, 0.6, [0.3, 0.5])
    assert learning_gates.is_seen(run, ["gain 0.000 is too low"])
    assert learning_gates.is_seen(ArithmeticError("loss is nan"), ["loss is nan"])
    assert not learning_gates.is_seen(run, []) and not learning_gates.is_seen(run, ["no band: 1 of 3 seeds"])
    assert not learning_gates.is_seen(CalledProcessError(1, ["rlpipe"]), ["returned non-zero"])


@pytest.mark.parametrize("is_known", [True, False])
def test_a_defect_has_a_curve_to_leave_on_a_machine_that_the_history_does_not_know(
    gates, monkeypatch, tmp_path, is_known
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    import learning_gates

    monkeypatch.setattr(learning_gates, "is_known", lambda gate, seed: is_known)
    tasks = learning_gates.planted({"grpo": gates.read_gates()["grpo"]}, [0], tmp_path)
    assert [bool(task.defect) for task in tasks] == ([True] if is_known else [False, True])
    made = []
    monkeypatch.setattr(learning_gates, "outcome_of", lambda task: made.append(task))

    class Here:
        def __init__(self, jobs):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def submit(self, function, task):
            done = Future()
            done.set_result(function(task))
            return done

    monkeypatch.setattr(learning_gates, "Workers", Here)
    assert [task for task, _ in learning_gates.runs_of(tasks[::-1], gates.read_gates(), 1)] == tasks
    assert made[0].gate.name == "sft" and made[1:] == tasks, "the policy it begins with, then the run without a defect"


@pytest.mark.parametrize(
    ("cores", "jobs", "expected"),
    [
        ([4, 5, 6, 7], 2, [[4, 5], [6, 7]]),
        ([4, 5, 6], 2, [[4], [5, 6]]),
        ([4, 5], 3, [[4], [5], [4]]),
        ([4, 5], 1, [[4, 5]]),
    ],
)
def test_jobs_share_the_cores(monkeypatch, cores, jobs, expected):
    monkeypatch.syspath_prepend(str(PROJECT / "benchmarks"))
    from shared_cores import shares

    assert shares(cores, jobs) == expected


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
def test_what_no_band_excuses_is_an_error(runs, row, sentence):
    runs.check_rows([{"iteration": 1, "mismatch/logprob_abs_mean": 1e-6}])
    with pytest.raises(ArithmeticError, match=sentence):
        runs.check_rows([{"iteration": 1, **row}])


def test_history_is_read_as_it_was_written(gates, tmp_path):
    gate = gates.read_gates()["kl"]
    run = _run(gates, gate, 0, 0.6, [0.1, 0.2])
    (tmp_path / "h.jsonl").write_text(json.dumps(asdict(run)) + "\n")
    assert gates.read_history(tmp_path / "h.jsonl") == [run]
    assert gates.read_history(tmp_path / "none.jsonl") == []


def test_history_of_another_start_does_not_count(gates, tmp_path):
    """A policy that began otherwise learns otherwise, whatever its own settings are."""
    rows = {
        "common": ["seed=0"],
        "gates": {"start": {"command": "sft"}, "first": {"start": "start"}, "alone": {}},
    }
    file = tmp_path / "gates.yaml"
    file.write_text(yaml.safe_dump(rows))
    before = gates.read_gates(file)
    rows["gates"]["start"]["settings"] = ["run.iterations=2"]
    file.write_text(yaml.safe_dump(rows))
    after = gates.read_gates(file)
    same = {name for name, gate in before.items() if gate.digest() == after[name].digest()}
    assert same == {"alone"}
