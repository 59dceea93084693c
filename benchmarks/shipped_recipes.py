"""Recipes as they ship, at the true sizes of their models, beside what `rlpipe plan` says of each part.

What a recipe names on the hub is made here: the model with random weights, whose responses therefore reach the limit,
and a few rows of the columns that its data sets have. Few iterations are run and no checkpoint is kept; all else is
the recipe's.

    python benchmarks/shipped_recipes.py qwen3_4b_gsm8k qwen3_4b_dapo       each on the GPUs that it asks for
    python benchmarks/shipped_recipes.py --tiny qwen3_0_6b_gsm8k            small widths and limits, for a CPU
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from layer_shapes import text_model, tiny_model
from newcomer import ON_A_CPU, fill_vocabulary
from random_policy import save_random_policy
from run_table import derived, run_lines, start_seconds
from train_run import PROJECT, train
from whole_step import work_folder
from whole_step_setup import planned_figures

from rlpipe.config.cluster import ClusterConfig
from rlpipe.config.data import DatasetConfig
from rlpipe.config.load import load_config
from rlpipe.config.root import Config
from rlpipe.estimate.present_cluster import present_cluster
from rlpipe.estimate.run_estimate import plan
from rlpipe.shared.host_memory import used_bytes
from rlpipe.training.trained_share import planned_model

RECIPES = PROJECT / "configs" / "recipes"
MODELS = PROJECT / "configs" / "models"
EVALUATED_ROWS = 4
PROMPT_SHARE = 0.5
"""Of `max_prompt_tokens`: a letter is a token here, and template and chat markers come on top."""
ON_A_CPU_TOO = ["actor.dtype=float32", "rollout.engine.dtype=float32", "rollout.engine.memory_fraction=0.3"]


@dataclass(frozen=True)
class Shipped:
    """A recipe, its configuration with everything that is made here in place of the hub's, and where that is."""

    name: str
    config: Config
    file: Path
    folder: Path

    @property
    def command(self) -> str:
        return "sft" if self.config.sft else "train"


def main() -> None:
    options = arguments()
    cluster = present_cluster()
    idle = []
    with work_folder(options.folder) as folder:
        for name in options.recipes:
            trained, lines = run(prepared(name, options, folder), options, cluster)
            print("\n".join(lines), flush=True)
            idle += [] if trained else [name]
    if idle:
        sys.exit(f"did not train in every iteration: {', '.join(idle)}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("recipes", nargs="+", metavar="RECIPE", help="names of configs/recipes, run one after the other")
    add("--iterations", type=int, default=2)
    add("--tiny", action="store_true", help="small widths, limits and numbers of prompts")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a further setting of each recipe")
    add("--folder", type=Path, default=None, help="models, rows and runs stay there; a temporary one when left out")
    options = parser.parse_args()
    if unknown := [name for name in options.recipes if not (RECIPES / f"{name}.yaml").exists()]:
        parser.error(f"{', '.join(unknown)}: no file of that name in {RECIPES}")
    return options


def prepared(name: str, options: argparse.Namespace, folder: Path) -> Shipped:
    """With the model's folder, the rows and the configuration written."""
    recipe = load_config(RECIPES / f"{name}.yaml")
    model = model_folder(recipe, folder, options.tiny)
    data = folder / name
    data.mkdir(exist_ok=True)
    settings = {
        "base": str(RECIPES / f"{name}.yaml"),
        "run": {"name": name, "directory": str(folder / "runs"), "iterations": options.iterations},
        "model": {"path": str(model)},
        "data": {"train": [with_rows(one, recipe, data, options) for one in recipe.data.train]},
        "eval": {"datasets": [with_rows(one, recipe, data, options) for one in recipe.eval.datasets]},
        "checkpoint": {"interval_iterations": 0, "save_hf": "never"},
    }
    file = data / "recipe.yaml"
    file.write_text(yaml.safe_dump(settings))
    return Shipped(name, load_config(file, overrides(recipe, options)), file, folder)


def overrides(recipe: Config, options: argparse.Namespace) -> list[str]:
    if not options.tiny:
        return list(options.set)
    small = [setting for setting in ON_A_CPU if not (recipe.sft and setting.startswith("rollout."))]
    return [*small, *ON_A_CPU_TOO, *(["sft.sequences_per_step=4"] if recipe.sft else []), *options.set]


def model_folder(recipe: Config, folder: Path, tiny: bool) -> Path:
    """Of the recipe's model with random weights, made once."""
    name = Path(recipe.model.path).name
    target = folder / name
    if not target.exists():
        shape = text_model(json.loads((MODELS / name / "config.json").read_text()))
        shape = tiny_model(shape) if tiny else shape
        save_random_policy(shape, target, "bfloat16")
        fill_vocabulary(target / "tokenizer.json", shape["vocab_size"])
    return target


def with_rows(dataset: DatasetConfig, recipe: Config, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The recipe's own settings of a data set, whose rows are made."""
    trained = dataset in recipe.data.train
    step = recipe.sft.sequences_per_step if recipe.sft else recipe.rollout.prompts_per_iteration
    count = step * options.iterations if trained else EVALUATED_ROWS
    file = folder / f"{dataset.name}-{'train' if trained else 'held-out'}.jsonl"
    rows = made_rows(dataset, count, 0 if trained else 10**5, int(PROMPT_SHARE * recipe.data.max_prompt_tokens))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = dataset.model_dump(mode="json", exclude_unset=True, exclude={"path", "subset", "split", "rows", "streaming"})
    return own | {"path": str(file)}


def made_rows(dataset: DatasetConfig, count: int, first: int, letters: int) -> Iterator[dict[str, str]]:
    """Problems of about `letters` letters, each another, with answers as GSM8K writes them."""
    template = len(dataset.prompt_template or "")
    for number in range(first, first + count):
        problem = f"What is {number} and {number}? ".ljust(max(0, letters - template), "x")
        answer = f"{number} and {number} make {2 * number}. {'So it is. ' * 12}\n#### {2 * number}"
        yield {dataset.prompt_column: problem, dataset.label_column: answer}


def run(shipped: Shipped, options: argparse.Namespace, here: ClusterConfig) -> tuple[bool, list[str]]:
    """Whether every iteration updated the policy, and the table."""
    config = shipped.config
    node = here.node.model_copy(update={"gpus": min(here.gpus, config.needed_gpus)})
    estimate = plan(config, planned_model(config), here.model_copy(update={"node": node}))
    before = used_bytes()
    rows: list[dict[str, float]] = []
    try:
        settings = overrides(config, options)
        rows = train(str(shipped.file), shipped.folder / "runs", shipped.name, settings, command=shipped.command)
        ended = "finished"
    except subprocess.CalledProcessError as error:
        ended = f"failed with exit code {error.returncode}"
    iterations = [derived(row, before) for row in rows if row["iteration"] > 0]
    chosen = ", ".join([*estimate.notes, *estimate.problems])
    title = f"{shipped.name}: {estimate.model.parameters / 1e9:.2f} B; {chosen}; {ended}"
    updates = [row["train/updates_applied_count"] for row in iterations]
    lines = run_lines(title, planned_figures(estimate), iterations, start_seconds(rows))
    return updates == list(range(1, options.iterations + 1)), lines


if __name__ == "__main__":
    main()
