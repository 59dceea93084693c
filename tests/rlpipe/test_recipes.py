"""Every recipe: what it is based on, where it fits, and a dry run with the model's true sizes."""

import json
from pathlib import Path

import pytest
from true_size_models import write_true_size_model
from typer.testing import CliRunner

from rlpipe.cli import app
from rlpipe.commands.clusters import load_cluster
from rlpipe.config.load import load_config
from rlpipe.config.root import Config
from rlpipe.estimate.run_estimate import plan
from rlpipe.shared.project_files import CONFIGS, MODELS
from rlpipe.training.trained_share import planned_model

RECIPES = {path.stem: load_config(path) for path in sorted((CONFIGS / "recipes").glob("qwen*.yaml"))}
NAMES = {"zhuzilin/dapo-math-17k", "openai/gsm8k"}
HELD_OUT = {"zhuzilin/aime-2024", "HuggingFaceH4/MATH-500", "openai/gsm8k"}
SMALLEST = {  # of the clusters of one kind, in rising order
    1: ("local_1x24gb", "local_1x48gb", "local_1x80gb", "local_1x141gb"),
    2: ("local_2x24gb", "local_2x48gb", "local_2x80gb", "local_2x141gb"),
}
COLUMNS = {
    "prompt": "What is {n} + 1?",
    "label": "{m}",
    "question": "What is {n} + 1?",
    "answer": "{n} + 1 = {m}\n#### {m}",
    "problem": "What is {n} + 1?",
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_names_its_model_data_and_evaluation_on_the_hub(name):
    config = RECIPES[name]
    assert (MODELS / Path(config.model.path).name).is_dir()
    assert {dataset.path for dataset in config.data.train} <= NAMES
    held_out = {dataset.path for dataset in config.eval.datasets}
    assert held_out <= HELD_OUT and (held_out or config.sft)


@pytest.mark.parametrize("name", [name for name, config in RECIPES.items() if config.needed_gpus <= 2])
def test_a_recipe_for_few_gpus_fits_from_some_size_on(name):
    config = RECIPES[name]
    model = planned_model(config)
    clusters = [load_cluster(cluster) for cluster in SMALLEST[config.needed_gpus]]
    fits = [not plan(config, model, cluster).problems for cluster in clusters]
    assert fits == sorted(fits) and fits[-1], fits
    assert fits[0] == (model.parameters < 3e9)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows under every column that recipes name, other ones for evaluation, laid out as the hub's."""
    folder = tmp_path_factory.mktemp("rows")
    for split, first in (("train", 0), ("test", 100)):
        (folder / split / "main").mkdir(parents=True)
        rows = [{name: text.format(n=n, m=n + 1) for name, text in COLUMNS.items()} for n in range(first, first + 70)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / split / f"{split}.jsonl").write_text(text)
        (folder / split / "main" / f"{split}.jsonl").write_text(text)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in {Path(config.model.path).name for config in RECIPES.values()}:
        write_true_size_model(name, folder / name)
    return folder


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_passes_a_dry_run_with_its_model_s_sizes(name, data, models):
    config = RECIPES[name]
    command = ["sft" if config.sft else "train", str(CONFIGS / "recipes" / f"{name}.yaml"), "--dry-run"]
    result = CliRunner().invoke(app, [*command, *_local(config, data, models)])
    assert result.exit_code == 0, result.output
    assert "model folder" in result.output and "are fine" in result.output


def _local(config: Config, data: Path, models: Path) -> list[str]:
    """What the hub would give, from folders."""
    settings = [f"model.path={models / Path(config.model.path).name}", f"data.cache_directory={data}/cache"]
    settings += [f"data.train.{at}.path={data}/train" for at, _ in enumerate(config.data.train)]
    for at, dataset in enumerate(config.eval.datasets):
        settings += [f"eval.datasets.{at}.path={data}/test", f"eval.datasets.{at}.split=test"]
        assert dataset.split in ("train", "test")
    return settings
