"""The model card of a trained policy: README.md of its folder, with the facts of the run that it comes from."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from rlpipe import __version__
from rlpipe.config.root import Config
from rlpipe.model.hub import HubName

_KEPT_KEYS = ("license", "license_name", "license_link", "language")  # true of what is trained from a model, too


def model_card(config: Config, iteration: int, rows: Sequence[Mapping[str, Any]], source_card: str = "") -> str:
    """Markdown with the metadata block that the hub reads.

    rows: rows of metrics.jsonl, later ones than `iteration` are left out. source_card: README.md of the model that
    was trained, for its licence.
    """
    metadata = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        **_base_model(config.model.path),
        "tags": ["rlpipe", "sft" if config.sft else "grpo"],
        **{key: value for key, value in _front_matter(source_card).items() if key in _KEPT_KEYS},
    }
    past = [row for row in rows if row["iteration"] <= iteration]
    parts = [
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n",
        f"# {config.run.name}\n",
        f"`{config.model.path}` after {iteration} of {config.run.iterations} iterations of "
        f"{'supervised training' if config.sft else 'GRPO'} by rlpipe {__version__}.\n",
        f"## Training\n\n{_table(('setting', 'value'), _facts(config).items())}\n",
        _evaluation(past),
        _USE,
    ]
    return "\n".join(part for part in parts if part)


_USE = """## Use

Weights, configuration, tokenizer and chat template load as they are:

    AutoModelForCausalLM.from_pretrained(FOLDER)     # transformers
    python -m sglang.launch_server --model-path FOLDER
    vllm serve FOLDER
"""


def _facts(config: Config) -> dict[str, str]:
    optimizer = config.actor.optimizer
    facts = {
        "data": ", ".join(f"{one.name} ({one.path})" for one in config.data.train),
        "learning rate": f"{optimizer.learning_rate:g}, {optimizer.schedule}, {optimizer.warmup_steps} warm-up steps",
        "precision": config.actor.dtype,
        "seed": str(config.seed),
    }
    if config.sft:
        return {"sequences a step": str(config.sft.sequences_per_step), **facts}
    rollout, algorithm = config.rollout, config.algorithm
    return {
        "samples an iteration": f"{rollout.prompts_per_iteration} prompts x {rollout.samples_per_prompt} responses",
        "response limit": f"{config.longest_training_response_tokens} tokens",
        "sampling": f"temperature {rollout.sampling.temperature:g}, top-p {rollout.sampling.top_p:g}",
        "advantage and loss": f"{algorithm.advantage}, {algorithm.loss}",
        "KL coefficient": f"{algorithm.kl.coefficient:g}",
        "reward": config.reward.name,
        **facts,
    }


def _evaluation(rows: Sequence[Mapping[str, Any]]) -> str:
    """First and last value of each evaluation metric."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith("eval/") and not name.endswith("_count"):
                values.setdefault(name.removeprefix("eval/"), []).append(value)
    if not values:
        return ""
    lines = [(name, f"{found[0]:.4g}", f"{found[-1]:.4g}") for name, found in values.items()]
    return f"## Evaluation\n\n{_table(('metric', 'first', 'this model'), lines)}\n"


def _table(head: Sequence[str], rows: Any) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


def _base_model(path: str) -> dict[str, str]:
    name = HubName.parse(path)
    return {"base_model": name.repository} if name else {}


def _front_matter(card: str) -> dict[str, Any]:
    parts = card.split("---\n", 2)
    if not card.startswith("---\n") or len(parts) < 3:
        return {}
    try:
        found = yaml.safe_load(parts[1])
    except yaml.YAMLError:  # of a page that others wrote; only its licence would be taken over
        return {}
    return found if isinstance(found, dict) else {}
