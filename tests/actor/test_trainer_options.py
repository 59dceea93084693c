"""What the whole configuration says about the trainer."""

import pytest

from tests.small_config import small_config


@pytest.mark.parametrize(
    ("algorithm", "reference", "kept"),
    [({}, None, False), ({"kl": {"coefficient": 0.1}}, None, True), ({}, "other", True)],
)
def test_a_trainer_is_built_as_the_run_says(tmp_path, algorithm, reference, kept):
    from actor.worker import trainer_options

    folders = {name: str(tmp_path / name) for name in ("policy", "other")}
    for folder in folders.values():
        (tmp_path / folder).mkdir()
    model = {"path": folders["policy"], "reference_path": reference and folders[reference]}
    config = small_config(
        run={"name": "r", "iterations": 5},
        seed=7,
        model=model,
        algorithm={"updates_per_iteration": 3, **algorithm},
        actor={"optimizer": {"learning_rate": 0.25}},
    )
    options = trainer_options(config)
    assert (str(options.model_path), options.keep_reference, options.seed) == (folders["policy"], kept, 7)
    assert options.reference_path == (reference and tmp_path / reference)
    assert (options.total_steps, options.actor.optimizer.learning_rate) == (15, 0.25)
