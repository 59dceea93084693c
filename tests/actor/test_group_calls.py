"""How the driver starts the processes of the actor and how long it waits for which call, where there are none."""

import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray

from actor import group as actor_group
from actor.group import ActorGroup
from rlpipe.config.actor import OptimizerConfig
from rlpipe.config.algorithm import AlgorithmConfig
from rlpipe.shared.errors import ActorError, ActorLostError
from rlpipe.shared.pack import dummy_pack
from rlpipe.shared.remote import address_in_table
from tests.small_config import small_config

DEADLINES = {"start_seconds": 1, "train_seconds": 2, "weight_sync_seconds": 3, "checkpoint_seconds": 4}
CALLS = {
    "start": [
        lambda group: group.weight_plans(),
        lambda group: group.resident_bytes(),
        lambda group: group.warm_up((), (), AlgorithmConfig()),
    ],
    "train": [
        lambda group: group.train([[[dummy_pack(1)]]], AlgorithmConfig()),
        lambda group: group.logprobs([[dummy_pack(1)]]),
        lambda group: group.set_reference(),
        lambda group: group.reset_optimizer(OptimizerConfig(), 1),
        lambda group: group.share_with_engines(1),
        lambda group: group.keep_resident("weights"),
        lambda group: group.take_usage(1),
    ],
    "weight_sync": [
        lambda group: group.listen_for_engines(),
        lambda group: group.begin_join_weight_groups(()).result(),
    ],
    "checkpoint": [
        lambda group: group.save_checkpoint(Path("x"), 1, {}),
        lambda group: group.finish_checkpoint(),
        lambda group: group.load_checkpoint(Path("x")),
        lambda group: group.save_hf(Path("x")),
    ],
}


@pytest.fixture
def waits(monkeypatch):
    """For how long was waited, and how often the processes are looked at meanwhile."""
    found = []

    def gathered(references, addresses, deadline_seconds, phase, watch):
        found.append((deadline_seconds, watch))
        return [("",)]

    monkeypatch.setattr(actor_group, "CallWatch", lambda addresses, phase, probe_seconds: probe_seconds)
    monkeypatch.setattr(actor_group, "gather", gathered)
    monkeypatch.setattr(ray, "put", lambda value: value)
    return found


def test_compilers_of_a_process_keep_what_they_make_where_is_said(monkeypatch):
    started = []
    monkeypatch.setattr(ray, "remote", lambda kind: SimpleNamespace(options=lambda **given: _started(started, given)))
    monkeypatch.setattr(actor_group, "worker_caches", lambda directory, accelerator: {"IN": directory})
    monkeypatch.setattr(actor_group, "cluster_accelerator", lambda: "")
    ActorGroup.launch(small_config(jit={"cache_directory": "/mine"}, actor={"processes": 2}))
    assert [one["runtime_env"]["env_vars"] for one in started] == [{"IN": "/mine"}] * 2


def _started(noted, options):
    noted.append(options)
    return SimpleNamespace(remote=lambda *arguments: SimpleNamespace(run=SimpleNamespace(remote=lambda *more: None)))


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_may_take_as_long_as_its_kind_and_is_looked_at_as_often_as_is_said(waits, kind):
    config = small_config(deadlines=DEADLINES, fault={"probe_seconds": 0.5})
    group = ActorGroup(config, [SimpleNamespace(run=SimpleNamespace(remote=lambda *arguments: None))], [])
    for call in CALLS[kind]:
        waits.clear()
        with suppress(AttributeError, TypeError):  # what the processes would have answered is of another type
            call(group)
        assert waits == [(DEADLINES[f"{kind}_seconds"], 0.5)]


def silent():
    """A process of the actor that has started and does not say so yet."""

    class Silent:  # in a function, so that Ray's process gets the class and not the name of this module
        def run(self, method, *arguments):
            time.sleep(600)

    return ray.remote(Silent).options(num_cpus=0).remote()


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_process_that_is_stopped_before_it_says_where_it_is_is_noticed_and_ended(ray_session, stopped):
    workers = [silent(), silent()]
    config = small_config(deadlines={"start_seconds": 120}, fault={"probe_seconds": 0.2})
    group = ActorGroup(config, workers, [])
    while (place := address_in_table(workers[stopped], "")) is None:
        time.sleep(0.05)
    process = psutil.Process(place.pid)
    process.suspend()
    with pytest.raises(ActorLostError, match=rf"start: actor-{stopped} \(pid {place.pid}\) of the actor hangs"):
        group.join()
    group.stop()
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def waiting(rank: int):
    """A process of the actor whose rank 0 has joined a weight group at once, and whose others wait for it."""

    class Waiting:
        def run(self, method, *arguments):
            if method == "join_weight_groups" and rank > 0:
                time.sleep(600)
            return ""

    return ray.remote(Waiting).options(num_cpus=0).remote()


def test_a_process_that_is_lost_after_its_answer_is_noticed_while_others_wait(ray_session):
    workers = [waiting(0), waiting(1)]
    config = small_config(deadlines={"weight_sync_seconds": 30}, fault={"probe_seconds": 0.2})
    group = ActorGroup(config, workers, [])
    ray.get([worker.run.remote("be there") for worker in workers])
    group._addresses = [address_in_table(worker, f"actor-{rank}") for rank, worker in enumerate(workers)]
    joining = group.begin_join_weight_groups(())
    ray.get(workers[0].run.remote("has answered"))
    group.check_alive("x")
    place = group._addresses[0]
    psutil.Process(place.pid).kill()
    with pytest.raises(
        ActorLostError, match=rf"join_weight_groups: actor-0 \(pid {place.pid}\) of the actor died; its"
    ):
        joining.result()
    with pytest.raises(ActorLostError, match=rf"^x: actor-0 \(pid {place.pid}\) of the actor died; its last words: "):
        group.check_alive("x")
    group.stop()


def test_processes_that_never_start_are_said_to_be_too_many(ray_session):
    group = ActorGroup(small_config(deadlines={"start_seconds": 1}), [silent()], [])
    with pytest.raises(ActorError, match="1 processes did not start within 1 seconds"):
        group.join()
    group.stop()
