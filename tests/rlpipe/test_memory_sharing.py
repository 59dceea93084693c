"""Who holds what of a shared GPU, step by step, as driver and workers agree on it."""

import itertools
import math
from types import SimpleNamespace

import pytest

from rlpipe.config.load import load_config
from rlpipe.config.run import RayConfig
from rlpipe.estimate.memory import build_bytes
from rlpipe.monitoring.metric_dictionary import SLEEP_WAKE_STEPS
from rlpipe.shared.project_files import CONFIGS
from rlpipe.training import memory_sharing
from rlpipe.training.memory_sharing import Colocated, open_memory_sharing
from rlpipe.training.trained_share import planned_model

GIGABYTE = 10**9


class Calls:
    """Pool and actor in one: notes calls in order, and has the memory that a test gives it."""

    def __init__(self, free_bytes: int, resident_bytes: int) -> None:
        self.made: list[object] = []
        self._free, self._resident = free_bytes, resident_bytes
        self.room_bytes = math.inf
        self.restarts_allowed = True

    def pause_restarts(self) -> None:
        self.restarts_allowed = False

    def resume_restarts(self) -> None:
        self.restarts_allowed = True

    def pause_requests(self) -> None:
        self.made.append("pause requests")

    def resume_requests(self) -> None:
        self.made.append("resume requests")

    def wait_until_ready(self) -> None:
        self.made.append("ready")

    def room_beside_bytes(self) -> float:
        return self.room_bytes

    def sleep(self, parts: tuple[str, ...]) -> float:
        self.made.append(("sleep", *parts))
        return 0.25

    def wake(self, parts: tuple[str, ...]) -> None:
        self.made.append(("wake", *parts))

    def keep_resident(self, wanted: str, limit_bytes: int | None = None) -> None:
        assert not self.restarts_allowed  # an engine that starts measures what is free
        self.made.append(wanted if limit_bytes is None else (wanted, limit_bytes / GIGABYTE))

    def share_with_engines(self, limit_bytes: int) -> None:
        self.made.append(("share", limit_bytes / GIGABYTE))

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
    sharing.give_device_to_actor()
    return sharing, calls


def _iteration(sharing: Colocated, calls: Calls) -> list[object]:
    with sharing.during_weight_sync():
        calls.made.append("SYNC")
    assert calls.restarts_allowed
    calls.made.append("GENERATE")
    sharing.onload_actor()
    return calls.take()


def test_free_memory_is_measured_while_engines_are_warm_and_before_the_actor_starts():
    _, calls = _started(30, 9)
    assert calls.take() == ["ready", "free?", ("sleep", "kv_cache", "weights")]


@pytest.mark.parametrize(
    ("start", "missing_gigabytes", "beside"),
    [("beside", 0, True), ("beside", 0.1, False), ("after", 0, False)],
)
def test_the_actor_is_built_beside_engines_where_they_leave_room(start, missing_gigabytes, beside, monkeypatch):
    monkeypatch.setattr(memory_sharing, "cluster_gpus", lambda: 1)
    config = load_config(CONFIGS / "recipes/qwen3_0_6b_dapo.yaml", ["ray.colocate=true", f"ray.start={start}"])
    wanted = build_bytes(config, planned_model(config))
    calls = Calls(30, 9)
    calls.room_bytes = wanted - missing_gigabytes * GIGABYTE
    sharing = open_memory_sharing(config, calls, calls)  # type: ignore[arg-type]
    assert sharing.beside is beside
    order, there = "beside" if beside else "after", calls.room_bytes / 1e9
    note = f"the actor is built {order} the engines: it takes up to {wanted / 1e9:.1f} GB, and they leave {there:.1f}"
    assert list(sharing.notes) == ([] if start == "after" else [note])
    assert calls.take() == []  # the engines are waited for by `give_device_to_actor` alone


@pytest.mark.parametrize(
    ("sleep", "on_gpus", "on_cpus"), [("auto", True, False), ("always", True, True), ("never", False, False)]
)
def test_engines_and_actor_sleep_as_is_said_where_they_share_a_device(sleep, on_gpus, on_cpus):
    settings = RayConfig(colocate=True, sleep=sleep)
    assert (settings.shares_memory(gpus=True), settings.shares_memory(gpus=False)) == (on_gpus, on_cpus)
    assert not RayConfig(colocate=False, sleep=sleep).shares_memory(gpus=True)


