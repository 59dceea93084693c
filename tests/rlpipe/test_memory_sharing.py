"""Who holds what of a shared GPU, step by step, as driver and workers agree on it."""

import pytest

from rlpipe.monitoring.metric_dictionary import SLEEP_WAKE_STEPS
from rlpipe.training.memory_sharing import Colocated

GIGABYTE = 10**9


class Calls:
    """Pool and actor in one: notes calls in order, and has the memory that a test gives it."""

    def __init__(self, free_bytes: int, resident_bytes: int) -> None:
        self.made: list[object] = []
        self._free, self._resident = free_bytes, resident_bytes

    def wait_until_ready(self) -> None:
        self.made.append("ready")

    def sleep(self, parts: tuple[str, ...]) -> float:
        self.made.append(("sleep", *parts))
        return 0.25

    def wake(self, parts: tuple[str, ...]) -> None:
        self.made.append(("wake", *parts))

    def keep_resident(self, wanted: str) -> None:
        self.made.append(wanted)

    def free_device_bytes(self) -> int:
        self.made.append("free?")
        return self._free

    def resident_bytes(self) -> int:
        return self._resident

    def take(self) -> list[object]:
        made, self.made = self.made, []
        return made


def _started(free_gigabytes: float, resident_gigabytes: float) -> tuple[Colocated, Calls]:
    calls = Calls(int(free_gigabytes * GIGABYTE), int(resident_gigabytes * GIGABYTE))
    sharing = Colocated(calls, calls)  # type: ignore[arg-type]
    sharing.start_actor()
    return sharing, calls


def _iteration(sharing: Colocated, calls: Calls) -> list[object]:
    with sharing.during_weight_sync():
        calls.made.append("SYNC")
    calls.made.append("GENERATE")
    sharing.onload_actor()
    return calls.take()


def test_free_memory_is_measured_while_engines_are_warm_and_before_the_actor_starts():
    _, calls = _started(30, 9)
    assert calls.take() == ["ready", "free?", ("sleep", "kv_cache", "weights")]


def test_weights_stay_where_engines_leave_room_for_them():
    sharing, calls = _started(30, 9)
    calls.take()
    wanted = ["weights", ("wake", "weights"), "SYNC", ("wake", "kv_cache"), "GENERATE"]
    for _ in range(2):
        assert _iteration(sharing, calls) == [*wanted, ("sleep", "kv_cache", "weights"), "all"]


@pytest.mark.parametrize("free_gigabytes", [0, 9, 10.9])
def test_weights_go_where_there_is_no_room_or_hardly_any(free_gigabytes):
    sharing, calls = _started(free_gigabytes, 9)
    calls.take()
    wanted = ["weights", ("wake", "weights"), "SYNC", "nothing", ("wake", "kv_cache"), "GENERATE"]
    assert _iteration(sharing, calls) == [*wanted, ("sleep", "kv_cache", "weights"), "all"]


@pytest.mark.parametrize(("free_gigabytes", "after"), [(30, []), (0, ["nothing"])])
def test_a_save_has_the_room_of_the_cache(free_gigabytes, after):
    sharing, calls = _started(free_gigabytes, 9)
    calls.take()
    with sharing.during_save():
        calls.made.append("SAVE")
    assert calls.take() == [("sleep", "kv_cache"), "weights", "SAVE", *after, ("wake", "kv_cache")]


def test_steps_are_timed_and_taken_once():
    sharing, calls = _started(0, 9)
    _iteration(sharing, calls)
    metrics = sharing.take_metrics()
    assert set(metrics) == {f"sleep_wake/{step}_seconds" for step in SLEEP_WAKE_STEPS}
    assert metrics["sleep_wake/engines_idle_seconds"] == 0.25
    assert sharing.take_metrics() == {}
    assert sharing.take_seconds()["sleep_wake"] > 0
    assert sharing.take_seconds() == {"sleep_wake": 0.0}
