"""Calling the programs of a scheduler."""

import shutil
import subprocess

from rlpipe.shared.errors import ResourceError

_SECONDS = 600.0  # a job that is asked to stop may save first


def output_of(program: str, *arguments: str) -> str:
    """What it prints. Raises ResourceError where it is not installed, fails, or does not end."""
    require(program)
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise ResourceError(f"{program} {arguments[0]} did not answer within {_SECONDS:g} seconds") from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or "nothing was printed"
        raise ResourceError(f"{program} {' '.join(arguments)} ended with exit code {done.returncode}: {said}")
    return done.stdout


def require(program: str) -> None:
    """Raises ResourceError where it is not installed."""
    if shutil.which(program) is None:
        raise ResourceError(f"{program} is not installed here: launch from a host that has it")
