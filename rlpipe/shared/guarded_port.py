"""A port that only who has the key gets through, for servers that let everybody in.

The server itself listens at the loopback. A `Gate` listens where other nodes can reach it, makes each visitor prove
that it has the key (a challenge answered with an HMAC; the key is never sent) and then carries bytes to the server and
back. A visitor opens a `passage`: a port of its own loopback that leads through the gate.
"""

import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

_HANDSHAKE_SECONDS = 10
_PIECE_BYTES = 2**16
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Endpoint:
    """Where a server is found. With a key it stands behind a `Gate`."""

    address: str
    port: int
    key: bytes = field(default=b"", repr=False)

    def reach(self) -> tuple[str, int]:
        """Address and port at which this process finds the server."""
        return (LOOPBACK, passage(self.address, self.port, self.key)) if self.key else (self.address, self.port)


def guarded(address: str, target: int) -> Endpoint:
    """A gate at `address`, with a new key, before the server at port `target` of the loopback.

    In a cluster that is nowhere but on the loopback the server needs none.
    """
    if address == LOOPBACK:
        return Endpoint(address, target)
    key = secrets.token_bytes(32)
    return Endpoint(address, Gate(address, target, key).port, key)


class Gate:
    """At `address`, before the server at port `target` of the loopback, until the process ends. `port` is its own."""

    def __init__(self, address: str, target: int, key: bytes) -> None:
        self._target, self._key = target, key
        self._listener = socket.create_server((address, 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=_serve, args=(self._listener, self._admit), name="gate", daemon=True).start()

    def _admit(self, visitor: socket.socket) -> None:
        if _proven(visitor, self._key, as_gate=True):
            _join(visitor, socket.create_connection((LOOPBACK, self._target)))
        else:
            visitor.close()


def passage(address: str, port: int, key: bytes) -> int:
    """The port of this machine's loopback that leads to what is behind the gate at `address` and `port`."""
    listener = socket.create_server((LOOPBACK, 0))

    def lead(visitor: socket.socket) -> None:
        try:
            way = socket.create_connection((address, port), timeout=_HANDSHAKE_SECONDS)
        except OSError:
            visitor.close()
            return
        if _proven(way, key, as_gate=False):
            _join(visitor, way)
        else:
            visitor.close()
            way.close()

    threading.Thread(target=_serve, args=(listener, lead), name="passage", daemon=True).start()
    own: int = listener.getsockname()[1]
    return own


def _serve(listener: socket.socket, handle: Callable[[socket.socket], None]) -> None:
    while True:
        visitor, _ = listener.accept()
        threading.Thread(target=handle, args=(visitor,), daemon=True).start()


def _proven(end: socket.socket, key: bytes, as_gate: bool) -> bool:
    """Each side challenges the other; the gate goes first."""
    limit = struct.pack("ll", _HANDSHAKE_SECONDS, 0)
    end.settimeout(None)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        end.setsockopt(socket.SOL_SOCKET, option, limit)
    steps = (deliver_challenge, answer_challenge) if as_gate else (answer_challenge, deliver_challenge)
    connection = Connection(os.dup(end.fileno()))
    try:
        for step in steps:
            step(connection, key)
    except (AuthenticationError, EOFError, OSError, ValueError, AssertionError):
        return False
    finally:
        connection.close()
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, 0))
    return True


def _join(one: socket.socket, other: socket.socket) -> None:
    """Carry bytes both ways until both sides have said their last."""
    for end in (one, other):
        end.settimeout(None)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    back = threading.Thread(target=_carry, args=(other, one), daemon=True)
    back.start()
    _carry(one, other)
    back.join()
    one.close()
    other.close()


def _carry(source: socket.socket, target: socket.socket) -> None:
    try:
        while piece := source.recv(_PIECE_BYTES):
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)
    except OSError:  # one of them is gone: so is the connection
        for end in (source, target):
            end.close()
