"""Deadlines: a slow worker is named with its stack; nothing waits for ever."""

import time

import pytest
import ray

from rlpipe.errors import DeadlineError
from rlpipe.remote import gather, register_worker


@ray.remote(num_cpus=0)
class _Worker:
    def start(self, name):
        return register_worker(name)

    def sleep_in_a_named_function(self, seconds):
        time.sleep(seconds)
        return seconds

    def fail(self):
        raise ValueError("a worker's own error")


def test_a_late_worker_is_named_with_its_stack(ray_session):
    workers = [_Worker.remote() for _ in range(2)]
    addresses = ray.get([worker.start.remote(f"worker-{i}") for i, worker in enumerate(workers)])
    references = [worker.sleep_in_a_named_function.remote(s) for worker, s in zip(workers, (0, 60), strict=True)]
    with pytest.raises(DeadlineError) as error:
        gather(references, addresses, deadline_seconds=3, phase="rollout")
    message = str(error.value)
    assert "rollout: no answer from worker-1 within 3 seconds" in message
    assert "sleep_in_a_named_function" in message
    assert "worker-0" not in message
    for worker in workers:
        ray.kill(worker)


def test_results_keep_their_order_and_errors_come_through(ray_session):
    workers = [_Worker.remote() for _ in range(2)]
    addresses = ray.get([worker.start.remote(f"w{i}") for i, worker in enumerate(workers)])
    references = [worker.sleep_in_a_named_function.remote(s) for worker, s in zip(workers, (0.2, 0), strict=True)]
    assert gather(references, addresses, 30, "train") == [0.2, 0]
    with pytest.raises(ValueError, match="a worker's own error"):
        gather([workers[0].fail.remote()], addresses[:1], 30, "train")
    for worker in workers:
        ray.kill(worker)
