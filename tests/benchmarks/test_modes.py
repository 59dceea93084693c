"""Which iterations of a mode are compared."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def modes(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import modes

    return modes


def _row(iteration, step):
    idle = {"perf/rollout_idle_share": 0.25, "perf/actor_idle_share": 0.5}
    lag = {"rollout/weight_version_lag_mean": 1.0, "mismatch/logprob_abs_mean": 0.01}
    tokens = {"rollout/response_tokens_mean": 100.0, "rollout/samples_count": 8}
    return {"iteration": iteration, "time/step_seconds": step} | idle | lag | tokens


def test_neither_the_filling_nor_the_emptying_of_queues_counts(modes):
    seconds = [0.0, 50.0, 50.0, 2.0, 4.0, 6.0, 90.0, 90.0]
    step, tokens, *shares = modes.summary([_row(*row) for row in enumerate(seconds)]).split()[:5]
    assert (step, tokens) == ("4.00", "200")
    assert shares == ["25.0%", "50.0%", "75.0%"]


def test_a_run_of_which_nothing_would_be_left_is_refused_before_it_starts(modes, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["modes.py", "run.iterations=4"])
    monkeypatch.setattr(modes, "run", lambda *_: pytest.fail("a run was started"))
    monkeypatch.setattr(modes.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        modes.main()
    assert "run.iterations=4: 4 are left out" in capsys.readouterr().err


def test_settings_after_the_modes_are_settings_and_an_unknown_mode_is_refused(modes, monkeypatch, capsys):
    runs = []
    monkeypatch.setattr(modes, "run", lambda config, mode, folder, settings: runs.append((mode, settings)) or [])
    monkeypatch.setattr(modes, "summary", lambda rows: "")
    monkeypatch.setattr(modes.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["modes.py", "--modes", "sync,async", "run.iterations=9", "seed=3"])
    modes.main()
    assert [mode for mode, _ in runs] == ["sync", "async"]
    assert all(settings[-2:] == ["run.iterations=9", "seed=3"] for _, settings in runs)
    monkeypatch.setattr(sys, "argv", ["modes.py", "--modes", "sync,asinc"])
    with pytest.raises(SystemExit):
        modes.main()
    assert "--modes asinc: use sync, one_step_off, async" in capsys.readouterr().err


def _idle(engines, actor):
    return {"perf/rollout_idle_share": engines, "perf/actor_idle_share": actor}


def test_prompts_grow_until_the_actor_has_as_much_to_do_as_the_engines(modes, monkeypatch, tmp_path, capsys):
    """Engines take 10 seconds, the actor a second for 100 tokens of a sample, 100 of which are the response."""
    names = []

    def measured(config, mode, folder, settings, name):
        names.append((mode, name))
        letters = int(next(one for one in settings if one.startswith("data.max_prompt_tokens=")).split("=")[1])
        busy = {"engines": 10.0, "actor": (letters + 100) / 100}
        idle = _idle(*(1 - seconds / max(busy.values()) for seconds in busy.values()))
        return [_row(iteration, max(busy.values())) | idle for iteration in range(8)]

    monkeypatch.setattr(modes, "run", measured)
    letters, rows = modes.balanced_run("c.yaml", tmp_path, [])
    assert letters == 900
    assert names == [("async", "trial-1"), ("async", "trial-2")]
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("512 letters") and "38.8%" in first
    assert second == f"900 letters   {modes.summary(rows)}"


@pytest.mark.parametrize(("engines", "actor", "letters"), [(0.0, 0.99, 4096), (0.9, 0.0, 32)])
def test_prompts_stay_within_what_a_machine_holds(modes, engines, actor, letters):
    assert modes.balanced_letters(512, 290.0, engines, actor) == letters


def test_the_balanced_run_is_the_row_of_async(modes, monkeypatch, capsys):
    runs = []
    rows = [_row(iteration, 4.0) | _idle(0.0, 0.03) for iteration in range(9)]
    monkeypatch.setattr(modes, "run", lambda config, mode, folder, settings, name="": runs.append(name or mode) or rows)
    monkeypatch.setattr(modes, "random_policy", lambda model, folder: str(folder))
    monkeypatch.setattr(modes.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", ["modes.py", "--modes", "sync,async"])
    modes.main()
    assert runs == ["trial-1", "sync"]
    _, trial, _, of_async = capsys.readouterr().out.splitlines()
    assert of_async.split()[0] == "async"
    assert of_async.split()[1:] == trial.split()[2:]
