"""Declarations of what we replace or use inside other packages, where nobody promises that it stays.

A declaration stands beside the code that it is about. `scripts/replaced_parts.py` reads all of them without running
anything, compares the originals with those that were read before, and writes docs/upgrading.md. So all arguments are
literals. At run time a declaration finds its original, or says what to do where that is gone.
"""

import importlib
from dataclasses import dataclass
from typing import Any, TypeVar

from rlpipe.shared.errors import RlpipeError

Replacement = TypeVar("Replacement")


class ReplacedPartError(RlpipeError):
    """An installed package lacks a part that is replaced or used here."""


@dataclass(frozen=True)
class Declaration:
    """Parts of other packages that one piece of our code depends on.

    targets: `package.module:name`, `package.module:Class.name`, or a whole `package.module`.
    why: what we need them for. drop_when: what would make that needless.
    """

    targets: tuple[str, ...]
    why: str
    drop_when: str

    def __call__(self, replacement: Replacement) -> Replacement:
        """As a decorator of what takes the original's place."""
        return replacement

    def original(self, index: int = 0) -> Any:
        """The part as it is now, of target `index`. Raises ReplacedPartError where the package has no such part."""
        module, _, name = self.targets[index].partition(":")
        try:
            found = importlib.import_module(module)
            for attribute in name.split(".") if name else ():
                found = getattr(found, attribute)
        except (ImportError, AttributeError) as error:
            raise ReplacedPartError(
                f"{self.targets[index]} is not in the installed packages ({error}), but it is needed: {self.why}; "
                "install the versions in requirements/, or adapt the code as docs/upgrading.md says"
            ) from None
        return found


def replaces(*targets: str, why: str, drop_when: str) -> Declaration:
    """Something of ours takes the place of `targets`."""
    return Declaration(targets, why, drop_when)


def relies_on(*targets: str, why: str, drop_when: str, texts: tuple[str, ...] = ()) -> Declaration:
    """`targets` are used although they are private, or as they happen to be. texts: words of theirs that are read."""
    return Declaration(targets, why, drop_when)
