"""One GRPO iteration of rlpipe beside one of TRL's GRPOTrainer, on a CPU, in one run.

Both get the same random policy, prompts, group size, token limit, temperature, reward and Adam settings, and the same
number of threads. The first iterations of each are left out.

    python benchmarks/cpu_step.py [--prompts 64] [--samples 8] [--tokens 48] [--iterations 6] [--threads 1]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from train_run import train

_WARM_UP = 2
_LEARNING_RATE = 2e-4
_BETA2 = 0.98
_PROJECT = Path(__file__).resolve().parent.parent
sys.path[0] = str(_PROJECT)  # instead of this folder, whose rewards.py hides the package


@dataclass(frozen=True)
class Measured:
    """Medians over the iterations kept. Tokens are sampled response tokens."""

    name: str
    seconds: float
    tokens: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def main() -> None:
    options = _options()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    if options.only_trl:
        print(json.dumps(_run_trl(options, Path(options.only_trl))))
        return
    with tempfile.TemporaryDirectory() as folder:
        ours = _measure_rlpipe(options, Path(folder))
        theirs = _measure_trl(options, Path(folder))
    print(
        f"{options.prompts} prompts x {options.samples} samples x {options.tokens} tokens, {options.threads} thread(s)"
    )
    print(f"{'':10}{'s/iteration':>14}{'tokens/s':>14}{'tokens':>10}")
    for measured in (ours, theirs):
        print(f"{measured.name:10}{measured.seconds:14.2f}{measured.tokens_per_second:14,.0f}{measured.tokens:10,.0f}")
    print(f"rlpipe / TRL: {ours.tokens_per_second / theirs.tokens_per_second:.2f} x the tokens per second")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only-trl", help=argparse.SUPPRESS)
    return parser.parse_args()


def _measure_rlpipe(options: argparse.Namespace, folder: Path) -> Measured:
    overrides = [
        f"run.iterations={options.iterations + _WARM_UP}",
        f"model.path={folder}/policy",
        f"prepare.directory={folder}/task",
        "warm_start=null",
        "eval.datasets=[]",
        "checkpoint.interval_iterations=0",
        f"rollout.prompts_per_iteration={options.prompts}",
        f"rollout.samples_per_prompt={options.samples}",
        f"rollout.max_response_tokens={options.tokens}",
        "algorithm.updates_per_iteration=1",
        "algorithm.old_policy=actor",
        f"actor.threads={options.threads}",
        f"actor.optimizer.learning_rate={_LEARNING_RATE}",
        f"actor.optimizer.beta2={_BETA2}",
        "actor.optimizer.warmup_steps=0",
    ]
    rows = train("configs/demo/arithmetic.yaml", folder / "runs", "ours", overrides)
    kept = [row for row in rows if row["iteration"] > _WARM_UP]
    tokens = [row["rollout/response_tokens_mean"] * row["rollout/samples_count"] for row in kept]
    return Measured("rlpipe", median(row["time/step_seconds"] for row in kept), median(tokens))


def _measure_trl(options: argparse.Namespace, folder: Path) -> Measured:
    command = [sys.executable, __file__, *sys.argv[1:], "--only-trl", str(folder)]
    result = subprocess.run(command, cwd=_PROJECT, check=True, stdout=subprocess.PIPE, text=True)
    steps = json.loads(result.stdout.splitlines()[-1])[_WARM_UP:]
    return Measured("TRL", median(step["seconds"] for step in steps), median(step["tokens"] for step in steps))


def _run_trl(options: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from rewards.grader_registry import grade

    torch.set_num_threads(options.threads)
    rows = [json.loads(line) for line in (folder / "task/train.jsonl").read_text().splitlines()]
    steps: list[dict[str, float]] = []

    def reward(completions: list, label: list[str], completion_ids: list[list[int]], **_: object) -> list[float | None]:
        steps[-1]["tokens"] = sum(map(len, completion_ids))
        texts = [completion[0]["content"] for completion in completions]
        return [grade("math", text, answer).score for text, answer in zip(texts, label, strict=True)]

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            steps[-1]["seconds"] = time.perf_counter() - steps[-1].pop("start")
            steps.append({"start": time.perf_counter()})

        def on_train_begin(self, *_: object, **__: object) -> None:
            steps.append({"start": time.perf_counter()})

    batch = options.prompts * options.samples
    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=1,
        num_generations=options.samples,
        max_completion_length=options.tokens,
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",
        learning_rate=_LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta2=_BETA2,
        max_grad_norm=1.0,
        max_steps=options.iterations + _WARM_UP,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=str(folder / "policy"),
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder / "policy", padding_side="left"),
        callbacks=[Clock()],
    )
    trainer.train()
    return steps[:-1]


if __name__ == "__main__":
    main()
