"""Deadlines: a slow worker is named with its stack; nothing waits for ever."""

import os
import signal
import time
from pathlib import Path

import pytest
import ray

from rlpipe.shared.errors import DeadlineError
from rlpipe.shared.remote import (
    address_in_table,
    deadline_error,
    gather,
    process_states,
    register_worker,
    stack_of,
    together,
)


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


def test_a_worker_that_is_stopped_before_it_answers_is_found(ray_session):
    worker = _Worker.remote()
    deadline = time.monotonic() + 120
    while (address := address_in_table(worker, "w")) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(address.pid, signal.SIGSTOP)
    try:
        answer = worker.start.remote("w")
        while process_states([address]) != {"w": "stopped"}:  # which takes the kernel a moment
            assert time.monotonic() < deadline, process_states([address])
            time.sleep(0.05)
        assert "has not answered since it was made" in stack_of(address)
    finally:
        os.kill(address.pid, signal.SIGCONT)
    assert ray.get(answer, timeout=120).pid == address.pid
    ray.kill(worker)


def test_of_two_sides_that_wait_for_each_other_the_first_error_ends_both(ray_session):
    workers = [_Worker.remote() for _ in range(2)]
    addresses = ray.get([worker.start.remote(f"w{i}") for i, worker in enumerate(workers)])

    def waits(index, method, *arguments):
        reference = getattr(workers[index], method).remote(*arguments)
        return lambda: gather([reference], addresses[index : index + 1], 100, "join")

    assert together(waits(0, "sleep_in_a_named_function", 0.1), waits(1, "sleep_in_a_named_function", 0)) == (
        [0.1],
        [0],
    )
    for failing in (0, 1):
        begin = time.perf_counter()
        order = [waits(failing, "fail"), waits(1 - failing, "sleep_in_a_named_function", 90)]
        with pytest.raises(ValueError, match="a worker's own error"):
            together(*(order if failing else reversed(order)))
        assert time.perf_counter() - begin < 60
        ray.kill(workers[1 - failing])
        workers[1 - failing] = _Worker.remote()
        addresses[1 - failing] = ray.get(workers[1 - failing].start.remote("again"))
    for worker in workers:
        ray.kill(worker)


def test_stacks_leave_no_file(ray_session):
    worker = _Worker.remote()
    address = ray.get(worker.start.remote("w"))
    assert Path(address.stacks).exists()
    ray.kill(worker)
    end = time.monotonic() + 30
    while Path(address.stacks).exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert not Path(address.stacks).exists()
    with pytest.raises(DeadlineError, match="the process has ended"):
        raise deadline_error([address], 1, "rollout")
