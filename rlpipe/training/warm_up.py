"""Running every class of pack through the actor before the first iteration, so that kernels compile there."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rlpipe.batching import PackLimits
from rlpipe.batching.shape_classes import shape_class_packs
from rlpipe.config.algorithm import AlgorithmConfig
from rlpipe.config.root import Config
from rlpipe.model.model_reader import describe_model
from rlpipe.shared.pack import Pack

if TYPE_CHECKING:
    from actor.group import ActorGroup


def warm_up_actor(config: Config, actor: "ActorGroup", algorithm: AlgorithmConfig) -> None:
    """Leaves weights, optimizer and random numbers as they are. `jit.warm_up` says whether anything is done."""
    if config.jit.warm_up == "off":
        return
    vocabulary = describe_model(config.model.path).shape.vocab_size
    longest = config.longest_pack_sequence_tokens
    training = shape_class_packs(PackLimits.training(config.actor), vocabulary, longest)
    forward = shape_class_packs(PackLimits.forward_only(config.actor), vocabulary, longest)
    actor.warm_up([_with_reference(pack) for pack in training], forward, algorithm)


def _with_reference(pack: Pack) -> Pack:
    return replace(pack, ref_logprobs=np.zeros_like(pack.loss_mask))
