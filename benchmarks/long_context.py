"""Supervised steps over one sequence of 64k tokens and more, as `rlpipe sft` runs them, beside what `plan` says.

The policy has the shape of Qwen3.5-35B-A3B, its first layers only, and random weights.

    python benchmarks/long_context.py                                          one GPU, 65,536 and 131,072 tokens
    python benchmarks/long_context.py --gpus 2 --context 2 --tokens 262144     two GPUs share each sequence
    python benchmarks/long_context.py actor.gdn_backend=flashqla               the same with other settings
    python benchmarks/long_context.py --tiny --tokens 256                      a CPU

TFLOP/s and MFU count the causal half of attention (docs/flops.md).
"""

import argparse
import json
import random
import string
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from layer_shapes import hybrid_config
from random_policy import save_random_policy
from run_table import Row
from train_run import train

from rlpipe.config.load import load_config
from rlpipe.estimate.present_cluster import present_cluster
from rlpipe.estimate.run_estimate import Plan, plan
from rlpipe.training.trained_share import planned_model

_VOCABULARY = 32_768


COLUMNS = (
    Row("step s", "time/step_seconds", form=",.2f"),
    Row("actor s", "perf/actor_train_seconds", form=",.2f"),
    Row("tokens/s/GPU", "tokens_per_gpu", form=",.0f"),
    Row("TFLOP/s/GPU", "perf/actor_train_tflops_per_gpu", form=",.1f"),
    Row("MFU %", "perf/actor_train_mfu", scale=100, form=",.1f"),
    Row("GPU peak GB", "memory/actor_gpu_peak_bytes", scale=1e-9, form=",.1f"),
)


def main() -> None:
    options = _arguments()
    here = present_cluster()
    cluster = here.model_copy(update={"node": here.node.model_copy(update={"gpus": min(options.gpus, here.gpus)})})
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        shape = hybrid_config(options.layers, 320 if options.tiny else _VOCABULARY, options.tiny)
        policy = save_random_policy(shape, folder / "policy", "float32" if options.tiny else "bfloat16")
        print(f"{options.layers} layers, {options.gpus} processes, CP {options.context}, EP {options.expert}")
        print(f"{'tokens':>10}{'':>8}" + "".join(f"{column.title:>14}" for column in COLUMNS) + "  chosen", flush=True)
        for tokens in options.tokens:
            path = _write_configuration(options, folder, policy, tokens)
            estimate = plan(config := load_config(path, options.settings), planned_model(config), cluster)
            for problem in estimate.problems:
                print(f"plan: {tokens:,} tokens do not fit: {problem}", flush=True)
            _print_row(tokens, "plan", _planned(estimate, tokens, options), ", ".join(estimate.notes))
            show = partial(_print_step, tokens, options.gpus)
            train(str(path), folder, path.stem, options.settings, command="sft", on_row=show)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--layers", type=int, default=8)
    add("--tokens", type=lambda text: [int(one) for one in text.split(",")], default=[65_536, 131_072])
    add("--iterations", type=int, default=3)
    add("--gpus", type=int, default=1, help="on a CPU, processes")
    add("--context", type=int, default=1)
    add("--expert", type=int, default=1)
    add("--tiny", action="store_true", help="small widths and float32, for a CPU")
    add("--folder", type=Path, default=None, help="policy and runs stay there; a temporary one when left out")
    add("settings", nargs="*", metavar="KEY=VALUE", help="further settings of the configuration")
    return parser.parse_args()


def _write_configuration(options: argparse.Namespace, folder: Path, policy: str, tokens: int) -> Path:
    """One sequence a data-parallel rank and step; the byte tokenizer makes a token of each letter.

    Letters are drawn: of one and the same letter all tokens would go to the same few experts, on one of their ranks.
    """
    sequences = options.gpus // options.context
    rows = folder / f"{tokens}.jsonl"
    letters = random.Random(0)
    with rows.open("w") as file:
        for _ in range(sequences * options.iterations):
            label = "".join(letters.choices(string.ascii_letters + string.digits, k=tokens - 17))  # and its end token
            file.write(json.dumps({"prompt": "a" * 16, "label": label}) + "\n")
    path = folder / f"sft-{tokens}.yaml"
    path.write_text(yaml.safe_dump(_settings(options, policy, rows, sequences, tokens)))
    return path


def _settings(options: argparse.Namespace, policy: str, rows: Path, sequences: int, tokens: int) -> dict[str, Any]:
    return {
        "run": {"name": rows.stem, "iterations": options.iterations},
        "model": {"path": policy},
        "data": {
            "train": [{"name": "long", "path": str(rows), "apply_chat_template": False}],
            "max_prompt_tokens": 64,
        },
        "rollout": {"max_response_tokens": 16},  # of which a supervised run has none
        "sft": {
            "sequences_per_step": sequences,
            "response_template": "{label}",
            "max_sequence_tokens": tokens,
        },
        "actor": {
            "dtype": "float32" if options.tiny else "bfloat16",
            "processes": options.gpus,
            "parallel": {"context": options.context, "expert": options.expert},
            "max_tokens_per_gpu": tokens // options.context,
            "recompute": {"granularity": "auto"},
        },
        "checkpoint": {"interval_iterations": 0, "save_hf": "never"},
        "trackers": {"tensorboard": False, "wandb": "off"},
    }


def _planned(estimate: Plan, tokens: int, options: argparse.Namespace) -> dict[str, float]:
    needs = {need.name: float(need.total) for need in estimate.needs}
    step = sum(estimate.seconds.values())
    figures = {"time/step_seconds": step, "perf/actor_train_seconds": step}
    if step:
        figures["tokens_per_gpu"] = tokens / options.context / step
    if "actor GPU" in needs:
        figures["memory/actor_gpu_peak_bytes"] = needs["actor GPU"] + estimate.kept_state_bytes
    return figures


def _print_step(tokens: int, gpus: int, row: dict[str, float]) -> None:
    # Every process meets all tokens of its sequence's share.
    row["tokens_per_gpu"] = row["perf/actor_tokens_per_second"] / gpus
    _print_row(tokens, f"{int(row['iteration'])}", row, "")


def _print_row(tokens: int, kind: str, row: dict[str, float], note: str) -> None:
    cells = "".join(
        f"{row[column.metric] * column.scale:>14{column.form}}" if column.metric in row else f"{'':14}"
        for column in COLUMNS
    )
    print(f"{tokens:>10,}{kind:>8}{cells}  {note}".rstrip(), flush=True)


if __name__ == "__main__":
    main()
