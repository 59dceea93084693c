"""The modes `sync`, `one_step_off` and `async` side by side: time, idle shares, staleness, and on a CPU accuracy.

    python benchmarks/modes.py [--seed 0] [--modes sync,async] [KEY=VALUE ...]      on a CPU the demo, which learns
    python benchmarks/modes.py [--model Qwen3-1.7B] [--prompt-letters 500]      on two GPUs, one for each side

On GPUs weights are random and the lengths of responses are drawn, long-tailed over prompts and around each, so that a
part of them is still running when a batch is full. Prompts are as long as lets both sides work for about as long on
this machine, since longer ones are more work of the actor alone: without `--prompt-letters`, runs in mode `async` find
that length first, and the last of them is the row of that mode. Further settings go to all runs. The modes run one
after the other, so on a machine that is shared compare shares, not seconds.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import fmean

import torch
from random_policy import save_random_policy
from train_run import train
from whole_step_setup import MODELS, PROJECT

from rlpipe.config.load import load_config

MODES = ("sync", "one_step_off", "async")
_HELD_OUT = "eval/held_out/accuracy"
_MEAN_GAP = "mismatch/logprob_abs_mean"
_RESPONSE_TOKENS = "rollout/response_tokens_mean"
_IDLE_SHARES = ("perf/rollout_idle_share", "perf/actor_idle_share")
_PROMPTS = 512
_FIRST_LETTERS, _FEWEST_LETTERS, _MOST_LETTERS = 512, 32, 4096
_TRIALS, _BALANCED_IDLE_SHARE = 3, 0.06
_FILLING, _EMPTYING = 2, 2
ON_GPUS = [
    "run.iterations=8",
    "eval.datasets=[]",
    "rollout.prompts_per_iteration=32",
    "rollout.samples_per_prompt=16",
    "rollout.max_response_tokens=1024",
    "rollout.max_staleness=2",
    "rollout.sampling.ignore_eos=true",
    "rollout.generate={function: tests.rlpipe.long_tail:write_drawn_length, options: {median: 260, sigma: 0.5}}",
    "rollout.engine={dtype: bfloat16, max_running_requests: 256, deterministic: false}",
    "actor={dtype: bfloat16, max_tokens_per_gpu: auto, recompute: {granularity: auto}}",
    "reward.workers=2",
    "checkpoint.interval_iterations=0",
    "checkpoint.save_hf=never",
    "trackers={tensorboard: false, wandb: 'off'}",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="Qwen3-1.7B", help="of configs/models, on GPUs")
    parser.add_argument("--prompt-letters", type=int, default=0, help="on GPUs; 0: found by trials")
    parser.add_argument("--modes", default=",".join(MODES), help="one run each")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    modes = options.modes.split(",")
    if unknown := set(modes) - set(MODES):
        parser.error(f"--modes {', '.join(sorted(unknown))}: use {', '.join(MODES)}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        config, settings = ("configs/demo/arithmetic.yaml", [])
        if torch.cuda.is_available():
            config = "configs/recipes/dapo_math.yaml"
            settings = [*ON_GPUS, f"model.path={random_policy(options.model, folder)}"]
        settings = [f"seed={options.seed}", *settings, *options.overrides]
        iterations = load_config(PROJECT / config, ["run.name=modes", *settings]).run.iterations
        if iterations <= _FILLING + _EMPTYING:
            parser.error(f"run.iterations={iterations}: {_FILLING + _EMPTYING} are left out, so more are needed")
        print(
            f"{'mode':14}{'before':>9}{'after':>9}{'step s':>9}{'tokens/s':>10}{'engines idle':>15}{'actor idle':>13}"
            f"{'sum':>9}{'versions old':>14}{'mean gap':>10}",
            flush=True,
        )
        measured: list[dict[str, float]] = []
        if torch.cuda.is_available():
            letters = options.prompt_letters
            if not letters:
                letters, measured = balanced_run(config, folder, settings)
            settings = [*prompts_of(letters, folder), *settings]
        for mode in modes:
            rows = measured if mode == "async" and measured else run(config, mode, folder, settings)
            print(f"{mode:14}{summary(rows)}", flush=True)


def random_policy(model: str, folder: Path) -> str:
    """The folder of a policy with this shape, which is made here."""
    shape = json.loads((MODELS / model / "config.json").read_text())
    return save_random_policy(shape, folder / "policy", "bfloat16")


def prompts_of(letters: int, folder: Path) -> list[str]:
    """Settings that name prompts of so many letters, each a token, which are made here."""
    prompts = folder / f"prompts-{letters}.jsonl"
    rows = ({"prompt": f"{index:06d} ".ljust(letters, "x"), "label": str(index)} for index in range(_PROMPTS))
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"data.max_prompt_tokens={letters}",
        f"data.train=[{{name: prompts, path: {prompts}, apply_chat_template: false}}]",
    ]


def balanced_run(config: str, folder: Path, settings: list[str]) -> tuple[int, list[dict[str, float]]]:
    """Letters of a prompt with which neither side waits much for the other in mode `async`, and the metrics of that
    run. Every trial is told. The last of them counts, balanced or not: its row says how far it is."""
    letters = _FIRST_LETTERS
    for trial in range(1, _TRIALS + 1):
        rows = run(config, "async", folder, [*prompts_of(letters, folder), *settings], name=f"trial-{trial}")
        print(f"{f'{letters} letters':14}{summary(rows)}", flush=True)
        later = steady(rows)
        engines, actor = (mean(later, name) for name in _IDLE_SHARES)
        if max(engines, actor) <= _BALANCED_IDLE_SHARE or trial == _TRIALS:
            break
        letters = balanced_letters(letters, mean(later, _RESPONSE_TOKENS), engines, actor)
    return letters, rows


def balanced_letters(letters: int, response_tokens: float, engines_idle: float, actor_idle: float) -> int:
    """Letters for which the actor, whose work goes with all tokens, would be as busy as engines were."""
    wanted = (letters + response_tokens) * (1 - engines_idle) / (1 - actor_idle) - response_tokens
    return round(min(max(wanted, _FEWEST_LETTERS), _MOST_LETTERS))


def run(config: str, mode: str, folder: Path, settings: list[str], name: str = "") -> list[dict[str, float]]:
    """Metrics of the iterations of one run; iteration 0 is the evaluation before training, where there is one.

    name: of the run, where it is not its mode.
    """
    ahead = [] if mode == "sync" else ["algorithm.old_policy=rollout"]
    return train(str(PROJECT / config), folder, name or mode, [f"rollout.mode={mode}", *ahead, *settings])


def steady(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Without the first two iterations, in which everything starts and queues fill, and the last two, for which all was
    begun before, so that engines wait for the run's end."""
    return [row for row in rows if _FILLING < row["iteration"] <= rows[-1]["iteration"] - _EMPTYING]


def mean(rows: list[dict[str, float]], name: str) -> float:
    return fmean(row[name] for row in rows)


def summary(rows: list[dict[str, float]]) -> str:
    """One row: means over the steady iterations."""
    later = steady(rows)
    engines, actor = (mean(later, name) for name in _IDLE_SHARES)
    step = mean(later, "time/step_seconds")
    tokens = fmean(row[_RESPONSE_TOKENS] * row["rollout/samples_count"] for row in later) / step
    lag, gap = (mean(later, name) for name in ("rollout/weight_version_lag_mean", _MEAN_GAP))
    accuracy = [f"{row[_HELD_OUT]:9.1%}" if _HELD_OUT in row else " " * 9 for row in (rows[0], rows[-1])]
    idle = f"{engines:15.1%}{actor:13.1%}{engines + actor:9.1%}"
    return f"{''.join(accuracy)}{step:9.2f}{tokens:10,.0f}{idle}{lag:14.2f}{gap:10.1e}"


if __name__ == "__main__":
    main()
