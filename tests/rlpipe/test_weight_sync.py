"""What the driver asks of actor and engines in an update of weights, and what it makes of their answers."""

import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from actor.train_report import WeightSendReport
from rlpipe.config.load import load_config
from rlpipe.shared.errors import ActorLostError, EngineFailure, WeightSyncError
from rlpipe.shared.guarded_port import Endpoint
from rlpipe.shared.project_files import CONFIGS
from rlpipe.shared.weights import TensorSpec, WeightBucket, WeightGroup
from rlpipe.training import weight_sync
from rlpipe.training.memory_sharing import Separate
from rlpipe.training.weight_sync import WeightSync
from rollout.requests import WeightReceipt

MODEL = WeightBucket((TensorSpec("model.weight", "float32", (1000,)),))
FACTOR = WeightBucket((TensorSpec("model.lora_A.weight", "float32", (10,)),))
PLANS = {"merged": [MODEL], "model_and_adapters": [MODEL, FACTOR], "adapters": [FACTOR]}
SUMS = {MODEL: "aa", FACTOR: "bb"}


@dataclass(eq=False)
class Engine:
    index: int
    setup: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(adapter="room for adapters"))
    changes: bool = False
    """The last bucket arrives as other bytes."""
    is_lost: bool = False


class Sides:
    """Actor and pool in one: notes what is sent to which engines, which answer at once."""

    def __init__(self) -> None:
        self.engines = [Engine(0), Engine(1)]
        self.sent: list[tuple[str, list[int]]] = []
        self.served: list[list[int]] = []
        self.groups: list[list[int] | str] = []
        self.lost_next: Engine | None = None
        self.awaiting: list[Engine] = []
        self.join_answers: dict[Engine, WeightSyncError] = {}
        self.join_failure = ""
        self.actor_is_lost = False
        self.noted: list[int] = []
        """How often weights had been sent whenever the pool was told that they are going to be."""
        self.weights = self

    def lose(self, engine: Engine) -> EngineFailure:
        engine.is_lost = True
        return EngineFailure(f"engine {engine.index} ended")

    def up(self) -> list[Engine]:
        return [engine for engine in self.engines if not engine.is_lost]

    def weight_plans(self):
        return PLANS

    def awaiting_weights(self) -> list[Engine]:
        return self.awaiting

    def note_sent_weights(self) -> None:
        self.noted.append(len(self.sent))

    def leave(self) -> None:
        self.groups.append("left")

    def listen_for_engines(self):
        return [f"address {engine.index}" for engine in self.engines]

    def join(self, groups, engines):
        self.groups.append([engine.index for engine in engines])
        return SimpleNamespace(
            engines=engines, references=list(engines), answers=dict.fromkeys(engines) | self.join_answers
        )

    def begin_join_weight_groups(self, groups, joining):
        assert [engine.index for engine in joining] == self.groups[-1]  # calls that may fail while it waits
        return SimpleNamespace(result=lambda: self.join_failure)

    def check_alive(self, phase):
        if self.actor_is_lost:
            raise ActorLostError(phase)

    def start_receiving(self, plan, version, in_flight):
        answers = {}
        for engine in self.up():
            sums = [SUMS[bucket] for bucket in plan]
            sums[-1] = "changed" if engine.changes else sums[-1]
            answers[engine] = WeightReceipt(engine.index, version, 0.1, tuple(sums))
        return SimpleNamespace(engines=self.up(), references=[], answers=answers)

    def begin_send_weights(self, verify, references, content):
        self.sent.append((content, [engine.index for engine in self.up()]))
        sums = tuple(SUMS[bucket] for bucket in PLANS[content])
        return SimpleNamespace(result=lambda: WeightSendReport(4000, 0.5, sums))

    def collect(self, calls, seconds, phase, in_vain):
        if phase == "weight_sync" and self.lost_next is not None:
            lost, self.lost_next = self.lost_next, None
            return calls.answers | {lost: self.lose(lost)}
        return calls.answers

    def serve(self, engines) -> None:
        self.served.append([engine.index for engine in engines])


