"""How long a colocated run takes to start, cold and warm, what compiles when, and how the GPU is handed over.

The policy is a hybrid one. One GPU, a cold run of 10 iterations and a warm one of 3; and the same on a CPU, tiny:

    python benchmarks/start_and_compile.py --folder /tmp/start
    python benchmarks/start_and_compile.py --tiny --iterations 2 --warm-iterations 1

Another order of the start is a setting behind the options: `ray.start=beside`.

Prompts and responses have random lengths: each prompt belongs to one of several data sets with a length of its own.
"""

import argparse
import json
import random
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import yaml
from layer_shapes import hybrid_config
from random_policy import save_random_policy
from train_run import PROJECT, train

from rlpipe.jit_monitor import JitEvent
from rlpipe.jit_monitor.compile_table import compile_table
from rlpipe.monitoring.metric_dictionary import SLEEP_WAKE_STEPS

_LENGTHS = 12
_FIELDS = {field.name for field in fields(JitEvent)}


def main() -> None:
    options = _arguments()
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        settings = [f"jit.cache_directory={folder / 'caches'}", *options.settings]
        config = write_configuration(options, folder)
        for name, iterations in (("cold", options.iterations), ("warm", options.warm_iterations)):
            if name not in options.runs.split(","):
                continue
            if name == "cold":
                shutil.rmtree(folder / "caches", ignore_errors=True)
            shutil.rmtree(folder / name, ignore_errors=True)
            rows = train(str(config), folder, name, [f"run.iterations={iterations}", *settings])
            print("\n".join(_report(name, rows, folder / name)), flush=True)


def _report(name: str, rows: list[dict[str, float]], run: Path) -> list[str]:
    lines = ["", f"{name} start, seconds"]
    start = {key.removeprefix("start/"): value for key, value in rows[0].items() if key.startswith("start/")}
    pool_tokens = start.pop("kv_pool_tokens")
    lines += [f"  {part.removesuffix('_seconds'):18}{value:8.1f}" for part, value in start.items()]
    lines += [
        f"  {'to first token':18}{row['perf/start_to_first_token_seconds']:8.1f}"
        for row in rows
        if "perf/start_to_first_token_seconds" in row
    ][:1]
    lines += [f"  {'KV pool, tokens':18}{pool_tokens:8.0f}"]
    lines += ["", f"{name}, by iteration", *_iterations(rows)]
    lines += ["", "handing the GPU over, the actor's own seconds, means", *_actor_parts(run / "ranks.jsonl")]
    events = _events(run / "logs/jit.jsonl")
    lines += ["", "compiled at the start", *compile_table(pair for iteration, pair in events if iteration < 1)]
    later = [pair for iteration, pair in events if iteration >= 1]
    return [*lines, "", "compiled from iteration 1 on", *compile_table(later)]


def _iterations(rows: list[dict[str, float]]) -> list[str]:
    steps = [f"sleep_wake/{step}_seconds" for step in SLEEP_WAKE_STEPS]
    columns = {
        "step": "time/step_seconds",
        "rollout": "time/rollout_seconds",
        "optimizer": "time/optimizer_seconds",
        "sleep_wake": "time/sleep_wake_seconds",
        **{step.partition("/")[2].removesuffix("_seconds"): step for step in steps},
        "sync": "time/weight_sync_seconds",
        "jit s": "perf/jit_seconds",
        "compiles": "perf/jit_compiles",
        "alarms": "perf/jit_alarms",
    }
    lines = ["  iteration" + "".join(f"{title:>15}" for title in columns)]
    for row in rows:
        if row["iteration"] > 0:
            cells = (f"{row.get(metric, float('nan')):15.3f}" for metric in columns.values())
            lines.append(f"  {int(row['iteration']):9d}" + "".join(cells))
    return lines


def _actor_parts(path: Path) -> list[str]:
    """Mean over iterations and ranks of everything that belongs to giving memory back and taking it."""
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for row in map(json.loads, path.read_text().splitlines()):
        for part, value in row["seconds"].items():
            if part.startswith(("offload", "onload")):
                seconds[part].append(value)
    return [f"  {part:26}{fmean(values):8.3f}" for part, values in sorted(seconds.items())]


