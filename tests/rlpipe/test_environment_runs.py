"""Whole runs of environments: two agents with an exact resume, a game of many turns learned from nothing."""

import pytest
from run_support import UNTRACKED, metric_rows, run_command

from rlpipe.monitoring.json_lines import read_json_lines


def _arguments(folder, config, *more):
    places = [f"run.directory={folder}", f"model.path={folder}/policy", f"prepare.directory={folder}/rows"]
    return [config, "run.name=run", *places, *UNTRACKED, *more]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_agents_are_trained_and_a_resumed_run_gives_the_same_bits(tmp_path):
    small = ["rollout.prompts_per_iteration=4", "rollout.samples_per_prompt=4", "checkpoint.interval_iterations=2"]
    small += ["algorithm.updates_per_iteration=2", "eval.interval_iterations=0", "prepare.tasks.test=8"]

    def run(name, *more):
        arguments = _arguments(tmp_path, "configs/demo/signals.yaml", *small, f"run.name={name}", *more)
        return run_command("train", *arguments)

    run("whole", "run.iterations=4")
    run("parts", "run.iterations=2", "actor.optimizer.decay_steps=16")
    run("parts", "run.iterations=4", "actor.optimizer.decay_steps=16", "--resume", "--allow-change", "actor")
    rows = {name: metric_rows(tmp_path / name) for name in ("whole", "parts")}
    for row, again in zip(rows["whole"][1:], rows["parts"][1:3] + rows["parts"][-2:], strict=True):
        told = [
            name for name in row if name.startswith(("rollout/reward", "episode/state", "episode/turns", "advantage/"))
        ]
        assert {name: row[name] for name in told} == {name: again[name] for name in told}
        assert (row["rollout/episodes_count"], row["rollout/samples_count"]) == (16, 32)
        assert (row["episode/turns_mean"], row["episode/trained_share"]) == (8, 1)
    episodes = read_json_lines(tmp_path / "whole" / "episodes.jsonl").rows
    assert [len(episode["sequences"]) for episode in episodes] == [2] * 16
    name = episodes[-1]["episode"]
    assert f"sequence {name}.receiver (completed)" in run_command("replay", str(tmp_path / "whole"), name)
    assert name in (tmp_path / "whole" / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_game_of_many_turns_is_learned_from_random_weights(tmp_path):
    run_command("train", *_arguments(tmp_path, "configs/demo/grid.yaml", "run.iterations=30"))
    rows = metric_rows(tmp_path / "run")
    held_out = [row["eval/held_out/accuracy"] for row in rows if "eval/held_out/accuracy" in row]
    assert held_out[0] < 0.1
    assert held_out[-1] > 0.6
    assert rows[-1]["episode/success_share"] > rows[1]["episode/success_share"]
