"""Agents that talk to the policy by OpenAI's API."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rlpipe.config.base import Section


class AgentConfig(Section):
    """The agent of `rollout.generate.function: agent`, which gets a base URL and a key (docs/agents.md)."""

    run: str | None = None
    """Your agent as `package.module:function`: it takes a `rlpipe.agents.agent_task.AgentTask`, may be `async def` or
    not, and may return a reward."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""

    command: list[str] = Field(default_factory=list)
    """Your agent as a program with its arguments: it finds the endpoint in `OPENAI_BASE_URL` and `OPENAI_API_KEY`, and
    the task as JSON on its standard input."""

    timeout_seconds: float = Field(600.0, gt=0)
    """Time limit of an episode, without the time in which generation is interrupted. An agent beyond it is ended."""

    concurrency: int = Field(1024, ge=1)
    """Agents at a time; further ones wait. A function that is not `async def` has a thread for each."""

    failure_reward: float | None = None
    """Reward of an episode whose agent failed or ran out of time after the policy wrote something. Empty: such episodes
    count as failed, and are not trained."""

    response_format: Literal["refused", "unenforced"] = "refused"
    """What a request for JSON (`response_format`) is answered with. `refused`: an error. `unenforced`: what the policy
    writes by itself, so that log-probabilities stay its own; answers that do not fit are counted. Tell the policy the
    schema in the prompt, and have the reward fall where an answer does not fit."""

    @model_validator(mode="after")
    def _one_agent(self) -> Self:
        if (self.run is None) == (not self.command):
            raise ValueError(
                "rollout.generate.agent needs one of run (package.module:function) and command (a program with its "
                "arguments): give exactly one"
            )
        if self.options and self.run is None:
            raise ValueError("rollout.generate.agent.options are those of run: put the command's into command")
        return self