def _opened(sides: Sides, adapters: str = "alone", *more: str) -> WeightSync:
    settings = ["ray.colocate=true", "weight_sync.verify=true", f"weight_sync.adapters={adapters}", *more]
    return WeightSync(load_config(CONFIGS / "demo/arithmetic.yaml", settings), sides, sides, Separate())  # type: ignore[arg-type]


def test_bytes_that_changed_on_their_way_end_the_update_before_any_engine_serves():
    sides = Sides()
    sync = _opened(sides)
    sides.engines[1].changes = True
    with pytest.raises(WeightSyncError, match=r"engine 1 received .* in 1 of 2 buckets, the first is bucket 1"):
        sync.push(0)
    assert (sync.version, sides.served) == (-1, [])
    sides.engines[1].changes = False
    sync.push(0)
    assert (sync.version, sides.served) == (0, [[0, 1]])


def test_an_engine_gets_the_model_once_and_then_adapters_alone():
    sides = Sides()
    sync = _opened(sides)
    sizes = [sync.push(version)["weight_sync/bytes"] for version in range(3)]
    assert [content for content, _ in sides.sent] == ["model_and_adapters", "adapters", "adapters"]
    assert sizes == [float(MODEL.size_bytes + FACTOR.size_bytes), *[float(FACTOR.size_bytes)] * 2]
    sides.engines[1] = Engine(1)  # another one in its place has nothing yet
    for version in (3, 4):
        sync.push(version)
    assert [content for content, _ in sides.sent[3:]] == ["model_and_adapters", "adapters"]


def test_the_groups_are_those_of_the_last_update_as_long_as_engines_are():
    sides = Sides()
    sync = _opened(sides)
    for version in range(3):
        sync.push(version)
    assert sides.groups == ["left", [0, 1]]
    sides.engines[1].is_lost = True
    sync.push(3)
    assert sides.groups[2:] == ["left", [0]]


@pytest.mark.parametrize(
    ("engine_fails", "actor_fails", "actor_is_lost", "error", "words"),
    [
        (True, False, False, WeightSyncError, "engine 0 could not"),
        (False, True, False, WeightSyncError, "process 1 could not"),
        (True, True, True, ActorLostError, "joining the weight group"),  # what is gone is why the others failed
    ],
)
def test_a_group_that_nobody_joins_ends_the_run_unless_a_process_of_the_actor_is_why(
    engine_fails, actor_fails, actor_is_lost, error, words
):
    sides = Sides()
    sync = _opened(sides)
    sides.actor_is_lost = actor_is_lost
    sides.join_answers = {sides.engines[0]: WeightSyncError("engine 0 could not")} if engine_fails else {}
    sides.join_failure = "process 1 could not" if actor_fails else ""
    with pytest.raises(error, match=words):
        sync.push(0)
    assert sides.sent == []


def test_adapters_can_be_sent_where_every_engine_has_room_for_them(monkeypatch):
    sides = Sides()
    sync = _opened(sides)
    assert sync.can_send_adapters
    sides.engines[1].setup = SimpleNamespace(adapter=None)
    assert not sync.can_send_adapters
    without_adapters = Sides()
    monkeypatch.setattr(without_adapters, "weight_plans", lambda: {"merged": [MODEL]})
    assert not _opened(without_adapters).can_send_adapters


def test_adapters_come_merged_where_they_do_not_go_alone():
    sides = Sides()
    sync = _opened(sides, "merged")
    for version in range(2):
        sync.push(version)
    assert sides.sent == [("merged", [0, 1])] * 2


@pytest.mark.parametrize("pushes_before", [0, 1])
def test_an_update_that_loses_an_engine_is_sent_again_to_the_others(pushes_before):
    sides = Sides()
    sync = _opened(sides)
    for version in range(pushes_before):
        sync.push(version)
    sides.lost_next = sides.engines[0]
    sync.push(1)
    content = "adapters" if pushes_before else "model_and_adapters"
    assert sides.sent[-2:] == [(content, [0, 1]), (content, [1])]
    assert (sides.served[-1], sync.version) == ([1], 1)
    sync.push(2)
    assert sides.sent[-1] == ("adapters", [1])


