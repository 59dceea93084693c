"""Two processes that share buffers: neither waits for the other once that is known to be gone."""

import socket
import threading
import time

import pytest

from rlpipe.shared.errors import WeightSyncError
from rlpipe.shared.weight_channel import Listener, connect

SECONDS = 20


def test_a_reader_that_failed_is_not_waited_for():
    looks = []
    begin = time.monotonic()
    with pytest.raises(WeightSyncError, match="was to open the shared buffers failed"):
        Listener().accept([], SECONDS, lambda: looks.append(None) or len(looks) == 3)
    assert len(looks) == 3 and time.monotonic() - begin < SECONDS / 2


def test_a_reader_that_comes_late_is_heard_and_one_that_never_comes_is_named():
    listener = Listener()
    readers = []
    late = threading.Timer(0.7, lambda: readers.append(connect(listener.address)))
    late.start()
    writer = listener.accept([], SECONDS, lambda: False)
    late.join()
    writer.full()
    readers[0].wait_full()
    readers[0].free()
    writer.wait_free()
    with pytest.raises(WeightSyncError, match=r"no engine opened the shared buffers within 0\.5 seconds"):
        Listener().accept([], 0.5)


def test_a_reader_that_came_and_is_gone_is_an_error_of_the_transfer():
    listener = Listener()
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(b"\0" + listener.address.encode())
    peer.close()
    with pytest.raises(WeightSyncError, match="is gone"):
        listener.accept([], SECONDS)
