"""Plugin of pytest that writes how each test ended into the file that RLPIPE_REPORTS names, a JSON line for each phase:
the test, the phase, the outcome, and what was raised, with the names of its classes."""

import json
import os
from pathlib import Path

import pytest

_CHARACTERS = 4000
_FILE = Path(os.environ["RLPIPE_REPORTS"])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    row = {"test": item.nodeid, "phase": report.when, "outcome": report.outcome}
    if report.failed and call.excinfo is not None:
        row["classes"] = [kind.__name__ for kind in call.excinfo.type.__mro__]
        row["message"] = str(call.excinfo.value)[-_CHARACTERS:]
        row["captured"] = f"{report.capstdout}\n{report.capstderr}\n{report.longreprtext}"[-_CHARACTERS:]
    _write(row)
    return report


@pytest.hookimpl
def pytest_collectreport(report):
    if report.failed:
        _write({"test": report.nodeid, "phase": "collect", "outcome": "failed", "message": str(report.longrepr)[-500:]})


def _write(row):
    with _FILE.open("a") as file:
        file.write(json.dumps(row) + "\n")
