"""The benchmark of recipes runs what ships: with all of a recipe's settings but those that name the hub."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlpipe.config.load import load_config
from rlpipe.data import load_prompts
from rlpipe.data.mapped_rows import Preparation
from rlpipe.data.prompts import load_tokenizer

PROJECT = Path(__file__).resolve().parents[2]
RECIPES = sorted((PROJECT / "configs" / "recipes").glob("qwen*.yaml"))
MADE = {"path", "subset", "split"}  # of a data set
NAMED = {
    "run.name",
    "run.directory",
    "run.iterations",
    "model.path",
    "checkpoint.interval_iterations",
    "checkpoint.save_hf",
}


def _differing(first, second, place=""):
    """Dotted keys of the settings in which two configurations differ; those of data sets without their number."""
    if isinstance(first, dict) and isinstance(second, dict):
        keys = sorted(first.keys() | second.keys())
        return [key for name in keys for key in _differing(first.get(name), second.get(name), f"{place}.{name}")]
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return [key for one, other in zip(first, second, strict=True) for key in _differing(one, other, f"{place}[]")]
    return [] if first == second else [place.removeprefix(".")]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_run_with_all_of_its_settings_and_rows_that_fit(recipe, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(PROJECT / "benchmarks"))
    monkeypatch.setattr("sys.argv", ["shipped_recipes.py", "--tiny", recipe.stem])
    import shipped_recipes

    options = shipped_recipes.arguments()
    monkeypatch.setattr(shipped_recipes, "overrides", lambda *_: [])
    config = shipped_recipes.prepared(recipe.stem, options, tmp_path).config
    shipped = load_config(recipe)
    differing = _differing(shipped.model_dump(mode="json"), config.model_dump(mode="json"))
    assert "model.path" in differing and "data.train[].path" in differing
    assert {key for key in differing if "[]." not in key} <= NAMED
    assert {key.rsplit("[].")[-1] for key in differing if "[]." in key} <= MADE

    tokenizer = load_tokenizer(config.model.path)
    step = config.sft.sequences_per_step if config.sft else config.rollout.prompts_per_iteration
    for dataset in (*config.data.train, *config.eval.datasets):
        prompts = load_prompts([dataset], tokenizer, config.data.max_prompt_tokens, False, Preparation(None, 1), False)
        assert prompts.rows.too_long == 0
        assert len(prompts.prompts) == (2 * step if dataset in config.data.train else shipped_recipes.EVALUATED_ROWS)


@pytest.mark.slow
def test_recipes_train_beside_their_plan_and_one_that_cannot_is_named(tmp_path):
    command = [sys.executable, "benchmarks/shipped_recipes.py", "--tiny", "--folder", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    recipes = ["qwen3_0_6b_gsm8k_sft", "qwen3_0_6b_gsm8k"]
    done = subprocess.run(
        [*command, *recipes], cwd=PROJECT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for recipe in recipes:
        assert f"\n{recipe}: 0.00 B; chosen by memory: recompute none, packs of " in done.stdout
    assert done.stdout.count("; finished\n") == 2 and done.stdout.count("\nrollout s ") == 1

    broken = [*command, "--set", "reward.name=nowhere.at:all", "qwen3_0_6b_gsm8k"]
    done = subprocess.run(broken, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "did not train in every iteration: qwen3_0_6b_gsm8k" in done.stderr
