"""How large a pack may be, and to which multiples sequences and packs are padded."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from rlpipe.config.actor import ActorConfig
from rlpipe.config.layout import ActorLayout
from rlpipe.shared.errors import ConfigError


@dataclass(frozen=True)
class PackLimits:
    """A hard token budget with the padding rules that count inside it.

    budget_tokens: tokens of one pack over all its context-parallel ranks, padding included.
    sequence_multiple: each sequence is padded to a multiple of it (2 x CP for the zigzag split).
    pack_multiple: the whole pack is padded to a multiple of it (`rlpipe.config.layout.ActorLayout`, length buckets).
    count_multiple: the packs of a rank are a multiple of it (the stages of an interleaved pipeline schedule).
    """

    budget_tokens: int
    sequence_multiple: int = 1
    pack_multiple: int = 1
    count_multiple: int = 1

    def __post_init__(self) -> None:
        if self.pack_multiple % self.sequence_multiple:
            raise ConfigError(
                f"pack_multiple {self.pack_multiple} is not a multiple of sequence_multiple {self.sequence_multiple}: "
                "use their least common multiple"
            )
        if self.budget_tokens < self.pack_multiple:
            raise ConfigError(
                f"a pack budget of {self.budget_tokens} tokens is below the padding multiple {self.pack_multiple}: "
                "raise actor.max_tokens_per_gpu"
            )

    @classmethod
    def training(cls, actor: ActorConfig) -> Self:
        """Limits of packs with gradients."""
        return cls._of(actor, actor.pack_tokens)

    @classmethod
    def forward_only(cls, actor: ActorConfig) -> Self:
        """Limits of log-probability passes, which have a budget of their own."""
        return cls._of(actor, actor.forward_max_tokens_per_gpu or actor.pack_tokens)

    @classmethod
    def _of(cls, actor: ActorConfig, tokens_per_gpu: int) -> Self:
        layout = ActorLayout.of(actor)
        stages = layout.pipeline_parallel if actor.parallel.virtual_pipeline else 1
        return cls(tokens_per_gpu * layout.context_parallel, layout.sequence_multiple, actor.pack_multiple, stages)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that can be used: the budget less what the pack multiple forbids."""
        return self.budget_tokens // self.pack_multiple * self.pack_multiple

    def padded_tokens(self, lengths_tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Lengths after padding each sequence."""
        return -(-lengths_tokens // self.sequence_multiple) * self.sequence_multiple
