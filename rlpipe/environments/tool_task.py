"""What environments with tools have in common: turns with calls are answered by tools, one without is the answer."""

from collections.abc import Sequence
from typing import Any

from rlpipe.environments.protocol import Action, Message, Observation, Result, Step, Task, Unattended
from rlpipe.environments.tools import ToolAnswer, ToolBox


class ToolTask(Unattended):
    """Runs the calls of each turn until a turn has none, which `answered` judges.

    `failed_call_reward` is given for each call that cannot be read or does not fit its tool, so that forms are learned.
    State: `calls`, `failed_calls`.
    """

    def __init__(self, failed_call_reward: float = 0.0) -> None:
        self._failed_call_reward = failed_call_reward
        self._calls = self._failed_calls = 0
        self._success: bool | None = False
        self._reward: float | None = None

    async def reset(self, task: Task) -> Observation:
        """The row's prompt stands as it is."""
        return Observation()

    async def step(self, action: Action, toolbox: ToolBox) -> Step:
        if not action.calls:
            self._success, self._reward = await self.answered(action.text)
            return Step(None)
        answers = await toolbox.call_all(action.calls, self.tools)
        misread = sum(answer.use.failure in ("malformed", "unknown", "arguments") for answer in answers)
        self._calls += len(answers)
        self._failed_calls += sum(bool(answer.use.failure) for answer in answers)
        return Step(self.told(answers), self._failed_call_reward * misread if misread else None)

    async def answered(self, text: str) -> tuple[bool | None, float | None]:
        """Whether `text`, the last turn, is right (None: a grader says), and its reward."""
        return None, None

    def told(self, answers: Sequence[ToolAnswer]) -> Observation:
        """How the policy sees the answers: a message of the role `tool` for each."""
        return Observation(tuple(Message("tool", answer.text, {"name": answer.use.name}) for answer in answers))

    async def result(self) -> Result:
        return Result(self._reward, self._success, self.state)

    @property
    def state(self) -> dict[str, Any]:
        return {"calls": self._calls, "failed_calls": self._failed_calls}
