"""Speculative decoding: who drafts the tokens that an engine then verifies, several in one pass."""

from typing import Literal, Self

from pydantic import Field, model_validator

from rlpipe.config.base import Section

_NGRAM_TOKENS = 8
_NGRAM_BRANCHES = 4


class DraftConfig(Section):
    """Tokens are drafted, and kept as far as the policy itself draws them: samples are those of no drafts
    (docs/drafts.md)."""

    method: Literal["off", "mtp", "ngram", "auto"] = "off"
    """`mtp`: the model's own multi-token-prediction layer drafts. `ngram`: what followed the last tokens earlier, in
    this or another response. `auto`: `mtp`, without drafts at the batch sizes where it is measured to be slower."""

    steps: int = Field(3, ge=1, le=16)
    """Tokens that the prediction layer drafts, one after the other, before they are verified."""

    topk: int | None = Field(None, ge=1, le=16)
    """Branches of a draft; more than 1 is a tree, which is not verified through Gated DeltaNet layers. When empty, 1,
    with `ngram`, which always makes trees, 4."""

    tokens: int | None = Field(None, ge=2, le=64)
    """Tokens of a request that are verified in one pass, with the last sampled one. When empty, `steps` + 1, with
    `ngram` 8."""

    @property
    def predicts(self) -> bool:
        """Whether the model's prediction layer drafts."""
        return self.method in ("mtp", "auto")

    @property
    def branches(self) -> int:
        """`topk`, where it is empty as the method has it."""
        return self.topk or (_NGRAM_BRANCHES if self.method == "ngram" else 1)

    @property
    def verified_tokens(self) -> int:
        """Of one request in one pass; 1 without drafts."""
        if self.method == "off":
            return 1
        if self.tokens is not None:
            return self.tokens
        return self.steps + 1 if self.predicts else _NGRAM_TOKENS

    @model_validator(mode="after")
    def _a_chain_is_verified_whole(self) -> Self:
        if self.method == "ngram" and self.branches == 1:
            raise ValueError(
                "rollout.engine.draft.topk is 1, but n-grams of several lengths make a tree: leave it empty, or give "
                "at least 2"
            )
        if self.predicts and self.branches == 1 and self.tokens not in (None, self.steps + 1):
            raise ValueError(
                f"rollout.engine.draft.tokens is {self.tokens}, but one branch of {self.steps} steps is verified as "
                f"{self.steps + 1} tokens: leave tokens empty, or raise topk for a tree"
            )
        if self.predicts and self.branches > 1 and self.tokens is None:
            raise ValueError(
                f"rollout.engine.draft.topk is {self.topk}, a tree, but draft.tokens does not say how many of its "
                "tokens are verified: set it, or set topk to 1"
            )
        if self.method == "auto" and self.branches > 1:
            raise ValueError(
                f"rollout.engine.draft.method 'auto' drafts one branch, but draft.topk is {self.topk}: set topk to 1, "
                "or method to 'mtp'"
            )
        return self
