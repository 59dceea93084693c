"""Settings that are chosen by memory: `actor.recompute.granularity` and `actor.max_tokens_per_gpu`, where they are
`auto`."""

from collections.abc import Iterator
from itertools import product
from typing import Literal

from rlpipe.config.load import merge, validate
from rlpipe.config.root import Config

_MOST_PACK_TOKENS = 65_536  # of a rank: beyond it layers gain nothing, and warm-up and kernels' indices lose

Granularity = Literal["none", "selective", "full"]


def is_automatic(config: Config) -> bool:
    """Whether anything is to be chosen."""
    return "auto" in (config.actor.recompute.granularity, config.actor.max_tokens_per_gpu)


def candidates(config: Config) -> list[Config]:
    """All choices for what is `auto`: whole layers again or nothing, and budgets that whole sequences of the longest
    kind fill."""
    recompute, budget = config.actor.recompute.granularity, config.actor.max_tokens_per_gpu
    granularities: tuple[Granularity, ...] = ("none", "full") if recompute == "auto" else (recompute,)
    budgets = list(_budgets(config)) if budget == "auto" else [budget]
    return [_chosen(config, *choice) for choice in product(granularities, budgets)]


def with_choice_of(config: Config, chosen: Config) -> Config:
    """`config` with what `chosen` has for its settings that are `auto`; another run's choice stays so when resumed."""
    recompute, budget = config.actor.recompute.granularity, config.actor.max_tokens_per_gpu
    return _chosen(
        config,
        chosen.actor.recompute.chosen if recompute == "auto" else recompute,
        chosen.actor.pack_tokens if budget == "auto" else budget,
    )


def choice_note(chosen: Config) -> str:
    """What was chosen, for the user."""
    actor = chosen.actor
    return f"chosen by memory: recompute {actor.recompute.granularity}, packs of {actor.pack_tokens:,} tokens per GPU"


def _budgets(config: Config) -> Iterator[int]:
    """For one longest sequence, two and so on, as long as a rank has that number in an update."""
    parallel, multiple = config.actor.parallel, config.actor.pack_multiple
    ranks = config.actor.processes // (parallel.tensor * parallel.pipeline * parallel.context)
    responses = config.rollout.prompts_per_iteration * config.rollout.samples_per_prompt
    own = -(-responses // (config.algorithm.updates_per_iteration * ranks))
    if config.sft is not None:
        own = -(-config.sft.sequences_per_step // ranks)
    longest = -(-config.longest_pack_sequence_tokens // multiple) * multiple
    most = max(1, min(own, _MOST_PACK_TOKENS * parallel.context // longest))
    for count in (number for number in range(1, most + 1) if own % number == 0):  # packs of as many sequences each
        yield -(-count * longest // parallel.context)


def _chosen(config: Config, granularity: Granularity, budget: int) -> Config:
    actor = {"recompute": {"granularity": granularity}, "max_tokens_per_gpu": budget}
    return validate(merge(config.model_dump(), {"actor": actor}), "the automatic choice")
