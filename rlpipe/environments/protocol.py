"""What an environment is: it sets a task, answers each turn of the policy, and says what the episode earned.

One object lives for one episode. It is made by calling its class with the configured options; then come `reset`, any
number of `step`s, and `close`, which is called whatever happened.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlpipe.environments.tools import Tool, ToolBox
from rlpipe.generation.written_calls import ToolCall


@dataclass(frozen=True)
class Task:
    """One row of the data set. `seed` is the same for all episodes of a group and for every retry of one of them, so
    that a reset which draws from it alone can be repeated; `columns` are the row's other columns."""

    task_id: str
    prompt: str
    label: str
    columns: Mapping[str, Any]
    seed: int


@dataclass(frozen=True)
class Message:
    """One message in the chat format. `fields` hold what a chat template knows besides role and content."""

    role: str
    content: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Observation:
    """What the agent that acts next is shown: messages, or token ids that are taken as they are. Never trained.

    `agent` names it where several act in one episode; each has a sequence of its own, which holds what it was shown.
    """

    messages: tuple[Message, ...] = ()
    token_ids: tuple[int, ...] = ()
    agent: str = ""


def shown(text: str, agent: str = "", role: str = "user") -> Observation:
    """An observation of one message; none for an empty text."""
    return Observation((Message(role, text),) if text else (), agent=agent)


@dataclass(frozen=True)
class Action:
    """What the policy wrote in a turn: text without special tokens, and its token ids.

    `calls`: the tool calls in it, also those that cannot be read, where the environment has tools. `cut`: the turn met
    its token limit.
    """

    text: str
    token_ids: tuple[int, ...]
    calls: tuple[ToolCall, ...] = ()
    agent: str = ""
    cut: bool = False


@dataclass(frozen=True)
class Step:
    """The answer to a turn. `observation` None ends the episode. `reward` belongs to the turn that was just taken;
    `rewards` are for the latest turns of other agents, by name."""

    observation: Observation | None
    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """What the episode earned: `reward` on top of those of its turns (None: nothing), whether it succeeded (None: it
    has no notion of that), and what of its state graders and metrics should see (JSON values; numbers become
    metrics)."""

    reward: float | None = None
    success: bool | None = None
    state: Mapping[str, object] = field(default_factory=dict)


class Environment(Protocol):
    """An episode's surroundings. `Unattended` has what most leave as it is."""

    @property
    def tools(self) -> Sequence[Tool]:
        """What the policy may call; known before `reset`, or from then on."""
        ...

    async def reset(self, task: Task) -> Observation:
        """The first observation. Messages in the chat format replace the row's prompt; none: the prompt is used."""
        ...

    async def step(self, action: Action, toolbox: ToolBox) -> Step:
        """The answer to a turn. `toolbox` runs this environment's tools within their limits."""
        ...

    async def result(self) -> Result:
        """Asked once, when the episode is over, be it by a limit."""
        ...

    async def close(self) -> None:
        """Gives back what the episode holds: processes, connections, files."""
        ...


class Unattended:
    """An environment without tools, without a result and with nothing to give back."""

    tools: Sequence[Tool] = ()

    async def result(self) -> Result:
        return Result()

    async def close(self) -> None:
        return None
