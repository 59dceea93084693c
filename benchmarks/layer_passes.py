"""The actor's layers with random weights, as benchmarks run them alone."""

from typing import Any

import torch

from actor.device import compute_device
from actor.models.build_model import build_model
from actor.models.policy_model import PolicyModel
from rlpipe.config.actor import ActorConfig
from rlpipe.model.model_reader import trainable_model


def policy_layers(config: dict[str, Any], actor: ActorConfig) -> PolicyModel:
    """This process's share of the model that `config.json` describes."""
    (policy,) = build_model(trainable_model(config), actor)
    generator = torch.Generator(compute_device()).manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(1, 16, generator=generator).log_()
            elif parameter.ndim > 1:
                parameter.normal_(std=0.02, generator=generator)
    return policy


def lengths_of(packs: str) -> list[tuple[int, ...]]:
    """`4x2048,1x8192` -> [(2048, 2048, 2048, 2048), (8192,)]."""
    counts = [pack.split("x") for pack in packs.split(",")]
    return [(int(tokens),) * int(sequences) for sequences, tokens in counts]
