"""Would the suite see it? Each planted defect turns its test red; `python tests/planted/score.py` prints by what."""

import ast
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import pytest
from defects import DEFECTS
from gate_defects import GATE_DEFECTS
from planting import PROJECT, Attempt, attempt, raised_elsewhere, run_without, verdict_on
from setting_defects import SEEN

from rlpipe.config.base import Section
from rlpipe.config.root import Config
from rlpipe.shared.errors import ConfigError

_SECTIONS_TO_LEAVE_OUT = {"sampling", "warm_start"}
"""Names of sections that are left out as a whole, too."""


def test_every_defect_fits_the_code_and_names_a_test_that_exists():
    all_of_them = [*DEFECTS, *(defect for _, defect in GATE_DEFECTS)]
    assert len(DEFECTS) >= 40 and len({defect.name for defect in DEFECTS}) == len(DEFECTS)
    for defect in all_of_them:
        assert defect.source.count(defect.old) == 1, f"{defect.name}: adapt it to {defect.file}"
        assert ast.dump(ast.parse(defect.source.replace(defect.old, defect.new))) != ast.dump(ast.parse(defect.source))
        path, _, function = defect.test.partition("::")
        assert not function or f"def {function}(" in (PROJECT / "tests" / path).read_text(), defect.test


def test_every_setting_is_planted_as_ignored():
    assert set(_settings_below(Config)) == SEEN


def _settings_below(section: type[Section]) -> Iterator[tuple[str, str]]:
    """The class and the name of every setting that may be left out, and is no section itself."""
    for name, field in section.model_fields.items():
        sections = list(_sections_in(field.annotation))
        if not field.is_required() and (not sections or name in _SECTIONS_TO_LEAVE_OUT):
            yield next(one.__name__ for one in section.__mro__ if name in one.__annotations__), name
        for below in sections:
            yield from _settings_below(below)


def _sections_in(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections_in(argument)


def test_a_defect_is_seen_by_an_assertion_of_a_test_that_passes_without_it():
    test = "rlpipe/test_strangers_and_secrets.py::test_secrets_in_sentences_are_hidden"
    defect = next(one for one in DEFECTS if one.test == test)
    tried = attempt(defect, run_without(test, "").failed_by)
    seen = verdict_on(tried, "")
    assert seen.seen and seen.reason.startswith("AssertionError: "), seen.reason
    for broken, reason in [
        (replace(tried, fails_without="1 failed"), "its test does not pass without it: 1 failed"),
        (replace(tried, planted=False), "no process imported"),
        (replace(tried, timed_out=True), "its test took longer than"),
        (replace(tried, failure=None), "its test does not see it"),
    ]:
        verdict = verdict_on(broken, "")
        assert not verdict.seen and verdict.reason.startswith(reason)


@pytest.mark.parametrize(
    ("kind", "message", "phase", "other_error", "seen"),
    [
        (AssertionError, "assert 1 == 2", "call", "", True),
        (AssertionError, "assert 1 == 2", "setup", "", True),
        (ConfigError, "a: b", "call", "", True),
        (pytest.fail.Exception, "DID NOT RAISE <class 'ValueError'>", "call", "", True),
        (pytest.fail.Exception, "Timeout (>900.0s) from pytest-timeout.", "call", "", False),
        (RuntimeError, "Traceback\nValueError: x\nTraceback\nAssertionError: 1 != 2\n", "call", "", True),
        (RuntimeError, "Traceback\nModuleNotFoundError: x\n", "call", "", False),
        (ModuleNotFoundError, "No module named 'x'", "call", "", False),
        (KeyError, "x", "setup", "", False),
        (ValueError, "shapes differ", "call", "", False),
        (ValueError, "shapes differ", "call", "ValueError", True),
        (AssertionError, "assert 1 == 2", "collect", "", False),
    ],
)
def test_what_counts_as_sight(kind, message, phase, other_error, seen):
    failure = {"phase": phase, "classes": [one.__name__ for one in kind.__mro__], "message": message}
    verdict = verdict_on(Attempt("", "", True, False, failure, "", 1.0), other_error)
    assert verdict.seen is seen and message.splitlines()[-1] in verdict.reason


def test_what_another_process_raised_is_read_from_what_it_left():
    text = "Process 1 terminated:\n-- Traceback\n  File x\nValueError: a\nTraceback\nAssertionError: 1 != 2\n"
    assert raised_elsewhere(["ProcessRaisedException", "Exception"], text) == "AssertionError"
    assert raised_elsewhere(["RuntimeError"], "E   torch.cuda.OutOfMemoryError: no room") == "OutOfMemoryError"
    assert raised_elsewhere(["ValueError"], text) == ""


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name.replace(" ", "-"))
def test_a_planted_defect_turns_its_test_red(defect):
    """That the test passes without it, the suite that this one is part of tells."""
    verdict = verdict_on(attempt(defect), defect.error)
    assert verdict.seen, f"{defect.test}: {verdict.reason}"
