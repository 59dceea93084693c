"""Functions named by a configuration: whatever the named module does, the answer is a sentence."""

import io
import sys

import pytest

from rlpipe.shared.errors import ConfigError
from rlpipe.shared.named_function import call_problem, named_function


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (":f", "':f' is not of the form package.module:function"),
        (".g:f", "'.g:f' is not of the form package.module:function"),
        ("g.:f", "is not of the form"),
        ("g:", "'g:' is not of the form"),
        ("g:a.b", "is not of the form"),
        ("a b:f", "is not of the form"),
        ("no_such_module:f", "cannot import 'no_such_module'"),
        ("raises:f", "importing 'raises' failed with ZeroDivisionError: division by zero"),
        ("leaves:f", "importing 'leaves' failed with SystemExit: 3"),
        ("malformed:f", "importing 'malformed' failed with SyntaxError at line 1"),
        ("math:nothing", "module 'math' has no 'nothing'"),
        ("math:pi", "is a float, not a function"),
    ],
)
def test_a_wrong_path_is_one_sentence(tmp_path, monkeypatch, path, expected):
    for name, text in {"raises": "1 / 0", "leaves": "raise SystemExit(3)", "malformed": "def f(:"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as error:
        named_function(path, {}, "grader")
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_a_module_that_takes_its_time_is_told_of(tmp_path, monkeypatch):
    (tmp_path / "patient.py").write_text(
        "import sys, time\nend = time.monotonic() + 100\n"
        "while not sys.stderr.getvalue() and time.monotonic() < end: time.sleep(0.01)\ndef f(): pass\n"
    )
    monkeypatch.setattr("rlpipe.shared.named_function.PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr("sys.stderr", io.StringIO())
    monkeypatch.syspath_prepend(tmp_path)
    named_function("patient:f", {}, "grader")
    words = "grader 'patient:f': importing 'patient' takes longer than 0.05 seconds; Ctrl-C ends it\n"
    assert sys.stderr.getvalue() == words


def test_what_cannot_be_called_so_is_said():
    assert call_problem(len, ()) is None
    assert "missing" in call_problem(lambda one, two: None, 1)
    assert "no signature" in call_problem(max, 1, 2)
