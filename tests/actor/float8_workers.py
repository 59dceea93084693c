"""What the tests of frozen weights in 8 bits run inside a spawned worker; imports Megatron."""

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core import parallel_state

from actor.distributed import start_model_parallel
from actor.hf.policy_folder import save_hf
from actor.trainer import Trainer, TrainerOptions
from rlpipe.config.actor import ActorConfig
from rlpipe.config.algorithm import AlgorithmConfig
from rlpipe.shared.pack import Pack

SFT = AlgorithmConfig(loss="sft")
STEPS = 3


def rounded_and_plain(
    rank: int, count: int, work: dict[str, tuple[Path, dict[str, Any], Path]], packs: list[Pack]
) -> dict[str, Any]:
    """By case, what training says on rounded weights, on a folder of the rounded weights, and on the first ones; or a
    traceback. work: model folder, `actor.lora` and where the rounded model is to lie."""
    start_model_parallel(ActorConfig(dtype="float32"), seed=1)
    answers: dict[str, Any] = {}
    for name, (path, lora, output) in work.items():
        try:
            rounded = lora | {"base": "float8"}
            fresh = _trainer(path, rounded | {"start_path": None})
            save_hf(fresh.policy, fresh.description, output, path)
            answers[name] = {
                "rounded": _train(_trainer(path, rounded), packs),
                "from_folder": _train(_trainer(output, lora), packs),
                "first": _train(_trainer(path, lora), packs),
            }
        except Exception:
            answers[name] = traceback.format_exc()
    parallel_state.destroy_model_parallel()
    return answers


def _trainer(path: Path, lora: dict[str, Any]) -> Trainer:
    actor = ActorConfig.model_validate({"dtype": "float32", "lora": lora, "optimizer": {"learning_rate": 1e-3}})
    return Trainer(TrainerOptions(path, None, False, actor, STEPS))


def _train(trainer: Trainer, packs: Sequence[Pack]) -> dict[str, Any]:
    logprobs = trainer.logprobs(packs[:1], "policy")[0]
    frozen_bytes = sum(p.nbytes for chunk in trainer.policy for p in chunk.parameters() if not p.requires_grad)
    reports = [trainer.train_step(packs, SFT).metrics for _ in range(STEPS)]
    before = trainer.logprobs(packs[:1], "policy")[0]
    trainer.keep_resident("nothing")
    trainer.keep_resident("all")
    after = trainer.logprobs(packs[:1], "policy")[0]
    return {
        "logprobs": logprobs,
        "steps": [(one["train/loss"], one["train/gradient_norm"]) for one in reports],
        "frozen_bytes": frozen_bytes,
        "came_back": np.array_equal(before, after),
    }
