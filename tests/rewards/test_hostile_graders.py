"""Graders that attack the pool they run in: each costs at most its own sample, within the limit, and is counted."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import misbehaving
import pytest
from left_processes import adopted_orphans, running_descendants

from rewards.grading_pool import Failures, GradingPool, open_grading
from rlpipe.config.reward import RewardConfig
from rlpipe.shared.sample import Reward
from tests.slow_cases import slow

BAD = "misbehaving:"
LIMIT_SECONDS = 1.5
_WORKER = "rewards.grading_worker"


@pytest.fixture(autouse=True)
def _graders_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def pool() -> Iterator[GradingPool]:
    with GradingPool(timeout_seconds=LIMIT_SECONDS, score_on_failure=-1.0) as pool:
        yield pool


def _echoes(pool: GradingPool, number: int = 3) -> list[float]:
    futures = [pool.submit(f"after {i}", BAD + "echo", "", str(i)) for i in range(number)]
    return [future.result(timeout=100).score for future in futures]


def _grade(pool: GradingPool, name: str, response: str = "", label: str = "") -> Reward:
    return pool.submit(name, BAD + name, response, label).result(timeout=100)


def test_a_grader_that_forks_does_not_shift_the_answers_after_it(pool: GradingPool) -> None:
    futures = [pool.submit(f"s{i}", BAD + "fork_and_return", "", str(i)) for i in range(5)]
    assert [future.result(timeout=100).score for future in futures] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert _echoes(pool) == [0.0, 1.0, 2.0]
    assert pool.take_failures() == Failures()


@pytest.mark.parametrize(
    "written",
    [
        "x",
        "\x7f\xff\xff\xff",
        "\x00\x00\x00\x02{}",
        *slow(["\x00\x00\x00\x05short", "\x00\x00\x00\x02[]", "\x00\x10\x00\x00half"]),
    ],
)
def test_what_a_grader_writes_into_its_descriptors_costs_its_sample_at_most(pool: GradingPool, written: str) -> None:
    assert _echoes(pool) == [0.0, 1.0, 2.0]  # also in a process that has been used
    begin = time.monotonic()
    assert _grade(pool, "write_to_every_descriptor", written).score in (1.0, -1.0)
    assert time.monotonic() - begin < 2 * LIMIT_SECONDS + 20
    assert _echoes(pool) == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("where", ["connection", *slow(["output"])])
def test_floods_meet_the_limit(pool: GradingPool, where: str) -> None:
    begin = time.monotonic()
    assert _grade(pool, "flood", label=where).score == -1.0
    assert time.monotonic() - begin < LIMIT_SECONDS + 20
    assert _echoes(pool) == [0.0, 1.0, 2.0]


def test_ten_megabytes_on_standard_output_pass(pool: GradingPool, capfd: pytest.CaptureFixture[str]) -> None:
    assert _grade(pool, "flood_output_and_answer").score == 1.0
    assert len(capfd.readouterr().out) < 10_000


@pytest.mark.parametrize("name", ["close_everything", "odd_reward", *slow(["stop_itself", "giant_components"])])
def test_what_cannot_be_answered_is_counted(pool: GradingPool, name: str) -> None:
    assert _grade(pool, name).score == -1.0
    failures = pool.take_failures()
    assert failures.timeouts + failures.errors == (name,)
    assert _echoes(pool) == [0.0, 1.0, 2.0]


def test_a_giant_reason_is_cut(pool: GradingPool) -> None:
    reward = _grade(pool, "giant_reason")
    assert reward.score == 1.0
    assert len(reward.reason) < 10**6


def test_an_exception_without_text_is_told(pool: GradingPool) -> None:
    assert "Silent" in _grade(pool, "raise_without_text").reason


@pytest.mark.parametrize("name", ["leave_a_thread_that_kills", *slow(["leave_an_alarm"])])
def test_what_a_grader_leaves_in_its_process_does_not_cost_the_next_sample(name: str) -> None:
    with GradingPool(timeout_seconds=60, score_on_failure=-1.0) as pool:
        assert _grade(pool, name, "0.3").score == 1.0
        after = pool.submit("after", BAD + "slow_echo", "0.8", "7")
        assert after.result(timeout=100).score == 7.0
        assert pool.take_failures() == Failures()


@pytest.mark.parametrize("name", ["hooks_at_exit", *slow(["leak_descriptors", "change_folder"])])
def test_a_worn_process_is_replaced(pool: GradingPool, name: str) -> None:
    for _ in range(8):
        assert _grade(pool, name).score == 1.0
    assert _grade(pool, "folder").reason == os.getcwd()
    assert pool.take_failures() == Failures()


@pytest.mark.slow
def test_what_a_grader_changes_in_its_process_does_not_reach_the_next_sample(tmp_path: Path) -> None:
    """Of the grader that did it, the answer may be lost."""
    labels = {"no more memory": str(2**30), "another folder that is gone": str(tmp_path / "gone")}
    with GradingPool(timeout_seconds=60.0, score_on_failure=-1.0) as pool:
        for what in misbehaving.LEFT_BEHIND:
            assert _grade(pool, "leave_behind", what, labels.get(what, "")).score in (1.0, -1.0)
            reward = _grade(pool, "use_everything", what)
            assert reward.score == 1.0, (what, reward.reason)
        failures = pool.take_failures()
    assert {*failures.timeouts, *failures.errors} <= {"leave_behind"}


def test_odd_answers_and_exceptions_are_counted_and_cost_no_other_sample(pool: GradingPool) -> None:
    kinds = [("answer_oddly", kind) for kind in misbehaving.ODD_ANSWERS]
    kinds += [("raise_oddly", kind) for kind in misbehaving.RAISED]
    futures = [pool.submit(f"{name} {kind}", BAD + name, kind, "") for name, kind in kinds]
    scores = {kind: future.result(timeout=100).score for (_, kind), future in zip(kinds, futures, strict=True)}
    assert scores == dict.fromkeys(scores, -1.0) | {"half a character": 1.0}
    assert len(pool.take_failures().errors) == len(kinds) - 1
    assert _echoes(pool) == [0.0, 1.0, 2.0]


@pytest.mark.slow
def test_processes_that_leave_the_session_end_with_the_grader() -> None:
    before = running_descendants(_WORKER)
    with adopted_orphans():
        with GradingPool(timeout_seconds=LIMIT_SECONDS, score_on_failure=-1.0) as pool:
            assert _grade(pool, "fork_bomb", "40").score == -1.0
        assert running_descendants(_WORKER) <= before


def test_a_grader_cannot_end_or_stop_the_run(tmp_path: Path) -> None:
    """In a process of its own, because a failure would end pytest."""
    program = (
        "import os; from rewards.grading_pool import GradingPool\n"
        "with GradingPool(timeout_seconds=5.0) as pool:\n"
        "    ways = ['child', 'group', 'handle', 'stop', 'limit', 'trace']\n"
        "    answers = [pool.submit(w, 'misbehaving:kill_the_run', w, str(os.getpid())).result() for w in ways]\n"
        "    print(*(answer.score for answer in answers), pool.submit('s', 'misbehaving:echo', '', '7').result().score)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, process_group=0
    )
    assert run.stdout.split() == ["1.0", "0.0", "0.0", "0.0", "0.0", "0.0", "7.0"], run.stderr


def test_a_machine_that_starts_no_process_is_told_and_not_waited_for(tmp_path: Path) -> None:
    """In a process of its own, which has no descriptor left."""
    program = (
        "import os, resource\nimport rewards.grading_pool as pools\n"
        "from rlpipe.shared.errors import ResourceError\n"
        "pools._START_PAUSE_SECONDS = 0.01\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')), 9999))\n"
        "with pools.GradingPool(timeout_seconds=5.0) as pool:\n"
        "    error = pool.submit('s', 'misbehaving:echo', '', '7').exception(timeout=60)\n"
        "    print(type(error).__name__, error)\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (9999, 9999))\n"
        "    print([pool.submit('s', 'misbehaving:echo', '', '7').exception(timeout=60) for _ in range(2)][-1])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=100)
    told, after = run.stdout.splitlines()
    assert told.startswith("ResourceError a grading process cannot be started (Too many open files)"), run.stderr
    assert after == "None"


def test_an_answer_runs_no_code_where_it_is_read(pool: GradingPool, tmp_path: Path) -> None:
    _grade(pool, "pickle_bomb", str(tmp_path / "exploded"))
    assert _echoes(pool) == [0.0, 1.0, 2.0]
    assert not (tmp_path / "exploded").exists()


def test_a_stopped_process_does_not_hold_up_a_large_request(pool: GradingPool) -> None:
    """More than a socket takes, to a process that stopped after its answer."""
    assert _grade(pool, "stop_soon").score == 1.0
    begin = time.monotonic()
    assert pool.submit("large", BAD + "echo", "x" * 10**7, "1").result(timeout=100).score in (1.0, -1.0)
    assert time.monotonic() - begin < 2 * LIMIT_SECONDS + 20


def test_graders_see_only_the_allowed_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hidden-one")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden-two")
    monkeypatch.setenv("SERVICE_TOKEN", "hidden-three")
    monkeypatch.setenv("MY_GRADER_MODE", "strict")
    with open_grading(RewardConfig()) as pool:
        assert "hidden" not in _grade(pool, "environment").reason
        assert "strict" not in _grade(pool, "environment").reason
    allowed = RewardConfig(
        environment=["PATH", "MY_GRADER_*"],
        options={"parts": [{"name": "remote", "options": {"url": "http://x", "token_variable": "SERVICE_TOKEN"}}]},
    )
    with open_grading(allowed) as pool:
        seen = _grade(pool, "environment").reason
    assert "strict" in seen and "SERVICE_TOKEN" in seen  # the part of a `weighted` grader asks its service there
    assert "hidden-" not in seen and "WANDB_API_KEY" not in seen