def test_building_takes_parameters_twice_and_gradients_in_float32():
    config = load_config(CONFIGS / "recipes/qwen3_0_6b_dapo.yaml")
    model = planned_model(config)
    assert config.actor.dtype == "bfloat16" and config.actor.optimizer.cpu_offload_fraction == 1
    tensors = model.parameters * (2 + 2 + 4)
    assert tensors < build_bytes(config, model) < 1.2 * tensors + 10 * GIGABYTE


SLEEP = ("sleep", "kv_cache", "weights")


def test_weights_stay_where_engines_leave_room_for_them():
    sharing, calls = _started(30, 9)
    calls.take()
    wake, onload = [("weights", 24), ("wake", "kv_cache"), "GENERATE"], [SLEEP, "all"]
    first = ["weights", ("wake", "weights"), "SYNC", ("share", 24), *wake, *onload]
    assert _iteration(sharing, calls) == first
    assert _iteration(sharing, calls) == ["weights", ("wake", "weights"), "SYNC", *wake, *onload]


@pytest.mark.parametrize("free_gigabytes", [0, 10, 11])
def test_weights_go_where_there_is_no_room_or_hardly_any(free_gigabytes):
    sharing, calls = _started(free_gigabytes, 9)
    _iteration(sharing, calls)
    calls.take()
    limit = pytest.approx(0.8 * free_gigabytes)
    wake = [("nothing", limit), ("wake", "kv_cache"), "GENERATE"]
    assert _iteration(sharing, calls) == ["weights", ("wake", "weights"), "SYNC", *wake, SLEEP, "all"]


@pytest.mark.parametrize(("free_gigabytes", "kept"), [(30, "weights"), (0, "nothing")])
def test_a_save_has_the_room_of_the_cache(free_gigabytes, kept):
    sharing, calls = _started(free_gigabytes, 9)
    _iteration(sharing, calls)
    with sharing.during_save():
        calls.made.append("SAVE")
    limit = 0.8 * free_gigabytes
    assert calls.take() == [("sleep", "kv_cache"), "weights", "SAVE", (kept, limit), ("wake", "kv_cache")]


def test_engines_answer_nothing_while_one_that_came_back_gets_weights():
    sharing, calls = _started(30, 9)
    _iteration(sharing, calls)
    with sharing.during_catch_up():
        calls.made.append("SYNC")
    inside = [("sleep", "kv_cache"), "weights", "SYNC", ("weights", 24), ("wake", "kv_cache")]
    assert calls.take() == ["pause requests", *inside, "resume requests"]
    assert calls.restarts_allowed


def test_seconds_of_an_iteration_add_up(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(memory_sharing, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    sharing, calls = _started(0, 9)
    _iteration(sharing, calls)
    once, steps_once = sharing.take_seconds(), sharing.take_metrics()
    idle_seconds = steps_once.pop("sleep_wake/engines_idle_seconds")  # engines tell it of their last sleep
    assert once["sleep_wake"] > 4 and set(steps_once.values()) == {1.0, 2.0}  # a tick for each step; some are two
    for _ in range(2):
        _iteration(sharing, calls)
    twice = {name: 2 * seconds for name, seconds in steps_once.items()}
    assert sharing.take_metrics() == twice | {"sleep_wake/engines_idle_seconds": idle_seconds}
    assert sharing.take_seconds() == {"sleep_wake": 2 * once["sleep_wake"]}


def test_steps_are_timed_and_taken_once():
    sharing, calls = _started(0, 9)
    _iteration(sharing, calls)
    metrics = sharing.take_metrics()
    assert set(metrics) == {f"sleep_wake/{step}_seconds" for step in SLEEP_WAKE_STEPS}
    assert metrics["sleep_wake/engines_idle_seconds"] == 0.25
    assert sharing.take_metrics() == {}
    assert sharing.take_seconds()["sleep_wake"] > 0
    assert sharing.take_seconds() == {"sleep_wake": 0.0}
