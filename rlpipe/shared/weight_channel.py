"""How two processes on one machine take turns on shared buffers: one fills them with weights, the other reads them.

Buffers are used in rotation. The writer says when one is full, the reader when it may be filled again; each word is a
message on a Unix socket, some 20 microseconds. The address is in Linux's abstract namespace, so no file is left behind,
and both sides check that the other process belongs to the same user.
"""

import os
import pickle
import socket
import struct
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from rlpipe.shared.errors import WeightSyncError
from rlpipe.shared.weights import SharedBuffer

_FULL = b"full"
_FREE = b"free"
_FAILED = b"failed "
_LOOK_SECONDS = 0.2


class Listener:
    """The writer's side until the reader has come. `address` is text that `connect` takes."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(b"")  # the kernel chooses an abstract address
        self._socket.listen(1)
        self.address = self._socket.getsockname()[1:].decode()

    def close(self) -> None:
        self._socket.close()

    def accept(
        self,
        buffers: Sequence[SharedBuffer],
        timeout_seconds: float,
        reader_failed: Callable[[], bool] = lambda: False,
    ) -> "Writer":
        """Wait for the reader and tell it the buffers. Raises WeightSyncError when none comes in time, and as soon as
        `reader_failed`, which is asked meanwhile."""
        try:
            connection = _checked(self._peer(time.monotonic() + timeout_seconds, reader_failed))
        except TimeoutError:
            raise WeightSyncError(f"no engine opened the shared buffers within {timeout_seconds:g} seconds") from None
        finally:
            self._socket.close()
        try:
            connection.send_bytes(pickle.dumps(tuple(buffers)))
        except OSError:
            raise WeightSyncError("the engine that opened the shared buffers is gone; see its log") from None
        return Writer(connection, timeout_seconds)

    def _peer(self, end: float, reader_failed: Callable[[], bool]) -> socket.socket:
        while True:
            self._socket.settimeout(max(0.001, min(_LOOK_SECONDS, end - time.monotonic())))
            try:
                return self._socket.accept()[0]
            except TimeoutError:
                if time.monotonic() >= end:
                    raise
            if reader_failed():
                raise WeightSyncError("the engine that was to open the shared buffers failed; see its log")


class Writer:
    """Says which buffer is full, and learns which may be filled again."""

    def __init__(self, connection: Connection, timeout_seconds: float) -> None:
        self._connection = connection
        self._timeout_seconds = timeout_seconds

    def full(self) -> None:
        """The next buffer of the rotation is full. Raises WeightSyncError when the reader failed or is gone."""
        try:
            self._connection.send_bytes(_FULL)
        except OSError:
            while True:
                self.wait_free()  # raises the reader's last word, or that there is none

    def wait_free(self) -> None:
        """Wait until the reader is done with its next buffer. Raises WeightSyncError when it failed or is gone."""
        try:
            if not self._connection.poll(self._timeout_seconds):
                raise WeightSyncError(f"the engine did not read a weight bucket in {self._timeout_seconds:g} seconds")
            answer = self._connection.recv_bytes()
        except (EOFError, OSError):
            raise WeightSyncError("the engine that shares this process's buffers is gone; see its log") from None
        if answer != _FREE:
            raise WeightSyncError(answer.removeprefix(_FAILED).decode())

    def close(self) -> None:
        self._connection.close()


class Reader:
    """The other side: waits for full buffers and gives them back."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.buffers: tuple[SharedBuffer, ...] = pickle.loads(connection.recv_bytes())  # nosec B301

    def wait_full(self) -> None:
        """Wait until the next buffer of the rotation is full. Raises WeightSyncError when the writer is gone."""
        try:
            self._connection.recv_bytes()
        except (EOFError, OSError):
            raise WeightSyncError("the actor's process that shares its buffers is gone; see its log") from None

    def free(self) -> None:
        """The buffer may be filled again."""
        self._connection.send_bytes(_FREE)

    def fail(self, reason: str) -> None:
        """The buffer could not be used."""
        self._connection.send_bytes(_FAILED + reason.encode())

    def close(self) -> None:
        self._connection.close()


def connect(address: str) -> Reader:
    """The reader's side: meets the `Listener` at `address` and learns the buffers."""
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(b"\0" + address.encode())
    return Reader(_checked(peer))


def _checked(peer: socket.socket) -> Connection:
    """A connection that carries whole messages, to a process of the same user."""
    peer.settimeout(None)
    credentials = struct.Struct("3i")
    _, user, _ = credentials.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
    if user != os.getuid():
        peer.close()
        raise WeightSyncError(f"refused to share weights with a process of user {user}, which is not {os.getuid()}")
    return Connection(peer.detach())
