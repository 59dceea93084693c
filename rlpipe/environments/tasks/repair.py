"""A program with a fault, tests, and tools to read, change and try it; everything runs in the sandbox.

A row has `source` (the program), `tests` (Python with assertions, run beside the program where it cannot reach them)
and a prompt that says what is wrong. What the policy hands in is the program as it then is.
"""

import asyncio
from typing import Any

from rewards.sandbox.program import Isolation, Limits, Outcome, Program, namespaces_work, run_python, run_tests
from rlpipe.environments.protocol import Observation, Task
from rlpipe.environments.tool_task import ToolTask
from rlpipe.environments.tools import Tool, tool_of
from rlpipe.shared.errors import ConfigError

_LONGEST_SOURCE_CHARACTERS = 2**18


class Repair(ToolTask):
    """Success is passing the row's tests at the end. State: `edits`, `tries`."""

    def __init__(self, wall_seconds: float = 6.0, memory_bytes: int = 2**29, isolation: Isolation = "required") -> None:
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
