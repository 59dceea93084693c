"""Settings that are chosen by memory: `actor.recompute.granularity`, `actor.max_tokens_per_gpu` and
`rollout.engine.memory_fraction`, where they are `auto`."""

from collections.abc import Iterator
from itertools import product
from typing import Literal

from rlpipe.config.load import merge, validate
from rlpipe.config.root import Config

_FRACTIONS = tuple(percent / 100 for percent in range(90, 15, -5))
_MOST_PACK_TOKENS = 65_536  # of a rank: beyond it layers gain nothing, and warm-up and kernels' indices lose

Granularity = Literal["none", "selective", "full"]


def is_automatic(config: Config) -> bool:
    """Whether anything is to be chosen."""
    return "auto" in (
        config.actor.recompute.granularity,
        config.actor.max_tokens_per_gpu,
        config.rollout.engine.memory_fraction,
    )


def engine_candidates(config: Config) -> list[Config]:
    """All choices for an engine's share of the device's memory where it is `auto`, the largest first."""
    if config.rollout.engine.memory_fraction != "auto":
        return [config]
    return [_with_share(config, fraction) for fraction in _FRACTIONS]


def with_engine_share_of(config: Config, chosen: Config) -> Config:
    """`config` with the memory that engines of `chosen` have."""
    return _with_share(config, chosen.rollout.engine.memory_share)


def candidates(config: Config) -> list[Config]:
    """All choices for what is `auto` of the actor: whole layers again or nothing, and budgets that whole sequences of
    the longest kind fill."""
    recompute, budget = config.actor.recompute.granularity, config.actor.max_tokens_per_gpu
    granularities: tuple[Granularity, ...] = ("none", "full") if recompute == "auto" else (recompute,)
    budgets = list(_budgets(config)) if budget == "auto" else [budget]
    return [_chosen(config, *choice) for choice in product(granularities, budgets)]


def with_choice_of(config: Config, chosen: Config) -> Config:
    """`config` with what `chosen` has for its settings that are `auto`; another run's choice stays so when resumed."""
    recompute, budget = config.actor.recompute.granularity, config.actor.max_tokens_per_gpu
    if config.rollout.engine.memory_fraction == "auto":
        config = with_engine_share_of(config, chosen)
    return _chosen(
        config,
        chosen.actor.recompute.chosen if recompute == "auto" else recompute,
        chosen.actor.pack_tokens if budget == "auto" else budget,
    )


def choice_note(config: Config, chosen: Config) -> str:
    """What was chosen, for the user."""
    actor, engine = chosen.actor, chosen.rollout.engine
    settings = {
        f"recompute {actor.recompute.granularity}": config.actor.recompute.granularity,
        f"packs of {actor.pack_tokens:,} tokens per GPU": config.actor.max_tokens_per_gpu,
        f"engines with {engine.memory_share:.0%} of a GPU": None
        if config.sft
        else config.rollout.engine.memory_fraction,
    }
    return f"chosen by memory: {', '.join(text for text, given in settings.items() if given == 'auto')}"


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


def _with_share(config: Config, fraction: float) -> Config:
    engine = config.rollout.engine.model_copy(update={"memory_fraction": fraction})
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": engine})})


def _chosen(config: Config, granularity: Granularity, budget: int) -> Config:
    actor = {"recompute": {"granularity": granularity}, "max_tokens_per_gpu": budget}
    return validate(merge(config.model_dump(), {"actor": actor}), "the automatic choice")
