"""Two agents in one episode: one sees a digit and writes a letter, the other sees the letter and says the digit.

Lewis's signaling game ("Convention", 1969). They share the weights of one policy, and a meaning for each letter comes
about by itself. Each agent has a token sequence of its own, and both earn the reward of the round, or lose it.
"""

import random
import string
from collections.abc import Iterator
from typing import Any

from rlpipe.environments.protocol import Action, Observation, Result, Step, Task, Unattended, shown
from rlpipe.shared.errors import ConfigError

SENDER, RECEIVER = "sender", "receiver"


class Signals(Unattended):
    """An episode of `rounds` digits below `meanings`, for which there are as many letters: a, b, c, ...

    Anything else that the sender writes is shown as `-`; a letter earns it `letter_reward`, so that it learns to signal
    before it learns what.
    """

    def __init__(self, meanings: int = 3, rounds: int = 4, letter_reward: float = 0.2) -> None:
        if not 2 <= meanings <= 10 or rounds < 1:
            raise ConfigError(f"environment 'signals': {meanings} meanings in {rounds} rounds; 2 to 10, and at least 1")
        self._meanings = meanings
        self._rounds = rounds
        self._letters = string.ascii_lowercase[:meanings]
        self._letter_reward = letter_reward
        self._digits = ""
        self._round = self._right = 0

    def tasks(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """Up to `count` different rows of digits, in random order."""
        possible = self._meanings**self._rounds
        chosen = random.Random(f"signals {seed}").sample(range(possible), min(count, possible))
        for row, number in enumerate(chosen):
            digits = "".join(str(number // self._meanings**place % self._meanings) for place in range(self._rounds))
            yield {"prompt": f"{row:04d}:", "label": digits, "task": f"{digits};"}

    async def reset(self, task: Task) -> Observation:
        self._digits = str(task.columns["task"]).rstrip(";")
        return self._for_sender()

    async def step(self, action: Action, toolbox: object) -> Step:
        if action.agent == SENDER:
            known = len(action.text) == 1 and action.text in self._letters
            return Step(shown(f" {action.text if known else '-'}>", RECEIVER), self._letter_reward if known else 0.0)
        right = action.text == self._digits[self._round]
        self._right += right
        self._round += 1
        reward = 1.0 if right else 0.0
        over = self._round == len(self._digits)
        return Step(None if over else self._for_sender(), reward, {SENDER: reward})

    async def result(self) -> Result:
        share = self._right / max(1, self._round)
        return Result(None, self._round > 0 and self._right == len(self._digits), {"right_share": share})

    def _for_sender(self) -> Observation:
        return shown(f" {self._digits[self._round]}<", SENDER)
