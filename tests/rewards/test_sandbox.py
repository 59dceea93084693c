"""What a program in the sandbox can do, and above all what it cannot."""

import json
import shutil
import socketserver
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from left_processes import adopted_orphans, running_descendants

import rewards
from rewards.code import last_code_block
from rewards.grading_pool import GradingPool
from rewards.sandbox.program import Limits, Outcome, Program, _launch, namespaces_work, run_python
from rlpipe.shared.errors import ConfigError, ResourceError

needs_namespaces = pytest.mark.skipif(not namespaces_work(), reason="this machine permits no namespaces")
pytestmark = needs_namespaces


@pytest.fixture(autouse=True)
def _orphans_stay_here() -> Iterator[None]:
    with adopted_orphans():
        yield


def run(source: str, wall_seconds: float = 20.0, **limits: int) -> Outcome:
    return run_python(Program(source), Limits(wall_seconds=wall_seconds, **limits))


def test_a_program_runs_with_its_input_and_files() -> None:
    source = "import sys; print(sys.stdin.read() + open('data.txt').read()); sys.exit(3)"
    outcome = run_python(Program(source, stdin="given ", files={"data.txt": "content"}), Limits(wall_seconds=20))
    assert (outcome.exit_code, outcome.stdout) == (3, "given content\n")


def test_it_sees_no_secrets_and_no_files_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    (tmp_path / "secret").write_text("hidden")
    outcome = run(
        f"import os; print(dict(os.environ)); print(os.path.exists({str(tmp_path)!r}), os.path.exists('/etc/passwd'),"
        f" os.path.exists({__file__!r}), os.path.exists('/proc/1'))"
    )
    assert "hidden" not in outcome.stdout
    assert outcome.stdout.endswith("False False False False\n")


def test_it_writes_nowhere_but_in_its_folder() -> None:
    outcome = run(
        "import os, sys\n"
        "for place in ('/', '/usr', sys.prefix, os.path.dirname(os.__file__)):\n"
        "    try: open(os.path.join(place, 'x'), 'w'); print('wrote', place)\n"
        "    except OSError: pass\n"
        "open('here', 'w').write('fine'); print(open('here').read())"
    )
    assert outcome.stdout == "fine\n"


def test_no_network_not_even_loopback() -> None:
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        outcome = run(f"import socket; socket.create_connection(('127.0.0.1', {port})); print('connected')")
        server.shutdown()
    assert outcome.exit_code == 1
    assert "PermissionError" in outcome.stderr


@pytest.mark.parametrize(
    "source", ["while True: pass", "import time; time.sleep(1000)", "import os; os.read(os.pipe()[0], 1)"]
)
def test_time_is_limited(source: str) -> None:
    assert run(source, wall_seconds=1.0).timed_out


def test_memory_is_limited() -> None:
    outcome = run("x = bytearray(2**30)", memory_bytes=2**28)
    assert outcome.exit_code == 1
    assert "MemoryError" in outcome.stderr


def test_a_program_is_seen_from_here_while_it_runs() -> None:
    """What the tests below find nothing with."""
    program = threading.Thread(target=run, args=("import time; time.sleep(2)",))
    program.start()
    seen = False
    while program.is_alive():
        seen = seen or bool(_processes())
    assert seen and not _processes()


@pytest.mark.slow
def test_a_fork_bomb_stays_small_and_leaves_nothing() -> None:
    before = _processes()
    outcome = run(
        "import os, time\nmost = 0\nwhile True:\n"
        "    try:\n        if os.fork() == 0:\n            os.setsid(); time.sleep(1000)\n        most += 1\n"
        "    except OSError:\n        print(most, flush=True); time.sleep(1000)\n",
        wall_seconds=3.0,
        processes=16,
    )
    assert outcome.timed_out
    assert 1 <= int(outcome.stdout) <= 16
    assert _processes() <= before


@pytest.mark.slow
def test_a_classic_fork_bomb_ends() -> None:
    before = _processes()
    run("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n", wall_seconds=2.0)
    assert _processes() <= before


def test_files_and_output_are_limited() -> None:
    outcome = run("open('big', 'wb').write(bytes(10**8))", file_bytes=10**6)
    assert "File too large" in outcome.stderr
    many = run(
        "import os\ntry:\n    for i in range(100): open(f'f{i}', 'wb').write(bytes(10**6))\n"
        "except OSError as error:\n    os.remove('f0'); print(error.strerror)",
        work_bytes=10**7,
    )
    assert many.stdout == "No space left on device\n"
    assert len(run("print('x' * 10**7)").stdout) == Limits().output_bytes


