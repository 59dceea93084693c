"""What a response is made of where the policy wrote in several turns: who wrote, how long it took, what it earned."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Ended = Literal["done", "turns", "seconds", "tokens"]
"""Why an episode ended: its environment said so, or the limit that was met."""


@dataclass(frozen=True)
class ToolUse:
    """One call of a tool.

    `failure` is empty for a call that worked; otherwise one of `malformed`, `unknown`, `arguments`, `timeout`, `error`,
    `exhausted`. `seconds` runs from the request to the answer, waiting for a free slot and retries included. `cut`: the
    answer was longer than allowed. `special_text`: it held text of special tokens, which stayed text.
    """

    name: str
    seconds: float
    failure: str = ""
    retries: int = 0
    cut: bool = False
    special_text: bool = False


@dataclass(frozen=True)
class Turn:
    """What the policy wrote at once: response tokens `start` up to, and without, `end` of its sample.

    `number` counts the turns of the episode from 0, over all its samples and agents. `reward` is None where the
    environment gave none for this turn. `tool_seconds`: what the environment took to answer, tools included.
    """

    start: int
    end: int
    number: int = 0
    reward: float | None = None
    model_seconds: float = 0.0
    tool_seconds: float = 0.0
    tools: tuple[ToolUse, ...] = ()
    agent: str = ""


@dataclass(frozen=True)
class Outcome:
    """How an episode went, as its environment tells: `reward` at its end (None: none), `turn_rewards` of all its turns
    together, `success` (None: it has no notion of it), its `state` at the end (JSON values), and why it `ended`.
    `turns`: how many were taken, by all agents. `cleanup_failed`: it did not give back what it held, or not in time."""

    turns: int
    turn_rewards: float = 0.0
    reward: float | None = None
    success: bool | None = None
    state: Mapping[str, object] = field(default_factory=dict)
    ended: Ended = "done"
    cleanup_failed: bool = False
