"""Sums of several numbers with a calculator that adds two: the policy writes `<<12+30>>`, reads ` = 42 `, and goes on.

The tool never miscalculates; what is to be learned is which numbers to hand it, in which order, and when to answer.
"""

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

from rlpipe.environments.protocol import Message, Observation, Task
from rlpipe.environments.tool_task import ToolTask
from rlpipe.environments.tools import ToolAnswer, tool_of
from rlpipe.generation.calculator import evaluate
from rlpipe.shared.errors import ConfigError

_ANSWER = re.compile(r"Answer: (-?\d+)\s*$")
_PAIR = re.compile(r"\s*\d+\s*[-+*]\s*\d+\s*")


def calculate(expression: str) -> str:
    """The value of a sum, difference or product of two numbers, such as 12+30."""
    return evaluate(expression) if _PAIR.fullmatch(expression) else "?"


class Calculation(ToolTask):
    """The answer is right where it equals the row's label. `call_reward` is given at the end for every useful call that
    the episode made, up to those that are needed: the sum of two numbers that were still to be added."""

    tools = (tool_of(calculate),)

    def __init__(self, operands: int = 3, digits: int = 2, call_reward: float = 0.0) -> None:
        if operands < 2 or digits < 1:
            raise ConfigError(f"environment 'calculation': {operands} operands of {digits} digits; at least 2 and 1")
        super().__init__()
        self._operands = operands
        self._digits = digits
        self._label = ""

    def tasks(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """Up to `count` rows, with a right way to write each of them in `steps`."""
        generator = random.Random(f"calculation {seed}")
        seen: set[tuple[int, ...]] = set()
        highest = 10**self._digits - 1
        for _ in range(50 * count):
            numbers = tuple(generator.randint(0, highest) for _ in range(self._operands))
            if len(seen) < count and tuple(sorted(numbers)) not in seen:
                seen.add(tuple(sorted(numbers)))
                yield self._row(numbers)

    async def reset(self, task: Task) -> Observation:
        self._label = task.label
        return Observation()

    async def answered(self, text: str) -> tuple[bool, float]:
        found = _ANSWER.search(text)
        right = found is not None and found[1] == self._label
        return right, float(right)

    def told(self, answers: Sequence[ToolAnswer]) -> Observation:
        return Observation((Message("tool", f" = {answers[-1].text} "),))

    def _row(self, numbers: tuple[int, ...]) -> dict[str, Any]:
        total, steps = numbers[0], []
        for number in numbers[1:]:
            steps.append(f"<<{total}+{number}>> = {total + number}")
            total += number
        return {
            "prompt": "+".join(map(str, numbers)) + "=?",
            "label": str(total),
            "steps": f"{' '.join(steps)} Answer: {total}",
        }
