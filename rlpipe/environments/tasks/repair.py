"""A program with a fault, tests, and tools to read, change and try it; everything runs in the sandbox.

A row has `source` (the program), `tests` (Python with assertions, run beside the program where it cannot reach them)
and a prompt that says what is wrong. What the policy hands in is the program as it then is.
"""

import asyncio
import random
from collections.abc import Iterator
from typing import Any

from pydantic import PositiveFloat, PositiveInt

from rewards.sandbox.program import Isolation, Limits, Outcome, Program, namespaces_work, run_python, run_tests
from rlpipe.environments.protocol import Observation, Task
from rlpipe.environments.tool_task import ToolTask
from rlpipe.environments.tools import Tool, tool_of
from rlpipe.shared.errors import ConfigError

_LONGEST_SOURCE_CHARACTERS = 2**18

_PROGRAMS = (
    (
        'def total(numbers):\n    """Their sum."""\n    result = 0\n    for number in numbers:\n'
        "        result += number\n    return result\n",
        "assert total([]) == 0\nassert total([1, 2, 3]) == 6\nassert total([-1, -1]) == -2",
        (("+=", "-="), ("+=", "*="), ("result = 0", "result = 1"), ("return result", "return number")),
    ),
    (
        'def largest(numbers):\n    """The greatest of them."""\n    best = numbers[0]\n    for number in numbers:\n'
        "        if number > best:\n            best = number\n    return best\n",
        "assert largest([3, 9, 2]) == 9\nassert largest([-5, -7]) == -5\nassert largest([4]) == 4",
        (("number > best", "number < best"), ("numbers[0]", "0"), ("best = number\n", "best = -number\n")),
    ),
    (
        'def is_palindrome(text):\n    """Whether it reads the same from both ends."""\n'
        "    return text == text[::-1]\n",
        "assert is_palindrome('level')\nassert not is_palindrome('ab')\nassert is_palindrome('')",
        (("==", "!="), ("[::-1]", "[::1]"), ("[::-1]", "[1::-1]")),
    ),
    (
        'def count(text, letter):\n    """How often the letter occurs."""\n'
        "    return sum(1 for one in text if one == letter)\n",
        "assert count('banana', 'a') == 3\nassert count('', 'a') == 0\nassert count('aaa', 'b') == 0",
        (("==", "!="), ("sum(1", "sum(2"), ("in text", "in text[1:]")),
    ),
    (
        'def factorial(n):\n    """1 * 2 * ... * n."""\n    return 1 if n == 0 else n * factorial(n - 1)\n',
        "assert factorial(0) == 1\nassert factorial(1) == 1\nassert factorial(5) == 120",
        (("return 1", "return 0"), ("n * f", "n + f"), ("n - 1", "n - 2"), ("n == 0", "n == -1")),
    ),
)
"""Source, tests, and faults: what is right, and what stands there instead."""


class Repair(ToolTask):
    """Success is passing the row's tests at the end. State: `edits`, `tries`."""

    def __init__(
        self, wall_seconds: PositiveFloat = 6.0, memory_bytes: PositiveInt = 2**29, isolation: Isolation = "required"
    ) -> None:
        if isolation == "required" and not namespaces_work():
            raise ConfigError(
                "environment 'repair' needs namespaces, which this machine does not permit: allow unprivileged user "
                "namespaces, or set its option isolation to best_effort (docs/rewards.md says what is lost)"
            )
        super().__init__()
        self._limits = Limits(wall_seconds=wall_seconds, memory_bytes=memory_bytes)
        self._isolation: Isolation = isolation
        self._source = self._tests = ""
        self._edits = self._tries = 0
        self.tools: tuple[Tool, ...] = tuple(tool_of(one) for one in (self.show, self.replace, self.write, self.run))

    def tasks(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """Small functions with one fault each, in random order."""
        rows = [
            {
                "prompt": f"The program does not do what it says. Correct it.\n\n{source.replace(right, wrong, 1)}",
                "label": right,
                "source": source.replace(right, wrong, 1),
                "tests": tests,
            }
            for source, tests, faults in _PROGRAMS
            for right, wrong in faults
        ]
        random.Random(f"repair {seed}").shuffle(rows)
        yield from rows[:count]

    async def reset(self, task: Task) -> Observation:
        self._source, self._tests = str(task.columns["source"]), str(task.columns["tests"])
        return Observation()

    def show(self) -> str:
        """The program as it is now."""
        return self._source

    def replace(self, old: str, new: str) -> str:
        """Puts `new` in place of `old`, which must stand in the program exactly once."""
        count = self._source.count(old) if old else 0
        if count != 1:
            return f"error: the text to replace stands in the program {count} times"
        return self.write(self._source.replace(old, new))

    def write(self, source: str) -> str:
        """Takes `source` as the whole program."""
        if len(source) > _LONGEST_SOURCE_CHARACTERS:
            return f"error: a program may have {_LONGEST_SOURCE_CHARACTERS} characters"
        self._source = source
        self._edits += 1
        return "done"

    async def run(self, code: str) -> str:
        """Runs the program and then `code`, and tells what they print."""
        self._tries += 1
        program = Program(f"{self._source}\n\n{code}")
        return _told(await asyncio.to_thread(run_python, program, self._limits, self._isolation))

    async def answered(self, text: str) -> tuple[bool, float]:
        program = Program(self._source)
        outcome = await asyncio.to_thread(run_tests, program, self._tests, self._limits, self._isolation)
        right = outcome.exit_code == 0 and not outcome.timed_out
        return right, float(right)

    @property
    def state(self) -> dict[str, Any]:
        return {**super().state, "edits": self._edits, "tries": self._tries}


def _told(outcome: Outcome) -> str:
    end = "it took too long" if outcome.timed_out else f"exit code {outcome.exit_code}"
    return "\n".join(part for part in (outcome.stdout.strip(), outcome.stderr.strip(), end) if part)
