"""The table of docs/recipes.md: what `rlpipe plan` says of each recipe on clusters of one kind of GPU each.

python scripts/recipe_table.py
"""

from collections.abc import Iterator

from rlpipe.commands.clusters import load_cluster
from rlpipe.config.load import load_config
from rlpipe.config.root import Config
from rlpipe.estimate.run_estimate import plan
from rlpipe.shared.project_files import CLUSTERS, CONFIGS
from rlpipe.training.trained_share import planned_model

_GIGABYTES = (24, 48, 80, 141)


def recipe_rows() -> Iterator[str]:
    """The rows of a Markdown table, its head first."""
    yield "| recipe | GPUs | held out | " + " | ".join(f"{size} GB" for size in _GIGABYTES) + " |"
    yield "|---|---|---|" + "---|" * len(_GIGABYTES)
    for path in sorted((CONFIGS / "recipes").glob("qwen*.yaml")):
        config = load_config(path)
        cells = [_seconds(config, size) for size in _GIGABYTES]
        held_out = ", ".join(one.name for one in config.eval.datasets) or "none"
        yield f"| `{path.stem}` | {config.needed_gpus} | {held_out} | " + " | ".join(cells) + " |"


def _seconds(config: Config, gigabytes: int) -> str:
    """Of an iteration where the recipe fits; empty where no file describes such a cluster."""
    name = f"local_{config.needed_gpus}x{gigabytes}gb"
    if not (CLUSTERS / f"{name}.yaml").exists():
        return ""
    planned = plan(config, planned_model(config), load_cluster(name))
    return "no" if planned.problems or planned.step_seconds is None else f"{planned.step_seconds:,.0f} s"


if __name__ == "__main__":
    print("\n".join(recipe_rows()))
