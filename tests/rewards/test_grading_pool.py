"""The pool grades beside the run, and nothing that a response or a grader does ends the run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rewards.grading_pool import Failures, GradingPool, open_grading
from rlpipe.config.reward import RewardConfig
from tests.search_path import search_path

HERE = Path(__file__).parent
BAD = "misbehaving:"


@pytest.fixture(autouse=True)
def _graders_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


def test_a_burst_is_graded_in_order_and_no_process_is_left() -> None:
    known = set(psutil.Process().children())
    with GradingPool(workers=2) as pool:
        futures = [pool.submit(f"s{i}", "math", rf"\boxed{{{i}}}", "7") for i in range(300)]
        scores = [future.result(timeout=400).score for future in futures]
    assert scores == [float(i == 7) for i in range(300)]
    assert pool.take_failures() == Failures()
    assert set(psutil.Process().children()) <= known  # only own ones: a Ray of tests before starts and ends workers


def test_submit_returns_before_the_worker_is_ready() -> None:
    with GradingPool() as pool:
        future = pool.submit("s", "math", r"\boxed{1}", "1")
        assert not future.done()
        assert future.result(timeout=400).score == 1.0


def test_whatever_goes_wrong_costs_one_sample_and_is_counted() -> None:
    timeouts = ["hang", "hang_holding_the_lock", "sleep_deaf"]
    errors = ["crash", "leave", "eat_memory", "recurse", "raise_what_does_not_pickle", "quit_quietly"]
    with GradingPool(timeout_seconds=1.0, score_on_failure=-0.5) as pool:
        bad = {name: pool.submit(name, BAD + name, "", "") for name in timeouts + errors}
        good = [pool.submit(f"good {i}", BAD + "echo", "x", str(i)) for i in range(3)]
        assert [future.result(timeout=400).score for future in good] == [0.0, 1.0, 2.0]
        rewards = {name: future.result(timeout=400) for name, future in bad.items()}
        failures = pool.take_failures()
        assert pool.take_failures() == Failures()
    assert {reward.score for reward in rewards.values()} == {-0.5}
    assert {reward.correct for reward in rewards.values()} == {None}
    assert failures == Failures(tuple(timeouts), tuple(errors))
    assert "longer than 1 seconds" in rewards["hang"].reason
    assert "SIGSEGV" in rewards["crash"].reason
    assert "exit code 3" in rewards["leave"].reason
    assert "MemoryError" in rewards["eat_memory"].reason
    assert "RecursionError" in rewards["recurse"].reason


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_worker_that_somebody_stops_or_kills_costs_no_sample(number: signal.Signals) -> None:
    known = set(psutil.Process().children())
    with GradingPool(timeout_seconds=2) as pool:
        assert pool.submit("first", "math", r"\boxed{1}", "1").result(timeout=400).score == 1.0
        (worker,) = set(psutil.Process().children()) - known
        worker.send_signal(number)
        assert pool.submit("second", "math", r"\boxed{2}", "2").result(timeout=400).score == 1.0
        assert not worker.is_running()
        assert pool.take_failures() == Failures()


def test_a_worker_that_somebody_kills_while_it_grades_its_first_response_costs_no_sample(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    with GradingPool() as pool:
        future = pool.submit("first", BAD + "slow_once", str(begun), "")
        while not begun.exists():
            time.sleep(0.01)
        os.kill(int(begun.read_text()), signal.SIGKILL)
        assert future.result(timeout=400).score == 1.0
        assert pool.take_failures() == Failures()


@pytest.mark.slow
def test_children_of_a_late_grader_end_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    with GradingPool(timeout_seconds=2.0) as pool:
        pool.submit("s", BAD + "leave_a_child", str(note), "").result(timeout=400)
    assert _is_gone(int(note.read_text()))


def test_a_process_without_our_environment_ends_with_the_grader(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    with GradingPool() as pool:
        assert pool.submit("s", BAD + "leave_a_stray", str(note), "").result(timeout=400).score == 1.0
        stray = psutil.Process(int(note.read_text()))
        assert stray.is_running()
    assert _is_gone(stray.pid)


def test_a_grader_that_can_no_longer_be_loaded_is_tried_in_a_fresh_process() -> None:
    with GradingPool() as pool:
        assert pool.submit("first", BAD + "forget_all_modules", "", "").result(timeout=400).score == 1.0
        assert pool.submit("second", BAD + "echo", "x", "1").result(timeout=400).score == 1.0
        assert pool.take_failures() == Failures()


def test_closing_cancels_what_waits_and_ends_what_hangs() -> None:
    pool = GradingPool(timeout_seconds=1000)
    running = pool.submit("running", BAD + "hang", "", "")
    waiting = [pool.submit(f"w{i}", BAD + "hang", "", "") for i in range(5)]
    while not running.running():
        time.sleep(0.05)
    pool.close()
    pool.close()
    assert running.result().correct is None
    assert all(future.cancelled() for future in waiting)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit("late", "math", "", "")


def test_workers_die_with_a_run_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time; from rewards.grading_pool import GradingPool\n"
        "from rewards.grading_process import WorkerProcess\n"
        "pool = GradingPool(timeout_seconds=1000); pool.submit('s', 'math', r'\\boxed{1}', '1').result()\n"
        "pool.submit('s', 'misbehaving:hang', '', ''); import psutil\n"
        "print(*(child.pid for child in psutil.Process().children()), flush=True); time.sleep(1000)"
    )
    environment = {**os.environ, "PYTHONPATH": search_path(HERE)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment) as run:
        assert run.stdout is not None
        workers = [int(pid) for pid in run.stdout.readline().split()]
        run.kill()
    assert workers
    assert all(_is_gone(pid) for pid in workers)


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{" + "{" * 100_000 + "}" * 100_000 + "}",
        r"\boxed{" * 100_000,
        r"\boxed{" * 100_000 + "}" * 100_000,
        "\\frac{" * 50_000,
        r"\boxed{" + "(" * 900 + "1" + ")" * 900 + "}",
        r"\boxed{\frac{1}{" * 60 + "2" + "}}" * 60,
        "x" * 10_000_000,
        "#### " + " " * 10_000_000,
        "####" + "," * 1_000_000,
        "answer" + "\n" * 1_000_000,
        "$" * 1_000_000,
        r"\boxed" + " " * 1_000_000,
        r"\boxed{" + "9" * 1_000_000 + "}",
        "".join(map(chr, range(0x20))) * 1000 + r"\boxed{" + "".join(map(chr, range(0x20))) + "}",
        "\ud800\udfff \u202e\u0000 \U0001f600" * 10_000 + "\\boxed{\ud800}",
        "\\boxed{\u0663}",
        "\\boxed{\U0001d7d9}",
    ],
    ids=range(17),
)
def test_hostile_text_is_refused_quickly(response: str, hostile_pool: GradingPool) -> None:
    for grader in ("math", "gsm8k", "dapo", "deepscaler"):
        reward = hostile_pool.submit("hostile", grader, response, "42").result(timeout=400)
        assert reward.correct is False, reward
    assert hostile_pool.submit("choice", "multiple_choice", response, "E").result(timeout=400).correct is not True
    assert hostile_pool.take_failures() == Failures()


@pytest.fixture(scope="module")
def hostile_pool() -> GradingPool:
    with GradingPool(timeout_seconds=20.0) as pool:
        yield pool


@pytest.mark.slow
def test_hostile_mathematics_costs_at_most_the_limit() -> None:
    answers = ["10^{10^{10^{10}}}+x", r"\frac{10^{10^{9}}!}{x}", r"\int_0^1 x^{x^{x}}dx"]
    with GradingPool(timeout_seconds=1.0, memory_bytes=2**31) as pool:
        hostile = [pool.submit(answer, "math", rf"\boxed{{{answer}}}", "x+3") for answer in answers]
        after = pool.submit("after", "math", r"\boxed{1}", "1")
        assert after.result(timeout=400).correct is True
        assert all(future.result().correct is not True for future in hostile)


def test_a_pool_is_opened_as_the_reward_section_says(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: dict[str, object] = {}
    monkeypatch.setattr("rewards.grading_pool.GradingPool", lambda **given: opened.update(given))
    limits = {"workers": 3, "timeout_seconds": 4.0, "memory_bytes": 2**31, "remote_connections": 5}
    failure = {"score_on_failure": -1.0}
    settings = RewardConfig.model_validate(limits | failure | {"environment": ["MINE_*"], "options": {"token": "x"}})
    open_grading(settings)
    assert opened.items() >= (limits | failure).items()
    assert opened["environment"] == ["MINE_*"]


def test_facts_reach_the_graders_that_name_them() -> None:
    with GradingPool() as pool:
        reward = pool.submit("s", BAD + "echo", "abc", "1", facts={"response_tokens": 9, "prompt": "p"}).result()
    assert reward.reason == "3 characters, 9 tokens"


def _is_gone(pid: int, patience_seconds: float = 30.0) -> bool:
    end = time.monotonic() + patience_seconds
    while time.monotonic() < end:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_of_a_grader_that_fails_again_and_again_five_reasons_are_told_and_a_number(caplog) -> None:
    with GradingPool(workers=2) as pool:
        bad = [pool.submit(f"s{number}", BAD + "raise_what_does_not_pickle", "", "") for number in range(8)]
        rewards = [future.result(timeout=400) for future in bad]
        other = pool.submit("other", BAD + "crash", "", "").result(timeout=400)
        assert len(pool.take_failures().errors) == 9
        told = [record.getMessage() for record in caplog.records]
        assert pool.submit("later", BAD + "crash", "", "").result(timeout=400).failed
    assert all(reward.failed for reward in [*rewards, other])
    assert sum("raise_what_does_not_pickle: the grader failed" in line for line in told) == 5
    assert told[-1] == f"grader {BAD}raise_what_does_not_pickle: 3 responses more could not be graded"
    assert sum(f"grader {BAD}crash" in record.getMessage() for record in caplog.records) == 2
