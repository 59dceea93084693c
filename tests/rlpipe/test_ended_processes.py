"""A process that Ray's own memory monitor ends, as the actor and an engine tell of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
# The monitor is on in a cluster whose memory counts as full from the beginning.
FULL = """
import json, os, time
os.environ |= {"RAY_memory_usage_threshold": "0.01", "RAY_memory_monitor_refresh_ms": "100"}
import ray
from actor.lost_ranks import CallWatch
from rlpipe.shared.remote import WorkerAddress
from rollout.engine_calls import translate
from types import SimpleNamespace

class Busy:
    def work(self):
        time.sleep(100)

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
process = ray.remote(max_restarts=0)(Busy).remote()
found = {}
try:
    ray.get(process.work.remote(), timeout=100)
except ray.exceptions.RayError as error:
    watch = CallWatch([WorkerAddress("actor-0", "node", 1234, "")], "train", 1.0)
    engine = SimpleNamespace(index=3, setup=SimpleNamespace(log_path="engine-3.log"))
    for name, told in (("actor", watch.failed(error, 0)), ("engine", translate(engine, error))):
        found[name] = type(told).__name__, str(told)
ray.shutdown()
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_process_that_is_ended_because_memory_is_full_is_lost_and_says_so():
    done = subprocess.run([sys.executable, "-c", FULL], cwd=PROJECT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [kind for kind, _ in found.values()] == ["ActorLostError", "EngineFailure"]
    for _, sentence in found.values():
        assert "\n" not in sentence and "because the memory of its node was nearly full (" in sentence
        assert " GB were in use): `rlpipe plan` says" in sentence
    assert found["actor"][1].startswith("train: actor-0 (pid 1234) of the actor died (Ray ended it")
    assert found["engine"][1].startswith("engine 3 died: ") and found["engine"][1].endswith("; log: engine-3.log")
