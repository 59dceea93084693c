"""A module that a configuration names is first imported in a process of its own: it is someone else's program, and may
hang, end its process, or raise what stands for Ctrl-C.

Run as a program, this file is that process.
"""

import faulthandler
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import partial
from typing import IO

from rlpipe.shared.errors import ConfigError
from rlpipe.shared.overtime import if_longer_than

PATIENCE_SECONDS = 30.0
LIMIT_SECONDS = 120.0
_KILL_SECONDS = 30.0
_IMPORTED, _RAISED = "imported", "raised"
_FIX = "; move what it does into functions"
_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')


def try_import(module: str, what: str) -> None:
    """Import `module` in another process, within `LIMIT_SECONDS`. Modules that are loaded here already are not tried.

    Returns where the import succeeds, and where it raises an Exception, which it will raise here as well. Raises
    ConfigError, beginning with `what`, where it hangs, ends its process, or raises SystemExit, KeyboardInterrupt and
    the like.
    """
    if module in sys.modules:
        return
    words = f"{what} takes longer than {PATIENCE_SECONDS:g} seconds; after {LIMIT_SECONDS:g} it is given up"
    say = partial(print, words, file=sys.stderr, flush=True)
    with tempfile.TemporaryFile("w+") as answer, if_longer_than(PATIENCE_SECONDS, say):
        code = _exit_code_of_trial(module, answer)
        answer.seek(0)
        said = answer.read()
    if code is None or said.startswith("Timeout"):
        raise ConfigError(f"{what} takes longer than {LIMIT_SECONDS:g} seconds{_place(said)}{_FIX}")
    if not said:
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        raise ConfigError(f"{what} ended the process that imported it ({how}){_FIX}")
    kind, text = json.loads(said)
    if kind not in (_IMPORTED, _RAISED):
        raise ConfigError(f"{what} failed with {kind}: {text}")


def first_line(error: BaseException) -> str:
    """What an error says, as part of a sentence."""
    try:
        return (str(error).strip().splitlines() or ["no message"])[0][:300]
    except Exception:  # it is someone else's class
        return "no message"


def _exit_code_of_trial(module: str, answer: IO[str]) -> int | None:
    """None where it had to be killed. What the module prints is dropped; it is printed again when imported here."""
    process = subprocess.Popen(
        [sys.executable, "-P", __file__, str(answer.fileno()), str(LIMIT_SECONDS), module],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[answer.fileno()],
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        return process.wait(LIMIT_SECONDS + _KILL_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    finally:  # with what it has started
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _place(stack: str) -> str:
    """Where a module hangs: the line of the module itself, not of a library that it called."""
    frames = _FRAME.findall(stack)
    inner = [frame for frame in frames if frame[2] == "<module>"] or frames
    return f", at line {inner[0][1]} of {inner[0][0]}" if inner else ""


def _try(descriptor: int, limit_seconds: float, module: str) -> None:
    answer = os.fdopen(descriptor, "w")
    faulthandler.dump_traceback_later(limit_seconds, exit=True, file=answer)
    said = [_IMPORTED, ""]
    try:
        importlib.import_module(module)
    except Exception:
        said = [_RAISED, ""]
    except BaseException as error:
        said = [type(error).__name__, first_line(error)]
    answer.write(json.dumps(said))
    answer.flush()
    os._exit(0)  # whatever threads and exit hooks the module has left


if __name__ == "__main__":
    _try(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
