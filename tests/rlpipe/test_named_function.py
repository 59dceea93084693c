"""Functions named by a configuration: whatever the named module does, the answer is a sentence."""

import io
from collections.abc import Sequence

import psutil
import pytest

from rlpipe.shared.errors import ConfigError
from rlpipe.shared.named_function import call_problem, named_function, type_problem

_MODULES = {
    "raises": "1 / 0",
    "leaves": "raise SystemExit(3)",
    "malformed": "def f(:",
    "interrupts": "raise KeyboardInterrupt('now')",
    "ends": "import os, threading\nthreading.Thread(target=threading.Event().wait).start()\nos._exit(0)",
    "dies": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "odd": "class Odd(BaseException):\n    def __str__(self): return 1 / 0\nraise Odd",
    "hangs": "import threading\nprint('x' * 10**6)\nthreading.Event().wait()",
}


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
        ("interrupts:f", "importing 'interrupts' failed with KeyboardInterrupt: now"),
        (
            "ends:f",
            "importing 'ends' ended the process that imported it (exit code 0); move what",
        ),
        ("dies:f", "importing 'dies' ended the process that imported it (SIGKILL)"),
        ("odd:f", "importing 'odd' failed with Odd: no message"),
        ("hangs:f", "importing 'hangs' takes longer than 1 seconds, at line 3 of {folder}/hangs.py; move"),
        ("malformed:f", "importing 'malformed' failed with SyntaxError at line 1"),
        ("math:nothing", "module 'math' has no 'nothing'"),
        ("math:pi", "is a float, not a function"),
    ],
)
def test_a_wrong_path_is_one_sentence(tmp_path, monkeypatch, path, expected):
    for name, text in _MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr("rlpipe.shared.import_trial.LIMIT_SECONDS", 1.0 if path == "hangs:f" else 120.0)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as error:
        named_function(path, {}, "grader")
    assert expected.format(folder=tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_module_that_takes_its_time_is_told_of_and_imported(tmp_path, monkeypatch, capsys):
    (tmp_path / "patient.py").write_text(
        "import os, sys, time\nend = time.monotonic() + 100\n"
        f"while not os.path.exists({str(tmp_path / 'told')!r}) and time.monotonic() < end: time.sleep(0.01)\n"
        "def f(): pass\n"
    )
    monkeypatch.setattr("rlpipe.shared.import_trial.PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr("sys.stderr", told := _Told(tmp_path / "told"))
    monkeypatch.syspath_prepend(tmp_path)
    assert callable(named_function("patient:f", {}, "grader"))
    words = "grader 'patient:f': importing 'patient' takes longer than 0.05 seconds; after 120 it is given up\n"
    assert told.getvalue() == words


class _Told(io.StringIO):
    """Makes a file when something was written into it."""

    def __init__(self, path):
        super().__init__()
        self._path = path

    def write(self, text):
        self._path.touch()
        return super().write(text)


def test_what_a_module_starts_ends_with_its_trial(tmp_path, monkeypatch):
    (tmp_path / "starter.py").write_text(
        f"import os, subprocess\npid = subprocess.Popen(['sleep', '1000']).pid\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(pid))\nos._exit(0)"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError):
        named_function("starter:f", {}, "grader")
    pid = int((tmp_path / "pid").read_text())
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=60)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_types_of_options_are_those_of_the_annotations():
    def function(response: str, wall_seconds: float = 1.0, names: Sequence[str] = (), count: int = 1) -> None:
        """Nothing."""

    assert type_problem(function, {"wall_seconds": 3, "names": ["a"], "other": object()}) is None
    assert type_problem(function, {"wall_seconds": "6"}) == "wall_seconds: input should be a valid number, got '6'"
    assert "names: input should be a valid" in type_problem(function, {"names": "abc"})
    assert "count: input should be a valid integer, got True" in type_problem(function, {"count": True})


def test_what_cannot_be_called_so_is_said():
    assert call_problem(len, ()) is None
    assert "missing" in call_problem(lambda one, two: None, 1)
    assert "no signature" in call_problem(max, 1, 2)
