"""Installed packages against the pins that belong to this device."""

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rlpipe.commands.doctor.check import Check, fail, ok, warn

# Other versions of these break or change results; of the rest they rarely matter.
_EXACT = ("megatron-core", "sglang", "transformers", "tokenizers", "torch", "ray")
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)")
_FIX = "run scripts/setup.sh in a checkout, or install what README.md says of a wheel"
TORCH = {"cpu": "2.13.0", "gpu": "2.11.0"}


def read_pins(path: Path) -> dict[str, str]:
    """Package -> version of a requirements file."""
    matches = (_PIN.match(line) for line in path.read_text().splitlines())
    return {match[1].lower(): match[2] for match in matches if match}


def check_packages(pins: dict[str, str]) -> Iterator[Check]:
    """One line for each package that is missing or that must be exact, one for all others."""
    others, missing = [], []
    for name, wanted in pins.items():
        try:
            have = version(name).split("+")[0]
        except PackageNotFoundError:
            missing.append(name)
            continue
        if name in _EXACT:
            yield _exact(name, have, wanted)
        elif have != wanted:
            others.append(f"{name} {have} (pinned {wanted})")
    if missing:
        yield fail("packages", f"{', '.join(missing)} missing", _FIX)
    elif others:
        yield warn("packages", f"{len(others)} differ from their pins: {', '.join(others)}", _FIX)
    else:
        yield ok("packages", f"{len(pins)} as pinned")


def _exact(name: str, have: str, wanted: str) -> Check:
    if have == wanted:
        return ok(name, have)
    return fail(name, f"{have}, but {wanted} is needed", _FIX)
