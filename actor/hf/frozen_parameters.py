"""Which parameters `actor.frozen_parameters` means. Pure: imports no torch."""

import re

from actor.hf.weight_table import weight_table
from rlpipe.config.actor import ActorConfig
from rlpipe.model.description import TrainableModel
from rlpipe.shared.errors import ActorError


def frozen_targets(model: TrainableModel, actor: ActorConfig) -> frozenset[str]:
    """Global Megatron names of the parameters that are not trained.

    A parameter that holds several Hugging Face tensors is frozen when a pattern matches each of them.

    Raises:
        ActorError: a pattern matches nothing, or part of a fused parameter; or nothing is left to train.
    """
    patterns = actor.frozen_parameters
    names = {
        entry.target: [source.name for source in entry.sources]
        for entry in weight_table(model, padded_vocab_size=model.vocab_size, with_mtp=actor.train_mtp)
    }
    every_name = {name for several in names.values() for name in several}
    matched = {name for pattern in patterns for name in _matches(pattern, every_name)}
    for target, several in names.items():
        inside = [name for name in several if name in matched]
        if inside and len(inside) < len(several):
            rest = next(name for name in several if name not in matched)
            raise ActorError(
                f"actor.frozen_parameters matches {inside[0]} but not {rest}, and both live in {target}: "
                "match all of them or none"
            )
    if matched == every_name:
        raise ActorError(f"actor.frozen_parameters {patterns} match every parameter: leave something to train")
    return frozenset(target for target, several in names.items() if several[0] in matched)


def _matches(pattern: str, names: set[str]) -> set[str]:
    found = {name for name in names if re.search(pattern, name)}
    if not found:
        raise ActorError(f"actor.frozen_parameters has {pattern!r}, which matches no parameter: correct or remove it")
    return found
