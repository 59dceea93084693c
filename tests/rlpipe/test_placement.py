"""Starting a cluster on this machine when Ray's own processes are slow, and who gets what of its nodes."""

import socket
import subprocess
from types import SimpleNamespace

import pytest
import ray

from rlpipe.config.load import load_config
from rlpipe.config.root import Config
from rlpipe.shared.errors import ResourceError
from rlpipe.training import placement
from rlpipe.training.placement import Placement, _engines_among, actor_placement
from rlpipe.training.ray_cluster import ray_cluster
from tests.rlpipe.run_support import PROJECT

SLOW = "The current node timed out during startup. This could happen because some of the raylet failed to startup."


def config(start_seconds: float) -> Config:
    return load_config(
        PROJECT / "configs/demo/arithmetic.yaml", ["ray.cpus=3", f"deadlines.start_seconds={start_seconds}"]
    )


def fail_first(monkeypatch: pytest.MonkeyPatch, errors: list[Exception]) -> list[dict]:
    """Ray, whose starts fail with `errors` until there is none left; the calls, in order. Each starts a process."""
    calls: list[dict] = []

    def init(**settings: object) -> None:
        calls.append(settings | {"process": subprocess.Popen(["sleep", "100"], start_new_session=True)})
        if errors:
            raise errors.pop(0)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:1"))
    monkeypatch.setattr(ray, "shutdown", lambda: None)  # other tests of this process may have a cluster
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "NodeManagerAddress": "here"}])
    return calls


def test_ray_is_started_and_joined_as_its_section_says(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fail_first(monkeypatch, [])
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)  # which processes elsewhere would be told
    common = {"environment": {"MINE": "1"}}
    started = {"cpus": 5, "object_store_bytes": 123456789} | common
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        for section in (started, {"address": address} | common):
            tree = config(30).model_dump() | {"ray": section}
            with ray_cluster(Config.model_validate(tree)):
                pass
    first, second = calls
    assert (first["address"], first["num_cpus"], first["object_store_memory"]) == ("local", 5, 123456789)
    assert (second["address"], "num_cpus" in second) == (address, False)
    assert first["runtime_env"] == second["runtime_env"] == {"env_vars": {"MINE": "1"}}


def test_as_many_nodes_are_waited_for_as_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_first(monkeypatch, [])
    tree = config(0.5).model_dump() | {"ray": {"nodes": 2}}
    with pytest.raises(ResourceError, match="1 of 2|2 nodes|nodes.* 2"), ray_cluster(Config.model_validate(tree)):
        pass


def test_a_slow_start_of_ray_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fail_first(monkeypatch, [Exception(SLOW), Exception(SLOW)])
    with ray_cluster(config(30)):
        assert [call["num_cpus"] for call in calls] == [3, 3, 3]
        assert [call["process"].poll() is None for call in calls] == [False, False, True]  # failed starts leave nothing
    assert calls[-1]["process"].poll() is not None


def test_a_start_that_stays_slow_ends_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_first(monkeypatch, [Exception(SLOW)] * 10_000)
    with pytest.raises(ResourceError, match="no cluster on this machine"), ray_cluster(config(0.01)):
        pass


def test_other_failures_of_ray_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fail_first(monkeypatch, [ValueError("num_cpus is wrong"), ValueError("never reached")])
    with pytest.raises(ResourceError, match="num_cpus is wrong"), ray_cluster(config(30)):
        pass
    assert len(calls) == 1
    calls = fail_first(monkeypatch, [KeyError("a bug")])
    with pytest.raises(KeyError), ray_cluster(config(30)):
        pass


NODES = {0: "a", 1: "b", 2: "a", 3: "b"}


def _shared() -> Config:
    settings = ["actor.processes=4", "ray.colocate=true", "rollout.engines=2", "rollout.engine.tensor_parallel=2"]
    return load_config(PROJECT / "configs/demo/arithmetic.yaml", settings)


def test_processes_of_a_node_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "cluster_gpus", lambda: 4)
    monkeypatch.setattr(placement, "_nodes_of_bundles", lambda group: NODES)
    monkeypatch.setattr(ray.util, "placement_group", lambda *_, **named: SimpleNamespace(wait=lambda seconds: True))
    monkeypatch.setattr(ray.util, "remove_placement_group", lambda group: None)
    with actor_placement(_shared()) as actor:
        assert (actor.bundles, actor.gpus_per_bundle) == ((0, 2, 1, 3), 1)


def test_an_engine_has_the_gpus_of_the_processes_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_nodes_of_bundles", lambda group: NODES)
    monkeypatch.setattr(placement, "_gpus_of_bundles", lambda placement, seconds: {0: "0", 2: "1", 1: "2", 3: "3"})
    engines = _engines_among(Placement("group", (0, 2, 1, 3), 0.5), _shared())
    assert (engines.bundles, engines.devices) == ((0, 1), (("0", "1"), ("2", "3")))
    with pytest.raises(ResourceError, match="engine 0 would have its 2 GPUs on two nodes"):
        _engines_among(Placement("group", (0, 1, 2, 3), 0.5), _shared())
