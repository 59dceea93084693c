"""Where Python keeps what it compiled: without that, each process of a run compiles thousands of modules."""

import os
import sys
from pathlib import Path

_FORBIDDEN = "PYTHONDONTWRITEBYTECODE"
_FOLDER = "PYTHONPYCACHEPREFIX"
_OWN_FOLDER = "~/.cache/rlpipe/bytecode"


def keep_bytecode() -> None:
    """Where the environment forbids Python to leave compiled modules beside their sources, have this process and those
    to come keep them in a folder of the user's: without any, a run's start takes two to three times as long.

    Call it before heavy imports.
    """
    if not os.environ.get(_FORBIDDEN):
        return
    if not os.environ.get(_FOLDER):
        try:
            os.environ[_FOLDER] = str(Path(_OWN_FOLDER).expanduser())
        except RuntimeError:  # a user without a home
            return
    os.environ[_FORBIDDEN] = ""  # not removed: processes on other nodes may have it from their own environment
    sys.pycache_prefix, sys.dont_write_bytecode = os.environ[_FOLDER], False


def bytecode_environment() -> dict[str, str]:
    """What `keep_bytecode` has set here, for processes that do not inherit it."""
    kept = os.environ.get(_FORBIDDEN) == "" and os.environ.get(_FOLDER)
    return {_FORBIDDEN: "", _FOLDER: kept} if kept else {}
