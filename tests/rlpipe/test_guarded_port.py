"""A server behind a gate: reached by whom has the key, and by nobody else. 127.0.0.2 stands for a node's address."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from actor.distributed import join_store, open_store
from rlpipe.shared.guarded_port import LOOPBACK, Endpoint, guarded

NODE = "127.0.0.2"


@pytest.fixture
def store() -> dist.TCPStore:
    return open_store(LOOPBACK, 1, 30)


def test_a_store_is_reached_through_its_gate_by_whom_has_the_key(store: dist.TCPStore) -> None:
    endpoint = guarded(NODE, store.port)
    assert endpoint.key and endpoint.port != store.port
    address, port = endpoint.reach()
    assert address == LOOPBACK
    store.set("large", bytes(7 * 10**6))
    with ThreadPoolExecutor(8) as threads:
        others = list(threads.map(lambda _: join_store(address, port, 1, 30), range(8)))
        assert all(map(len, threads.map(lambda other: other.get("large"), others)))
    others[0].set("key", "value")
    assert others[1].get("key") == b"value"
    assert {other.add("count", 1) for other in others} == set(range(1, 9))


def test_the_loopback_needs_no_gate(store: dist.TCPStore) -> None:
    assert guarded(LOOPBACK, store.port) == Endpoint(LOOPBACK, store.port)
    assert Endpoint(LOOPBACK, store.port).reach() == (LOOPBACK, store.port)


def test_strangers_reach_nothing(store: dist.TCPStore) -> None:
    endpoint = guarded(NODE, store.port)
    with pytest.raises(OSError):
        socket.create_connection((NODE, store.port), timeout=5)
    with pytest.raises(dist.DistError):
        dist.TCPStore(NODE, endpoint.port, 1, is_master=False, timeout=timedelta(seconds=2))
    wrong = Endpoint(NODE, endpoint.port, b"0" * 32)
    with pytest.raises(dist.DistError):
        dist.TCPStore(*wrong.reach(), 1, is_master=False, timeout=timedelta(seconds=2))
    for said in (b"", b"\0" * 100, b"\xff" * 100_000, b"\0\0\0\x20#CHALLENGE#" + b"x" * 21):
        with socket.create_connection((NODE, endpoint.port), timeout=30) as stranger:
            heard = stranger.recv(1000)  # before the gate hangs up on what is said, which would discard it
            try:
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
                while more := stranger.recv(1000):
                    heard += more
            except OSError:  # the other side may have hung up at any of these
                pass
        assert b"CHALLENGE" in heard and b"WELCOME" not in heard
    assert store.num_keys() <= 1
    address, port = endpoint.reach()
    assert join_store(address, port, 1, 30).add("still here", 1) == 1


def test_the_key_is_in_no_text() -> None:
    assert "secret" not in repr(Endpoint(NODE, 1, b"secret"))


def test_connections_that_end_leave_no_thread(store: dist.TCPStore) -> None:
    endpoint = guarded(NODE, store.port)
    address, port = endpoint.reach()
    join_store(address, port, 1, 30).add("x", 1)
    before, descriptors = threading.active_count(), psutil.Process().num_fds()
    for _ in range(20):
        join_store(address, port, 1, 30).add("x", 1)
    end = time.monotonic() + 20
    while threading.active_count() > before + 4 and time.monotonic() < end:
        time.sleep(0.1)
    assert threading.active_count() <= before + 4
    assert psutil.Process().num_fds() <= descriptors + 8
