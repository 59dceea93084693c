"""Sums of several numbers with a calculator that adds two: the policy writes `<<12+30>>`, reads ` = 42 `, and goes on.

The tool never miscalculates; what is to be learned is which numbers to hand it, in which order, and when to answer.
"""

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rlpipe.environments.protocol import Action, Message, Observation, Step, Task
from rlpipe.environments.tool_task import ToolTask
from rlpipe.environments.tools import ToolAnswer, ToolBox, tool_of
from rlpipe.generation.calculator import evaluate
from rlpipe.shared.errors import ConfigError

_ANSWER = re.compile(r"Answer: (-?\d+)\s*$")
_SUM = re.compile(r"\s*\d+\s*\+\s*\d+\s*")
_PAIR = re.compile(r"\s*\d+\s*[-+*]\s*\d+\s*")


def calculate(expression: str) -> str:
    """The value of a sum, difference or product of two numbers, such as 12+30."""
    return evaluate(expression) if _PAIR.fullmatch(expression) else "?"


class Calculation(ToolTask):
    """The answer is right where it equals the row's label, and then earns 1. `call_reward` is earned by a turn whose
    call adds two numbers that are still to be added: of the row's `expression`, or sums that earlier calls made."""

    tools = (tool_of(calculate),)

    def __init__(self, operands: int = 3, digits: int = 2, call_reward: float = 0.0) -> None:
        if operands < 2 or digits < 1:
            raise ConfigError(f"environment 'calculation': {operands} operands of {digits} digits; at least 2 and 1")
        super().__init__()
        self._call_reward = call_reward
        self._left: Counter[int] = Counter()
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
        self._left = Counter(map(int, str(task.columns.get("expression", "")).split("+")))
        return Observation()

    async def step(self, action: Action, toolbox: ToolBox) -> Step:
        step = await super().step(action, toolbox)
        useful = sum(self._is_useful(str(call.arguments.get("expression", ""))) for call in action.calls)
        return replace(step, reward=self._call_reward * useful) if action.calls else step

    async def answered(self, text: str) -> tuple[bool, float]:
        found = _ANSWER.search(text)
        right = found is not None and found[1] == self._label
        return right, float(right)

    def told(self, answers: Sequence[ToolAnswer]) -> Observation:
        return Observation((Message("tool", f" = {answers[-1].text} "),))

    def _is_useful(self, expression: str) -> bool:
        """Whether the call brings the sum nearer; its numbers are then used up."""
        numbers = Counter(map(int, expression.split("+"))) if _SUM.fullmatch(expression) else Counter()
        if numbers.total() != 2 or numbers - self._left:
            return False
        self._left += Counter([sum(numbers.elements())])
        self._left -= numbers
        return True

    def _row(self, numbers: tuple[int, ...]) -> dict[str, Any]:
        total, steps = numbers[0], []
        for number in numbers[1:]:
            steps.append(f"<<{total}+{number}>> = {total + number}")
            total += number
        expression = "+".join(map(str, numbers))
        return {
            "prompt": f"{expression}=?",
            "label": str(total),
            "expression": expression,
            "steps": f"{' '.join(steps)} Answer: {total}",
        }
