"""A second engine elsewhere gives the same answers; one that dies says so; nothing is left behind."""

import math
import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from rollout_requests import answers, generate, make_requests, mixed_requests

from rlpipe.config.fault import FaultConfig
from rlpipe.shared.errors import RolloutError
from rollout.pool import RolloutPool
from tests.search_path import search_path

ONE_CORE_WITH_AMX = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import torch
torch.cpu._is_amx_tile_supported = lambda: True
print("process", os.getpid(), "has one core and AMX", file=sys.stderr, flush=True)
"""


def scheduler_processes(engine: psutil.Process) -> list[psutil.Process]:
    found = []
    for child in engine.children():
        with suppress(psutil.NoSuchProcess):
            if "scheduler" in child.name():
                found.append(child)
    return found


@pytest.fixture
def other_machine(tmp_path, monkeypatch):
    """Makes processes that inherit PYTHONPATH believe in Intel AMX, and gives them a single core."""
    (tmp_path / "sitecustomize.py").write_text(ONE_CORE_WITH_AMX)
    monkeypatch.setenv("PYTHONPATH", search_path(tmp_path))


@pytest.mark.slow
def test_a_warm_engine_restarted_on_one_core_with_amx_gives_the_same_answers_and_its_death_is_told(
    dense_pool, dense_folder, config_of, other_machine, tmp_path
):
    requests = mixed_requests()
    expected = answers(generate(dense_pool, requests))
    config = config_of(max_running_requests=7, jit={"warm_up": "on"})
    config = config.model_copy(update={"fault": FaultConfig(engine_restarts=0)})
    pool = RolloutPool.start(config, dense_folder, log_directory=str(tmp_path))
    try:
        assert pool.room_beside_bytes() == math.inf and not pool.up()  # before it starts, which takes its event loop
        (health,) = pool.wait_until_ready()
        assert health.start_seconds["warm_up"] > 0.1
        (usage,) = pool.take_usage()
        assert (usage.requests, usage.response_tokens, usage.first_token_time) == (0, 0, None)
        assert answers(generate(pool, requests)) == expected
        assert pool.take_usage()[0].first_token_time is not None
        assert "has one core and AMX" in (tmp_path / "rollout_engine_0.log").read_text()
        pid, instance = pool.worker_pids()[0], pool.serving()[0].setup.instance
        (scheduler,) = scheduler_processes(psutil.Process(pid))

        def kill_scheduler(_generation) -> None:
            if scheduler.is_running():
                scheduler.send_signal(signal.SIGKILL)

        with pytest.raises(RolloutError, match=r"engine 0 died: SGLang's process \d+ ended with exit code -9"):
            generate(pool, [*make_requests(1, new_tokens=1), *_long_requests()], on_finished=kill_scheduler)
        with pytest.raises(RolloutError, match="engine 0 died"):
            pool.take_usage()
    finally:
        pool.stop()
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    assert not [name for name in os.listdir("/dev/shm") if instance in name]
    assert not list(Path("/tmp").glob(f"rlpipe-engine-{instance}"))


def _long_requests():
    return [request for request in make_requests(5, new_tokens=400) if request.request_id != "r0"]
