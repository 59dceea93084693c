"""What the model tests run inside spawned workers (`train_support.run_processes`); imports Megatron."""

import traceback
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from model_support import weights_of

from actor.distributed import start_model_parallel
from actor.head import response_logprobs
from actor.hf.export import iter_export
from actor.hf.load import load_hf
from actor.layers.packed import pack_to_device
from actor.models.build import build_model, read_model
from actor.models.policy import head_weight
from actor.trainer import Trainer, TrainerOptions
from rlpipe.config.actor import ActorConfig
from rlpipe.config.algorithm import AlgorithmConfig
from rlpipe.pack import Pack


def train_layouts(
    rank: int, count: int, layouts: dict[str, tuple[dict[str, Any], dict[str, Path]]], steps: list[list[Pack]]
) -> dict[tuple[str, str], Any]:
    """Train each model of each layout (actor options, checkpoints) over `steps`.

    (model, layout) -> [(loss, gradient norm)] or a traceback. Process groups are made once per layout: they cost more
    than training.
    """
    results: dict[tuple[str, str], Any] = {}
    for layout, (options, paths) in layouts.items():
        actor = ActorConfig(processes=count, dtype="float32", **options)
        start_model_parallel(actor, seed=1)
        for model, path in paths.items():
            try:
                results[model, layout] = _train(path, actor, steps)
            except Exception:
                results[model, layout] = traceback.format_exc()
        parallel_state.destroy_model_parallel()
    return results


def _train(path: Path, actor: ActorConfig, steps: list[list[Pack]]) -> list[tuple[float, float]]:
    trainer = Trainer(TrainerOptions(path, None, False, actor, len(steps), 1.0))
    data_rank, data_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    algorithm = AlgorithmConfig(loss="sft")
    reports = [trainer.train_step(packs[data_rank::data_size], algorithm)[0] for packs in steps]
    return [(r.metrics.get("train/loss", float("nan")), r.metrics["train/gradient_norm"]) for r in reports]


def compare_with_transformers(rank: int, count: int, cases: dict[str, tuple[Path, Pack, Any, Any]]) -> dict[str, Any]:
    """name -> (largest log-probability difference, {tensor: relative gradient error}) or a traceback."""
    results: dict[str, Any] = {}
    actor = ActorConfig(dtype="float32")
    start_model_parallel(actor, seed=1)
    for name, (path, pack, logprobs, gradients) in cases.items():
        try:
            results[name] = _compare(path, actor, pack, logprobs, gradients)
        except Exception:
            results[name] = traceback.format_exc()
    parallel_state.destroy_model_parallel()
    return results


def _compare(
    path: Path, actor: ActorConfig, pack: Pack, wanted: torch.Tensor, gradients: dict[str, torch.Tensor]
) -> tuple[float, dict[str, float]]:
    description = read_model(path)
    chunks = build_model(description, actor)
    load_hf(chunks, description, path)
    inputs = pack_to_device(pack)
    scores = response_logprobs(
        chunks[0](inputs), head_weight(chunks[0]), inputs.targets, vocab_size=description.vocab_size, chunk_tokens=50
    )
    (scores.logprobs * torch.from_numpy(weights_of(pack))).sum().backward()
    for parameter in chunks[0].parameters():
        parameter.data = parameter.grad
    errors = {}
    for name, gradient in iter_export(chunks, description):
        reference = gradients.pop(name)
        errors[name] = float((gradient - reference).norm() / reference.norm().clamp(min=1e-6))
    assert not gradients, f"not compared: {sorted(gradients)}"
    return float((scores.logprobs.detach() - wanted).abs().max() / wanted.abs().max()), errors
