"""A run of TRL's GRPOTrainer in a process of its own, for benchmarks that put it beside rlpipe.

python benchmarks/trl_run.py RUN      RUN: a `TrlRun` as JSON; prints its steps as JSON
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_PROJECT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class TrlRun:
    """One run with one update an iteration, the loss and Adam as rlpipe is given them.

    policy: a folder. rows: JSON lines with `prompt` and `label`. micro_batch: responses of one pass. threads: 0 for
    torch's choice. forced: no token ends a response. continuous: transformers' continuous batching instead of
    `generate`. settings: further ones of GRPOConfig.
    """

    policy: str
    rows: str
    output: str
    prompts: int
    samples: int
    tokens: int
    steps: int
    micro_batch: int
    learning_rate: float
    beta2: float
    threads: int = 0
    forced: bool = False
    continuous: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


def trl_steps(run: TrlRun) -> list[dict[str, float]]:
    """Of every step: `seconds`, `generation_seconds` up to the first reward, and sampled `tokens`."""
    path = Path(run.output).with_suffix(".json")
    path.write_text(json.dumps(asdict(run)))
    environment = os.environ | ({"OMP_NUM_THREADS": str(run.threads)} if run.threads else {})
    command = [sys.executable, __file__, str(path)]
    result = subprocess.run(command, cwd=_PROJECT, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    steps: list[dict[str, float]] = json.loads(result.stdout.splitlines()[-1])
    return steps


def _train(run: TrlRun) -> list[dict[str, float]]:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from rewards.grader_registry import grade

    if run.threads:
        torch.set_num_threads(run.threads)
    rows = [json.loads(line) for line in Path(run.rows).read_text().splitlines()]
    steps: list[dict[str, float]] = []

    def reward(
        completions: list[Any], label: list[str], completion_ids: list[list[int]], **_: object
    ) -> list[float | None]:
        steps[-1]["generation_seconds"] = time.perf_counter() - steps[-1]["start"]
        steps[-1]["tokens"] = sum(map(len, completion_ids))
        texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
        return [grade("math", text, answer).score for text, answer in zip(texts, label, strict=True)]

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            steps[-1]["seconds"] = time.perf_counter() - steps[-1].pop("start")
            steps.append({"start": time.perf_counter()})

        def on_train_begin(self, *_: object, **__: object) -> None:
            steps.append({"start": time.perf_counter()})

    trainer = GRPOTrainer(
        model=run.policy,
        reward_funcs=reward,
        args=GRPOConfig(**_settings(run, torch.cuda.is_available())),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(run.policy, padding_side="left"),
        callbacks=[Clock()],
    )
    trainer.train()
    return steps[:-1]


def _settings(run: TrlRun, on_gpu: bool) -> dict[str, Any]:
    batch = run.prompts * run.samples
    return {
        "output_dir": run.output,
        "per_device_train_batch_size": run.micro_batch,
        "gradient_accumulation_steps": batch // run.micro_batch,
        "num_generations": run.samples,
        "max_completion_length": run.tokens,
        "generation_kwargs": {"eos_token_id": -1} if run.forced else None,
        "use_transformers_continuous_batching": run.continuous,
        "temperature": 1.0,
        "beta": 0.0,
        "loss_type": "dapo",
        "learning_rate": run.learning_rate,
        "lr_scheduler_type": "constant",
        "adam_beta2": run.beta2,
        "max_grad_norm": 1.0,
        "max_steps": run.steps,
        "use_cpu": not on_gpu,
        "bf16": on_gpu,
        "model_init_kwargs": {"dtype": "bfloat16" if on_gpu else "float32"},
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    } | run.settings


if __name__ == "__main__":
    sys.path[0] = str(_PROJECT)  # instead of this folder, whose rewards.py hides the package
    print(json.dumps(_train(TrlRun(**json.loads(Path(sys.argv[1]).read_text())))))
