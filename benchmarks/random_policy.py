"""Policies of any size with random weights, written as Hugging Face folders without making a model first."""

import json
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from actor.hf.weight_table import export_plan
from rlpipe.model.description import TrainableModel
from rlpipe.model.model_reader import trainable_model
from rlpipe.prepare.tokenizer import byte_tokenizer
from rlpipe.shared.weights import TensorSpec

_SHARD_BYTES = 10**9
_WRITERS = 6
"""At a time; each holds its shard twice."""
_DRAWN = 16 * 2**20
"""Numbers that are drawn. Larger tensors repeat them: drawing eight billion takes minutes, and no benchmark that reads
these weights can tell."""


def save_random_policy(config: dict[str, Any], folder: Path, dtype: str, known_next: bool = False) -> str:
    """Write config.json, weights of standard deviation 0.02 and a byte tokenizer; returns the folder.

    config: a `config.json` of a family that the actor knows. Norms start at 1, or at 0 where they are zero-centred.
    known_next: embedding and head tell one token after each, which then has a probability of about a half, and the
    multi-token-prediction layer, where the model has one, looks at the embedding.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Without a version transformers takes its tokenizer for one of Mistral's old ones, and warns.
    made = {"dtype": dtype, "transformers_version": transformers.__version__}
    (folder / "config.json").write_text(json.dumps(config | made, indent=1))
    model = trainable_model(config)
    drawn = (torch.randn(_DRAWN, generator=torch.Generator().manual_seed(0)) * 0.02).to(getattr(torch, dtype))
    known = _known_next(model, getattr(torch, dtype)) if known_next else {}
    norm = 0.0 if model.zero_centered_norm else 1.0

    def write(shard: tuple[int, list[TensorSpec]]) -> dict[str, str]:
        index, specs = shard
        plain = {spec.name: _tensor(spec, drawn, norm) for spec in specs}
        return _write(plain | {name: tensor for name, tensor in known.items() if name in plain}, folder, index)

    with ThreadPoolExecutor(min(_WRITERS, os.cpu_count() or 1)) as pool:
        files = {
            name: file for part in pool.map(write, enumerate(_shards(model, dtype))) for name, file in part.items()
        }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def _shards(model: TrainableModel, dtype: str) -> Iterator[list[TensorSpec]]:
    """All tensors in groups of about _SHARD_BYTES."""
    size = getattr(torch, dtype).itemsize
    shard: list[TensorSpec] = []
    for spec in export_plan(model, dtype, with_mtp=model.mtp_layers > 0):
        shard.append(spec)
        if sum(one.elements for one in shard) * size > _SHARD_BYTES:
            yield shard
            shard = []
    if shard:
        yield shard


def _known_next(model: TrainableModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors of an untied model by which the residual stream is the last token's embedding more than all else."""
    vocabulary, hidden = model.vocab_size, model.hidden_size
    generator = torch.Generator().manual_seed(1)
    # Each layer adds two vectors of about unit size to the residual stream, whatever it reads.
    embedding = 6 * math.sqrt(2 * model.layers) * torch.randn(vocabulary, hidden, generator=generator)
    head = torch.empty_like(embedding)
    scale = 1.1 * math.log(1.5 * vocabulary) / hidden**0.5
    head[torch.randperm(vocabulary, generator=generator)] = scale * torch.nn.functional.normalize(embedding, dim=-1)
    looks = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1)
    found = {f"{model.weight_prefix}embed_tokens.weight": embedding, "lm_head.weight": head, "mtp.fc.weight": looks}
    return {name: tensor.to(dtype) for name, tensor in found.items()}


def _tensor(spec: TensorSpec, drawn: torch.Tensor, norm: float) -> torch.Tensor:
    if spec.name.endswith("A_log"):
        return torch.linspace(0, 2.5, spec.elements).to(drawn.dtype)
    if spec.name.endswith("linear_attn.norm.weight"):
        return torch.ones(spec.shape, dtype=drawn.dtype)
    if "norm" in spec.name:
        return torch.full(spec.shape, norm, dtype=drawn.dtype)
    if spec.elements <= len(drawn):
        return drawn[: spec.elements].reshape(spec.shape).clone()  # a view would keep all that is drawn
    return drawn.repeat(-(-spec.elements // len(drawn)))[: spec.elements].reshape(spec.shape)


def _write(shard: dict[str, torch.Tensor], folder: Path, index: int) -> dict[str, str]:
    """Names of the tensors, and the file that they now lie in."""
    name = f"model-{index:05d}.safetensors"
    save_file(shard, folder / name, metadata={"format": "pt"})
    return dict.fromkeys(shard, name)
