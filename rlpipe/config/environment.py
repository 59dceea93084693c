"""Environments: what answers the policy, how many turns it may take, and what its tools may cost."""

from typing import Any, Literal

from pydantic import Field

from rlpipe.config.base import Section


class ToolLimits(Section):
    """What one tool may take. A call that ends in a failure is answered with a sentence, and counted by kind."""

    concurrency: int = Field(16, ge=1)
    """Calls of the tool at a time, over all episodes of the run; further ones wait. A call that hangs keeps its place
    until it really ends."""

    timeout_seconds: float = Field(30.0, gt=0)
    """Time of one try; the policy is then told that the tool took too long. Also the longest wait for a place."""

    retries: int = Field(0, ge=0)
    """Further tries after an error or a time-out, with growing pauses. For tools that may be called twice."""

    max_answer_characters: int = Field(8192, ge=1)
    """Longer answers are cut, which the policy is told."""


class EnvironmentConfig(Section):
    """The environment of `rollout.generate.function: environment`."""

    name: str
    """Registered environment (docs/environments.md), or your own as `package.module:Class`."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""

    format: Literal["chat", "text"] = "chat"
    """`chat`: turns and answers are messages, written as the model's chat template does; the end-of-sequence token ends
    a turn. `text`: what the environment answers follows the policy's text as it is; the end-of-sequence token ends the
    episode's last turn."""

    tool_format: Literal["hermes", "brackets"] = "hermes"
    """How the policy writes calls. `hermes`: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen models
    do; `brackets`: `<<name: argument>>`, or `<<argument>>` where there is one tool, which small policies learn."""

    max_turns: int = Field(16, ge=1)
    """Turns of an episode, over all its agents."""

    max_turn_tokens: int | None = Field(None, ge=1)
    """Token limit of one turn; a turn that meets it is handed to the environment as it is. Empty: what is left of
    `rollout.max_response_tokens`, which holds all turns and answers of one agent."""

    stop: list[str] = Field(default_factory=list)
    """Strings that end a turn, besides the end-of-sequence token."""

    episode_seconds: float = Field(600.0, gt=0)
    """Time limit of an episode; met between turns."""

    step_seconds: float = Field(120.0, gt=0)
    """Time limit of one reset, step or cleanup of the environment, tools included; beyond it the episode has failed."""

    reset_retries: int = Field(1, ge=0)
    """Further tries, each with a new environment, after a reset that failed or was late."""

    tools: ToolLimits = ToolLimits()
    """Limits of every tool."""

    tool_limits: dict[str, ToolLimits] = Field(default_factory=dict)
    """Limits of single tools by their names, in place of `tools`."""