def test_an_engine_that_came_back_gets_what_the_others_have_once_there_is_something():
    sides = Sides()
    sync = _opened(sides)
    sides.awaiting = [sides.engines[1]]
    sync.catch_up()  # nothing was sent to anybody yet
    assert sides.sent == []
    sync.push(7)
    sides.awaiting = []
    sync.catch_up()
    assert len(sides.sent) == 1
    sides.engines[1] = Engine(1)
    sides.awaiting = [sides.engines[1]]
    sync.catch_up()
    assert sides.sent[1:] == [("model_and_adapters", [0, 1])]  # each process of the actor feeds the engine beside it
    assert (sync.version, sides.noted) == (7, [0])


@pytest.mark.parametrize(("mode", "in_flight"), [("sync", False), ("one_step_off", False), ("async", True)])
def test_running_responses_are_interrupted_in_the_mode_async_alone(mode, in_flight):
    sides, told = Sides(), []
    receive, sync = sides.start_receiving, _opened(sides)
    rollout = sync._config.rollout.model_copy(update={"mode": mode})
    sync._config = sync._config.model_copy(update={"rollout": rollout})
    sides.start_receiving = lambda *given: told.append(given[-1]) or receive(*given)
    sync.push(0)
    assert told == [in_flight]


def _apart(monkeypatch, sides: Sides, *more: str) -> tuple[WeightSync, list[WeightGroup]]:
    """With engines that have devices of their own, and the groups that are made."""
    groups: list[WeightGroup] = []
    join = sides.join
    sides.join = lambda made, engines: groups.extend(made) or join(made, engines)
    sides.endpoint = Endpoint("127.0.0.1", 1, b"key")
    monkeypatch.setattr(weight_sync, "cluster_gpus", lambda: 0)
    return _opened(sides, "merged", "ray.colocate=false", *more), groups


def test_an_engine_that_came_back_catches_up_alone_where_it_has_devices_of_its_own(monkeypatch):
    """The others would have to end what they generate."""
    sides = Sides()
    sync, _ = _apart(monkeypatch, sides)
    sync.push(7)
    sides.awaiting = [sides.engines[1]]
    sync.catch_up()
    assert sides.groups == ["left", [0, 1], "left", [1]]


def test_every_rank_of_every_engine_is_a_reader(monkeypatch):
    sync, groups = _apart(monkeypatch, Sides(), "rollout.engine.tensor_parallel=2")
    sync.push(0)
    assert [(one.readers, one.senders, one.backend) for one in groups] == [(4, (0,), "gloo")]


def test_engines_read_from_the_processes_beside_them_whoever_else_is_there(monkeypatch):
    sides = Sides()
    sync, groups = _apart(monkeypatch, sides, "ray.colocate=true")
    sides.engines[0].is_lost = True
    sync.push(0)
    assert [(one.addresses, one.senders) for one in groups] == [(("address 1",), (1,))]


def test_engines_are_not_waited_for_long_once_what_they_wait_for_has_failed():
    sides, told = Sides(), []
    sync = _opened(sides)
    report = WeightSendReport(0, 0.5, (), "process 1 could not send")
    sides.begin_send_weights = lambda *given: SimpleNamespace(result=lambda: report)

    def collect(calls, seconds, phase, in_vain):
        end = time.monotonic() + 5
        while phase == "weight_sync" and not in_vain() and time.monotonic() < end:
            time.sleep(0.01)
        told.append(in_vain())
        return calls.answers

    sides.collect = collect
    with pytest.raises(WeightSyncError, match="process 1 could not send"):
        sync.push(0)
    assert told == [False, True]  # as they join, and as they receive


def test_the_speed_of_an_update_is_that_of_all_its_bytes():
    """Of which the largest sender, whose report this is, sent 4000 in half a second."""
    metrics = _opened(Sides()).push(3)
    size = MODEL.size_bytes + FACTOR.size_bytes
    assert metrics == {
        "weight_sync/version": 3.0,
        "weight_sync/bytes": size,
        "weight_sync/sender_max_bytes": 4000.0,
        "weight_sync/gigabytes_per_second": pytest.approx(2 * size / 1e9),
    }
