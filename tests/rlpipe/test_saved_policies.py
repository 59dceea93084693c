"""Which of a run's policies are written for others to load, and what their model card tells."""

from pathlib import Path

import pytest

from rlpipe.config.load import load_config
from rlpipe.config.root import Config
from rlpipe.monitoring.json_lines import append_json_line
from rlpipe.monitoring.model_card import model_card
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.prepare import prepare
from rlpipe.shared.errors import ConfigError
from rlpipe.training.policies import PolicyFolders, policy_facts

_DEMO = Path(__file__).parents[2] / "configs/demo/arithmetic.yaml"


class Writer:
    """Writes of a policy only what is told of it."""

    def __init__(self):
        self.written = []

    def save_hf(self, folder, facts):
        folder.mkdir(exist_ok=True)
        facts.write(folder)
        self.written.append((folder.name, facts.iteration))


def _config(folder: Path, *overrides: str) -> Config:
    places = [f"run.directory={folder}", f"model.path={folder}/policy", f"prepare.directory={folder}/task"]
    small = ["run.name=r", "run.iterations=4", "prepare.policy.layers=1", "prepare.arithmetic.train_problems=8"]
    config = load_config(_DEMO, [*places, *small, "checkpoint.interval_iterations=2", *overrides])
    prepare(config)
    RunDirectory.of(config).path.mkdir(exist_ok=True)
    return config


def _written(config: Config, accuracies: list[float | None]) -> list[tuple[str, int]]:
    writer = Writer()
    policies = PolicyFolders(config, RunDirectory.of(config), writer)
    for iteration, accuracy in enumerate(accuracies, start=1):
        policies.after_iteration(iteration, {} if accuracy is None else {"eval/held_out/accuracy": accuracy})
    policies.after_training()
    return writer.written


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("never", []),
        ("final", [("policy", 4)]),
        ("every", [("iteration_00000002", 2), ("iteration_00000004", 4), ("policy", 4)]),
        ("best", [("best_policy", 1), ("best_policy", 3), ("policy", 4)]),
    ],
)
def test_save_hf_chooses_the_policies(tmp_path, choice, expected):
    config = _config(tmp_path, f"checkpoint.save_hf={choice}")
    assert _written(config, [0.1, 0.1, 0.4, None]) == expected


def test_a_resumed_run_remembers_the_best_policy(tmp_path):
    config = _config(tmp_path, "checkpoint.save_hf=best")
    assert ("best_policy", 1) in _written(config, [0.5])
    assert _written(config, [0.5, 0.4]) == [("policy", 4)]
    assert ("best_policy", 3) in _written(config, [0.1, 0.2, 0.6])


def test_the_best_policy_goes_by_the_reward_where_there_is_no_accuracy(tmp_path):
    config = _config(tmp_path, "checkpoint.save_hf=best")
    writer = Writer()
    policies = PolicyFolders(config, RunDirectory.of(config), writer)
    for iteration, reward in enumerate([0.1, 0.4, 0.2], start=1):
        policies.after_iteration(iteration, {"eval/held_out/reward_mean": reward})
    assert writer.written == [("best_policy", 1), ("best_policy", 2)]


def test_the_best_policy_of_a_supervised_run_has_the_lowest_loss(tmp_path):
    config = _config(tmp_path, "checkpoint.save_hf=best", "sft={}")
    writer = Writer()
    policies = PolicyFolders(config, RunDirectory.of(config), writer)
    for iteration, loss in enumerate([2.0, 1.5, 1.75, 1.5, 1.25], start=1):
        policies.after_iteration(iteration, {"train/loss": 0.0, "eval/held_out/loss": loss})
    assert writer.written == [("best_policy", 1), ("best_policy", 2), ("best_policy", 5)]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["checkpoint.save_hf=best", "eval.datasets=[]"], "eval.datasets is empty"),
        (["checkpoint.best_metric=eval/held_out/accurcy"], "give one of eval/held_out/accuracy"),
        (["checkpoint.best_metric=eval/other/accuracy"], "none of the evaluation's metrics"),
        (["checkpoint.best_metric=eval/held_out/accuracy", "sft={}"], "give one of eval/held_out/loss"),
    ],
)
def test_a_best_policy_needs_a_metric_that_there_is(overrides, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load_config(_DEMO, overrides)


def test_what_is_told_of_an_earlier_policy_is_of_its_time(tmp_path):
    """That of a checkpoint which is exported after the run has gone on."""
    config = _config(tmp_path)
    directory = RunDirectory.of(config)
    for iteration, accuracy in enumerate((0.25, 0.5, 0.75)):
        append_json_line(directory.metrics, {"iteration": iteration, "eval/held_out/accuracy": accuracy})
    assert policy_facts(config, directory, 1).metrics == {"eval/held_out/accuracy": 0.5}


def test_a_model_card_has_the_facts_and_the_licence_of_its_base(tmp_path):
    config = _config(tmp_path, "model.path=some-one/Model@abc", "prepare.policy=null")
    rows = [
        {"iteration": 0, "eval/held_out/accuracy": 0.25},
        {"iteration": 2, "eval/held_out/accuracy": 0.5},
        {"iteration": 4, "eval/held_out/accuracy": 0.75},
    ]
    card = model_card(config, 2, rows, "---\nlicense: apache-2.0\ntags: [theirs]\n---\nTheir page\n")
    assert card.startswith("---\nlibrary_name: transformers\n")
    for fact in ("base_model: some-one/Model\n", "license: apache-2.0\n", "after 2 of 4 iterations", "| 0.25 | 0.5 |"):
        assert fact in card
    assert "theirs" not in card and "Their page" not in card and "0.75" not in card