def test_it_can_neither_trace_nor_make_namespaces() -> None:
    outcome = run(
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.unshare(0x10000000), libc.ptrace(16, os.getppid(), 0, 0), libc.mount(b'x', b'/', b'tmpfs', 0, 0))\n"
        "print(os.getuid() != 0 or os.geteuid() != 0)"
    )
    assert outcome.stdout == "-1 -1 -1\nTrue\n"


def test_a_sandbox_that_cannot_be_built_is_an_error_and_not_a_failed_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewards.sandbox.program.sys.executable", "/nowhere/python")
    with pytest.raises((ResourceError, FileNotFoundError)):
        _launch(Program("print(1)"), Limits(), namespaces=True)


@pytest.fixture
def _without_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container without rights. The system's Python, because the program's own user must be able to read it."""
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if python is None:
        pytest.skip("no system Python")
    monkeypatch.setattr("rewards.sandbox.program.namespaces_work", lambda: False)
    monkeypatch.setattr("rewards.sandbox.program.sys.executable", python)


@pytest.mark.usefixtures("_without_namespaces")
def test_without_namespaces_it_runs_only_when_that_is_accepted() -> None:
    with pytest.raises(ResourceError, match="best_effort"):
        run("print(1)")

    def best_effort(source: str, wall_seconds: float = 20.0) -> Outcome:
        return run_python(Program(source), Limits(wall_seconds=wall_seconds), "best_effort")

    folder = best_effort("import os; print(os.getcwd())").stdout.strip()
    assert folder
    assert not Path(folder).exists()
    assert "PermissionError" in best_effort("import socket; socket.socket()").stderr
    assert "PermissionError" in best_effort("import os; os.kill(os.getppid(), 9)").stderr
    assert "MemoryError" in best_effort("x = bytearray(2**31)").stderr
    before = _processes()
    assert best_effort("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n", 2.0).timed_out
    assert _processes() <= before


ADD = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        (ADD, "assert add(1, 2) == 3", 1.0),
        (ADD, "assert add(1, 2) == 4", 0.0),
        (ADD, json.dumps(["assert add(1, 2) == 3", "assert add(1, 2) == 4"]), 0.0),
        ("```python\nprint(int(input()) * 2)\n```", json.dumps({"inputs": ["2", "3"], "outputs": ["4", "6\n"]}), 1.0),
        ("```python\nprint(int(input()) * 2)\n```", json.dumps({"inputs": ["2", "3"], "outputs": ["4", "7"]}), 0.0),
        ("```python\nexit(0)\n```", "assert False", 0.0),
        ("```python\nimport os; os._exit(0)\n```", "assert False", 0.0),
        ("```python\ndef add(:\n```", "assert add(1, 2) == 3", 0.0),
        ("no code", "assert True", 0.0),
        ("```\nold = 1\n```\nbetter:\n```py\nnew = 2\n```", "assert new == 2", 1.0),
        ("```python\nopen = 1", "assert open == 1", 1.0),
    ],
)
def test_code(response: str, label: str, score: float) -> None:
    reward = rewards.grade("code", response, label, wall_seconds=20.0)
    assert (reward.score, reward.correct) == (score, score == 1.0), reward.reason


@pytest.mark.parametrize("failing", [1, 2])
def test_code_gives_the_share_of_passed_tests(failing: int) -> None:
    tests = ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]
    tests[failing - 1] = "assert add(1, 2) == 4"
    reward = rewards.grade("code", ADD, json.dumps(tests), score="share", wall_seconds=20.0)
    assert (reward.score, reward.correct) == (0.5, False)
    assert reward.components == {"format": 1.0}
    assert f"1 of 2 tests passed; test {failing} failed: AssertionError" in reward.reason


@pytest.mark.slow
def test_a_program_ends_with_the_grading_that_started_it() -> None:
    before = _processes()
    loop = "```python\nimport os\nos.fork(); os.setsid()\nwhile True: pass\n```"
    with GradingPool(timeout_seconds=3.0) as pool:
        late = pool.submit("s", "code", loop, "assert True", {"wall_seconds": 1000.0})
        assert "longer than 3 seconds" in late.result().reason
    end = time.monotonic() + 20
    while _processes() - before and time.monotonic() < end:
        time.sleep(0.05)
    assert _processes() <= before


def test_last_code_block() -> None:
    assert last_code_block("```python\na\n```\n```\nb\n```") == "b"
    assert last_code_block("none") is None


def test_start_refuses_a_machine_without_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewards.code.namespaces_work", lambda: False)
    with pytest.raises(ConfigError, match="best_effort"):
        rewards.check_grader("code", {})
    rewards.check_grader("code", {"isolation": "best_effort"})


def _processes() -> set[int]:
    """Those of programs in a sandbox."""
    return running_descendants("main.py", "-I")
