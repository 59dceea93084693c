"""Low-rank adapters of the policy."""

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from rlpipe.config.base import Section


class LoraConfig(Section):
    """LoRA (Hu et al. 2021, arXiv:2106.09685): every weight of the model is frozen, and products of two thin matrices
    that are added to some of them are trained (docs/lora.md)."""

    rank: int = Field(ge=1, le=4096)
    """Inner width of an adapter."""

    alpha: float = Field(32.0, gt=0)
    """An adapter is added `alpha / rank` times."""

    use_rslora: bool = False
    """An adapter is added `alpha / sqrt(rank)` times instead (arXiv:2312.03732), which suits ranks of 64 and above."""

    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of an adapter's inputs that are left out while training. It makes the trained policy differ from the one
    that generated, so reinforcement learning wants 0."""

    targets: list[str] = Field(["all-linear"], min_length=1)
    """Hugging Face names of what is adapted, whole or from a dot on: `q_proj`, `self_attn.q_proj`. `all-linear`: every
    projection of attention, Gated DeltaNet and feed-forward layers. `embed_tokens` and `lm_head` only by name."""

    experts: Literal["none", "shared", "each"] = "none"
    """Adapters of routed experts that `targets` names: none, one for all experts of a layer, or one for each."""

    init: Literal["kaiming", "gaussian"] = "kaiming"
    """How the first factor begins, as PEFT's `init_lora_weights` (true, "gaussian"); the second is zero."""

    base: Literal["same", "float8"] = "same"
    """How the frozen projections lie in memory: in `actor.dtype`, or as 8-bit floats, which takes half of bfloat16's
    bytes and some seconds of each pass (docs/lora.md). Engines and exports get these rounded weights, too."""

    start_path: str | None = None
    """Folder of an adapter in PEFT's layout to begin with, instead of `init`."""

    @property
    def scale(self) -> float:
        """What the product of an adapter's factors is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    @model_validator(mode="after")
    def _experts_have_no_dropout(self) -> Self:
        if self.dropout and self.experts != "none":
            raise ValueError(
                f"actor.lora.dropout is {self.dropout:g} with experts {self.experts!r}, whose adapters have none "
                "(nor have PEFT's): set it to 0, or actor.lora.experts to none"
            )
        return self
