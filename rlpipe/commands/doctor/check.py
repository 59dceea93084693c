"""The result of one check."""

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """`WARN`: a run works, but slower or less safely than it could."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """One line of the doctor. `fix` is empty where nothing needs fixing."""

    status: Status
    name: str
    found: str
    fix: str = ""

    def line(self) -> str:
        fix = f"; {self.fix}" if self.fix else ""
        return f"{self.status:<4}  {self.name:<22} {self.found}{fix}"


def ok(name: str, found: str) -> Check:
    return Check(Status.OK, name, found)


def warn(name: str, found: str, fix: str) -> Check:
    return Check(Status.WARN, name, found, fix)


def fail(name: str, found: str, fix: str) -> Check:
    return Check(Status.FAIL, name, found, fix)
