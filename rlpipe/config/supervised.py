"""Supervised training."""

from typing import Literal

from pydantic import Field

from rlpipe.config.base import Section, Template


class SupervisedConfig(Section):
    """`rlpipe sft`: what a supervised step is made of. `run.iterations` counts optimizer steps."""

    sequences_per_step: int = Field(64, ge=1)
    """Sequences of one optimizer step."""

    response_template: Template = "{label}"
    """Format string that makes the answer: names of columns in braces."""

    conversations: bool = False
    """The prompt column holds whole conversations (a list of messages); each turn of the assistant is trained, after
    what the policy would be shown before it."""

    packing: Literal["best_fit", "wrapped"] = "best_fit"
    """`best_fit` keeps sequences whole; `wrapped` lays them end to end and cuts where a pack is full."""

    max_sequence_tokens: int = Field(4096, ge=2)
    """Longer sequences are left out and counted (`data/prompts_too_long`); so are those that are longer than a pack,
    unless they are `wrapped`."""


class WarmStartConfig(Section):
    """A short supervised phase before GRPO, on answers made from the training rows, by the same actor."""

    steps: int = Field(ge=1)
    """Optimizer steps at most."""

    stop_at_loss: float = Field(0.0, ge=0)
    """Stop when the loss of a step, in nats per answer token, is at most this."""

    sequences_per_step: int = Field(128, ge=1)
    """Problems per optimizer step."""

    learning_rate: float = Field(3e-3, gt=0)
    """Peak learning rate of this phase."""

    warmup_steps: int = Field(10, ge=0)
    """Steps of linear warm-up."""

    response_template: Template = "{label}"
    """Format string that makes the answer: names of columns in braces."""
