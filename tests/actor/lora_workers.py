"""What the tests of adapters run inside spawned workers (`train_support.run_processes`); imports Megatron."""

import math
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from actor.distributed import start_model_parallel
from actor.hf.adapter_modules import table_of_adapters
from actor.hf.adapter_weights import save_adapters
from actor.hf.policy_folder import save_hf
from actor.trainer import Trainer, TrainerOptions
from rlpipe.config.actor import ActorConfig
from rlpipe.config.algorithm import AlgorithmConfig
from rlpipe.shared.pack import Pack

SFT = AlgorithmConfig(loss="sft")


def follow_peft(
    rank: int,
    count: int,
    cases: dict[str, tuple[Path, dict[str, Any]]],
    packs: list[Pack],
    steps: int,
    output: Path,
) -> dict[str, Any]:
    """name -> what `_follow` returns, or a traceback. cases: model folder and actor options."""
    results: dict[str, Any] = {}
    start_model_parallel(ActorConfig(dtype="float32"), seed=1)
    for name, (path, options) in cases.items():
        try:
            results[name] = _follow(path, ActorConfig(dtype="float32", **options), packs, steps, output / name)
        except Exception:
            results[name] = traceback.format_exc()
    parallel_state.destroy_model_parallel()
    return results


def _follow(path: Path, actor: ActorConfig, packs: Sequence[Pack], steps: int, output: Path) -> dict[str, Any]:
    """Log-probabilities of the start and losses of all steps; the merged policy of the start, gradients of the first
    pass and the adapters of the end lie in `output`."""
    trainer = Trainer(TrainerOptions(path, None, False, actor, steps))
    logprobs = trainer.logprobs(packs[:1], "policy")[0]
    save_hf(trainer.policy, trainer.description, output / "merged", path)
    trainer.accumulate(packs, SFT)
    trainer.optimizer.finish_gradients()
    _save(trainer, output / "gradients", lambda factor: factor.main_grad)
    losses = [trainer.train_step(packs, SFT).metrics["train/loss"] for _ in range(steps)]
    _save(trainer, output / "trained", lambda factor: factor)
    after = trainer.train_step(packs, SFT).metrics["train/loss"]
    assert actor.lora is not None
    trained = sum(one.parameters for one in table_of_adapters(trainer.policy, actor.lora))
    return {"logprobs": logprobs, "losses": losses, "after": after, "trained": trained}


def _save(trainer: Trainer, folder: Path, value: Callable[[Any], torch.Tensor]) -> None:
    """Write the adapters with `value` of each factor in its place."""
    lora = trainer.options.actor.lora
    assert lora is not None
    factors = [p for chunk in trainer.policy for p in chunk.parameters() if p.requires_grad]
    before = [factor.data for factor in factors]
    for factor in factors:
        factor.data = value(factor).data.to(factor.dtype)
    save_adapters(trainer.policy, lora, folder, "base")
    for factor, data in zip(factors, before, strict=True):
        factor.data = data


def train_layouts(
    rank: int,
    count: int,
    work: list[tuple[str, dict[str, Any], str, Path, dict[str, Any]]],
    common: dict[str, Any],
    steps: list[list[Pack]],
) -> dict[tuple[str, str], Any]:
    """(case, layout) -> [(gradient norm, loss)] of `steps`, or a traceback; work: layout, its options, case, model
    folder, adapters. Process groups are made once per layout: they cost more than training."""
    results: dict[tuple[str, str], Any] = {}
    for layout, options in {layout: options for layout, options, *_ in work}.items():
        start_model_parallel(ActorConfig(processes=count, dtype="float32", **options), seed=1)
        for _, _, case, path, lora in (one for one in work if one[0] == layout):
            actor = ActorConfig.model_validate(
                {"processes": count, "dtype": "float32", "lora": lora} | common | options
            )
            try:
                results[case, layout] = _train(path, actor, steps)
            except Exception:
                traceback.print_exc()  # now, because the other processes may wait for this one for ever
                results[case, layout] = traceback.format_exc()
        parallel_state.destroy_model_parallel()
    return results


def _train(path: Path, actor: ActorConfig, steps: list[list[Pack]]) -> list[tuple[float, float]]:
    trainer = Trainer(TrainerOptions(path, None, False, actor, len(steps)))
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    reports = [trainer.train_step(packs[rank::size], SFT) for packs in steps]
    return [(one.metrics["train/gradient_norm"], one.metrics.get("train/loss", math.nan)) for one in reports]