def _events(path: Path) -> list[tuple[int, tuple[str, JitEvent]]]:
    rows: Iterable[dict[str, Any]] = map(json.loads, path.read_text().splitlines())
    return [
        (row["iteration"], (row["worker"], JitEvent(**{key: row[key] for key in _FIELDS})))
        for row in rows
        if "key" in row  # not a compiler that has no hook
    ]


def write_configuration(options: argparse.Namespace, folder: Path) -> Path:
    dtype = "float32" if options.tiny else "bfloat16"
    policy = folder / "policy"
    if not (policy / "config.json").exists():
        save_random_policy(hybrid_config(options.layers, options.vocabulary, options.tiny), policy, dtype)
    sequence = options.prompt_tokens + options.response_tokens
    configuration = {
        "base": str(PROJECT / "configs/recipes/dapo_math.yaml"),
        "run": {"name": "start", "iterations": 1},
        "model": {"path": str(policy)},
        "data": {"train": _data_sets(options, folder), "max_prompt_tokens": options.prompt_tokens},
        "eval": {"datasets": []},
        "rollout": {
            "prompts_per_iteration": options.prompts,
            "samples_per_prompt": options.samples,
            "max_response_tokens": options.response_tokens,
            "sampling": {"ignore_eos": True},
            "engines": 1,
            "engine": {
                "dtype": dtype,
                "memory_fraction": 0.75,
                "max_running_requests": options.prompts * options.samples,
                "deterministic": False,
            },
        },
        "algorithm": {"kl": {"coefficient": 0.0}},
        "actor": {"dtype": dtype, "processes": 1, "max_tokens_per_gpu": 4 * sequence, "threads": options.threads},
        "reward": {"workers": 2},
        "ray": {"colocate": True, "sleep": "always"},
        "jit": {"warm_up": "on"},
        "checkpoint": {"interval_iterations": 0},
        "trackers": {"tensorboard": False, "wandb": "off"},
    }
    path = folder / "start.yaml"
    path.write_text(yaml.safe_dump(configuration))
    return path


def _data_sets(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Prompts of random lengths; responses of each set have a random length of their own."""
    numbers = random.Random(0)
    sets = []
    for index in range(_LENGTHS):
        rows = []
        for number in range(options.prompts * options.iterations):
            text = f"{index}:{number} ".ljust(numbers.randint(8, options.prompt_tokens), "x")
            rows.append({"prompt": text, "label": str(number)})
        path = folder / f"prompts-{index}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tokens = numbers.randint(max(1, options.response_tokens // 8), options.response_tokens)
        sampling = {"max_response_tokens": tokens}
        sets.append({"name": f"set{index}", "path": str(path), "apply_chat_template": False, "sampling": sampling})
    return sets


def _arguments() -> argparse.Namespace:
    tiny = argparse.ArgumentParser(add_help=False)
    tiny.add_argument("--tiny", action="store_true")
    small = tiny.parse_known_args()[0].tiny
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("--tiny", action="store_true", help="small widths and float32, for a CPU")
    add("--layers", type=int, default=4)
    add("--vocabulary", type=int, default=320 if small else 32_768)
    add("--prompts", type=int, default=4 if small else 16)
    add("--samples", type=int, default=2 if small else 8)
    add("--prompt-tokens", type=int, default=24 if small else 512)
    add("--response-tokens", type=int, default=16 if small else 2048)
    add("--iterations", type=int, default=10, help="of the cold run")
    add("--warm-iterations", type=int, default=3)
    add("--threads", type=int, default=1 if not torch.cuda.is_available() else 14)
    add("--runs", default="cold,warm", help="a cold run empties the caches first")
    add("--folder", type=Path, help="policy, caches and runs stay there; a temporary one when left out")
    add("settings", nargs="*", metavar="KEY=VALUE", help="further settings of the configuration")
    return parser.parse_args()


if __name__ == "__main__":
    main()
