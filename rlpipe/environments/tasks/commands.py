"""Tasks on a machine, as SWE-bench, Terminal-Bench and Harbor have them: the policy runs commands, then tests judge.

A row has `files` (texts by path), `tests` (likewise; they come onto the machine only when the policy is done) and
`test` (the command that judges). `image` names what a remote machine is made from, `setup` runs before the first turn.
`harbor_row` makes a row of a task folder in Harbor's layout.
"""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveFloat

from rlpipe.environments.adapters.command_sandbox import CommandSandbox, HttpSandbox, LocalSandbox
from rlpipe.environments.protocol import Observation, Task
from rlpipe.environments.tool_task import ToolTask
from rlpipe.environments.tools import Tool, tool_of
from rlpipe.shared.errors import ConfigError, DataError

_HARBOR_TEST, _HARBOR_REWARD = "tests/test.sh", "/logs/verifier/reward.txt"
_REWARD_FILE = ".verifier/reward.txt"


class Commands(ToolTask):
    """`where`: `local`, in the sandbox of this machine, or `remote`, at the service `url` (`key_variable` names the
    environment variable with its key). Success is a judging command that ends with code 0; where it writes a number
    into `reward_file`, that is the reward, and 1 or more is a success.
    """

    def __init__(
        self,
        where: Literal["local", "remote"] = "local",
        url: str = "",
        key_variable: str = "",
        command_seconds: PositiveFloat = 30.0,
        test_seconds: PositiveFloat = 60.0,
        reward_file: str = _REWARD_FILE,
    ) -> None:
        if where not in ("local", "remote") or (where == "remote") != bool(url):
            raise ConfigError(
                f"environment 'commands': where is {where!r} and url {url!r}; give url for 'remote' alone"
            )
        super().__init__()
        self._sandbox: CommandSandbox = LocalSandbox() if where == "local" else HttpSandbox(url, _key(key_variable))
        self._command_seconds = command_seconds
        self._test_seconds = test_seconds
        self._reward_file = reward_file
        self._row: Mapping[str, Any] = {}
        self._commands = self._timeouts = 0
        self.tools: tuple[Tool, ...] = (tool_of(self.bash), tool_of(self.write_file))

    async def reset(self, task: Task) -> Observation:
        self._row = task.columns
        await self._sandbox.start(str(self._row.get("image", "")), _texts(self._row, "files"))
        if setup := self._row.get("setup"):
            outcome = await self._sandbox.run(str(setup), self._test_seconds)
            if outcome.exit_code:
                raise RuntimeError(
                    f"the setup of {task.task_id} ended with {outcome.exit_code}: {outcome.output[-500:]}"
                )
        return Observation()

    async def bash(self, command: str) -> str:
        """Runs a shell command in the working folder; its files stay, its processes do not."""
        self._commands += 1
        outcome = await self._sandbox.run(command, self._command_seconds)
        self._timeouts += outcome.timed_out
        end = "it took too long" if outcome.timed_out else f"exit code {outcome.exit_code}"
        return f"{outcome.output.rstrip()}\n{end}".lstrip()

    async def write_file(self, path: str, text: str) -> str:
        """Writes a file of the working folder."""
        await self._sandbox.add({path: text})
        return "done"

    async def answered(self, text: str) -> tuple[bool, float]:
        await self._sandbox.add(_texts(self._row, "tests"))
        judge = f"rm -f {shlex.quote(self._reward_file)}; {self._row['test']}"  # the policy may have written one
        outcome = await self._sandbox.run(judge, self._test_seconds)
        told = await self._sandbox.read(self._reward_file)
        reward = float(outcome.exit_code == 0) if told is None else _number(told)
        return (reward >= 1.0 if told is not None else outcome.exit_code == 0), reward

    async def close(self) -> None:
        await self._sandbox.stop()

    @property
    def state(self) -> dict[str, Any]:
        return {**super().state, "commands": self._commands, "command_timeouts": self._timeouts}


def harbor_row(folder: Path) -> dict[str, Any]:
    """A row of a task in Harbor's layout: instruction.md, environment/, tests/test.sh, which writes its verdict to
    /logs/verifier/reward.txt. Raises DataError where a part is missing."""
    missing = [name for name in ("instruction.md", _HARBOR_TEST) if not (folder / name).is_file()]
    if missing:
        raise DataError(f"{folder}: no task in Harbor's layout, {missing[0]} is missing")
    tests = {f"tests/{name}": text for name, text in _folder(folder / "tests").items()}
    # Its tests speak of a machine's root; here they stand in the working folder, as everything does.
    tests = {
        name: text.replace(_HARBOR_REWARD, _REWARD_FILE).replace("/tests/", "tests/") for name, text in tests.items()
    }
    return {
        "prompt": (folder / "instruction.md").read_text(),
        "label": folder.name,
        "files": {name: text for name, text in _folder(folder / "environment").items() if name != "Dockerfile"},
        "tests": tests,
        "test": f"mkdir -p {shlex.quote(str(Path(_REWARD_FILE).parent))}; sh {_HARBOR_TEST}",
    }


def _folder(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text(errors="replace") for path in files}


def _texts(row: Mapping[str, Any], column: str) -> dict[str, str]:
    return {str(path): str(text) for path, text in (row.get(column) or {}).items() if text is not None}


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _key(variable: str) -> str:
    if variable and variable not in os.environ:
        raise ConfigError(f"environment 'commands': key_variable names {variable}, which is not set")
    return os.environ.get(variable, "")
