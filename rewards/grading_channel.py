"""Messages between a grading process and its owner: four bytes of length and a body, each within a deadline.

The body of an answer is JSON and never a pickle, because code of a grader runs where it is written, and what is read in
the owner's process must not be able to run there.
"""

import json
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from rlpipe.shared.sample import Reward

LONGEST_ANSWER_BYTES = 2**20
_LENGTH = struct.Struct("!I")
_READ_BYTES = 2**16
Waiting = Callable[[float, int], None]


class ForgedAnswer(Exception):
    """Something else than an answer came: a grader wrote into the connection of its process."""


class OwnerChannel:
    """The owner's end. Every call ends at its deadline, whatever the other side writes or does not read.

    `wait(seconds, events)` is called when nothing can be done: it returns when the channel has one of the `events` (of
    select.poll), or after `seconds`.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._received = bytearray()

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, body: bytes, deadline: float, wait: Waiting) -> None:
        """Raises TimeoutError at `deadline` (of time.monotonic), OSError if the process died."""
        rest = memoryview(_LENGTH.pack(len(body)) + body)
        while rest:
            try:
                rest = rest[self._end.send(rest) :]
            except BlockingIOError:
                wait(_left(deadline), select.POLLOUT)

    def receive(self, deadline: float, wait: Waiting) -> dict[str, Any]:
        """The next answer. Raises TimeoutError, EOFError or OSError as the process dies, or ForgedAnswer."""
        while True:
            if len(self._received) >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._received)
                if length > LONGEST_ANSWER_BYTES:
                    raise ForgedAnswer
                if len(self._received) >= _LENGTH.size + length:
                    body = bytes(self._received[_LENGTH.size : _LENGTH.size + length])
                    del self._received[: _LENGTH.size + length]
                    return _parsed(body)
            try:
                more = self._end.recv(_READ_BYTES)
            except BlockingIOError:
                wait(_left(deadline), select.POLLIN)
                continue
            if not more:
                raise EOFError
            _left(deadline)  # also when something comes all the time
            self._received += more

    def close(self) -> None:
        self._end.close()


class WorkerChannel:
    """The grading process's end. A process that a grader forks does not have it."""

    def __init__(self, descriptor: int) -> None:
        self._end = socket.socket(fileno=descriptor)
        self._end.set_inheritable(False)
        os.register_at_fork(after_in_child=self._end.close)

    def receive(self) -> bytes | None:
        """The next request; None when the owner has closed its end."""
        header = self._exactly(_LENGTH.size)
        return None if header is None else self._exactly(_LENGTH.unpack(header)[0])

    def send(self, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self._end.sendall(_LENGTH.pack(len(body)) + body)

    def _exactly(self, size: int) -> bytes | None:
        received = bytearray()
        while len(received) < size:
            more = self._end.recv(min(_READ_BYTES, size - len(received)))
            if not more:
                return None
            received += more
        return bytes(received)


def reward_to_json(reward: Reward) -> dict[str, Any]:
    """What `reward_from_json` reads back; a reason too long for an answer is cut."""
    return {
        "score": reward.score,
        "correct": reward.correct,
        "reason": reward.reason[: LONGEST_ANSWER_BYTES // 16],
        "components": dict(reward.components),
    }


def reward_from_json(value: Any) -> Reward:
    """Raises ForgedAnswer for what `reward_to_json` does not write."""
    try:
        correct = None if value["correct"] is None else bool(value["correct"])
        components = {str(name): float(number) for name, number in value["components"].items()}
        return Reward(float(value["score"]), correct, str(value["reason"]), components)
    except (TypeError, KeyError, ValueError, AttributeError):
        raise ForgedAnswer from None


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        raise ForgedAnswer from None
    if not isinstance(answer, dict):
        raise ForgedAnswer
    return answer


def _left(deadline: float) -> float:
    """Seconds until `deadline`; raises TimeoutError when there is none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
