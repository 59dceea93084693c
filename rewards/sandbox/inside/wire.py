"""Calls between a program and the tests that judge it, which live in two processes.

Values of plain types travel as data, so that comparing them is up to the side that compares. Everything else stays
where it is and is known to the other side as a `Proxy`, on which only the operations run that the owner permits.
"""

import collections
import datetime
import decimal
import fractions
import importlib
import json
import os
import struct
from collections.abc import Callable, Mapping
from typing import Any

LONGEST_MESSAGE_BYTES = 2**24
_LARGE_INTEGER_BITS = 2000


class Gone(Exception):
    """The other side has ended or does not keep to the rules."""


class Peer:
    """One side. `operations`: what the other side may do with our objects, by name; each gets the object first.

    `raised(kind, text)` makes the exception to raise here for one that was raised there.
    """

    def __init__(
        self,
        reader: int,
        writer: int,
        operations: Mapping[str, Callable[..., Any]],
        raised: Callable[[str, str], BaseException],
    ) -> None:
        self._reader, self._writer = reader, writer
        self._operations, self._raised = operations, raised
        self._objects: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}
        self._asked = 0

    def ask(self, operation: str, *arguments: Any) -> Any:
        """Have the other side do something, and answer what it asks meanwhile."""
        self._asked += 1
        number = self._asked
        self.send(["ask", number, operation, [self.encode(argument) for argument in arguments]])
        while True:
            message = self.receive()
            if message[0] == "ask":
                self.serve(message)
            elif message[:2] == ["answer", number]:
                changed = message[3] if len(message) > 3 else {}
                for position, value in changed.items():
                    _become(arguments[1][int(position)], self.decode(value))
                return self.decode(message[2])
            elif message[:2] == ["error", number]:
                raise _visible(self._raised(str(message[2]), str(message[3])), (operation, *arguments[1:2]))
            else:
                raise Gone

    def serve(self, message: list[Any]) -> None:
        """Do what the other side asks for."""
        _, number, operation, encoded = message
        try:
            arguments = [self.decode(argument) for argument in encoded]
            result = self.encode(self._operations[operation](*arguments))
            changed = self._changed(arguments, encoded) if operation == "call" else {}
        except Gone:
            raise
        except BaseException as error:
            self.send(["error", number, _kind(error), _text(error)])
        else:
            self.send(["answer", number, result, changed])

    def send(self, message: list[Any]) -> None:
        body = json.dumps(message).encode()
        if len(body) > LONGEST_MESSAGE_BYTES:
            raise Gone
        rest = memoryview(struct.pack("!I", len(body)) + body)
        try:
            while rest:
                rest = rest[os.write(self._writer, rest) :]
        except OSError:
            raise Gone from None

    def receive(self) -> list[Any]:
        """The next message. Raises Gone where there is none."""
        (length,) = struct.unpack("!I", self._exactly(4))
        if length > LONGEST_MESSAGE_BYTES:
            raise Gone
        try:
            message = json.loads(self._exactly(length))
        except (ValueError, RecursionError):
            raise Gone from None
        if not isinstance(message, list) or not message:
            raise Gone
        return message

    def encode(self, value: Any) -> Any:
        """As JSON. Subclasses of plain types travel as the plain type."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return int(value) if value.bit_length() < _LARGE_INTEGER_BITS else ["int", f"{value:x}"]
        if isinstance(value, float):
            return float(value)
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, Proxy):
            return ["yours", object.__getattribute__(value, "_number")]
        for name, encoder in _ENCODERS.items():
            if isinstance(value, encoder[0]):
                return [name, *encoder[1](self, value)]
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            plain = value.tolist()
            return ["numpy", str(value.dtype), self.encode(plain)] if isinstance(plain, list) else self.encode(plain)
        return ["mine", self._number(value), isinstance(value, type) and _bases(value)]

    def decode(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        kind, *rest = value
        if kind == "mine":
            return self.proxy(rest[0], rest[1])
        if kind == "yours":
            return self._objects[rest[0]]
        return _DECODERS[kind](self, *rest)

    def proxy(self, number: int, bases: Any) -> Any:
        """What stands here for object `number` of the other side. bases: of a class, the names of all its bases."""
        return Proxy(self, int(number))

    def _number(self, value: Any) -> int:
        number = self._numbers.setdefault(id(value), len(self._objects))
        self._objects[number] = value  # and kept, so that the id stays its own
        return number

    def _changed(self, arguments: list[Any], encoded: list[Any]) -> dict[int, Any]:
        """Positional arguments of a call that it changed in place."""
        positional, before = arguments[1], encoded[1][1:]
        after = [self.encode(argument) for argument in positional]
        return {at: now for at, now in enumerate(after) if now != before[at] and _can_become(positional[at])}

    def _exactly(self, size: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            try:
                more = os.read(self._reader, min(2**20, size - len(received)))
            except OSError:
                raise Gone from None
            if not more:
                raise Gone
            received += more
        return bytes(received)


def _both(operation: str) -> Callable[..., Any]:
    """An operation of two objects of the other side. With a value of ours it is none: that one stays here."""

    def operate(self: "Proxy", other: Any) -> Any:
        return _ask(self, "operate", operation, other) if isinstance(other, Proxy) else NotImplemented

    return operate


def _one(operation: str) -> Callable[..., Any]:
    def operate(self: "Proxy", *arguments: Any) -> Any:
        return _ask(self, "special", operation, *arguments)

    return operate


class Proxy:
    """An object of the other side. It equals no value of this side, whatever its class says."""

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        return _ask(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "setattr", name, value)

    def __delattr__(self, name: str) -> None:
        _ask(self, "delattr", name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return object.__getattribute__(self, "_peer").ask("call", self, arguments, named)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Proxy) and bool(_ask(self, "operate", "__eq__", other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(object.__getattribute__(self, "_number"))

    def __contains__(self, item: Any) -> bool:
        return any(item is one or item == one for one in self)  # here, so that `item` stays on this side

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, Proxy) and bool(_ask(self, "isinstance", instance))

    def __exit__(self, *_: object) -> None:
        _ask(self, "special", "__exit__", None, None, None)

    __bool__, __len__, __iter__, __next__ = _one("__bool__"), _one("__len__"), _one("__iter__"), _one("__next__")
    __str__, __repr__, __int__, __float__ = _one("__str__"), _one("__repr__"), _one("__int__"), _one("__float__")
    __index__, __abs__, __neg__, __enter__ = _one("__index__"), _one("__abs__"), _one("__neg__"), _one("__enter__")
    __getitem__, __setitem__, __delitem__ = _one("__getitem__"), _one("__setitem__"), _one("__delitem__")
    __lt__, __le__, __gt__, __ge__ = _both("__lt__"), _both("__le__"), _both("__gt__"), _both("__ge__")
    __add__, __sub__, __mul__, __matmul__ = _both("__add__"), _both("__sub__"), _both("__mul__"), _both("__matmul__")
    __truediv__, __floordiv__, __mod__ = _both("__truediv__"), _both("__floordiv__"), _both("__mod__")
    __and__, __or__, __xor__ = _both("__and__"), _both("__or__"), _both("__xor__")


def _ask(proxy: Proxy, operation: str, *arguments: Any) -> Any:
    return object.__getattribute__(proxy, "_peer").ask(operation, proxy, *arguments)


def _visible(error: BaseException, asked: tuple[Any, ...]) -> BaseException:
    """An error of the other side as it is raised here: only an iterator that is asked for more may end an iteration, as
    otherwise `all(map(...))` would take a call that raises StopIteration for its end (PEP 479)."""
    ends_iterations = isinstance(error, StopIteration | StopAsyncIteration)
    if not ends_iterations or asked == ("special", "__next__"):
        return error
    return RuntimeError(f"it raised {type(error).__name__}")


def _can_become(value: Any) -> bool:
    return isinstance(value, list | dict | set | bytearray | collections.deque)


def _become(kept: Any, now: Any) -> None:
    """Give an argument of ours the content that the other side gave its copy."""
    if isinstance(kept, list | bytearray):
        kept[:] = now
    elif isinstance(kept, dict | set):
        kept.clear()
        kept.update(now)
    elif isinstance(kept, collections.deque):
        kept.clear()
        kept.extend(now)


def _kind(error: BaseException) -> str:
    """Names of its class and of all it is derived from, the nearest first."""
    return " ".join(base.__name__ for base in type(error).__mro__)


def _text(error: BaseException) -> str:
    try:
        return str(error)[:1000]
    except BaseException:
        return ""


def _bases(value: type) -> list[str]:
    return [base.__name__ for base in value.__mro__] if issubclass(value, BaseException) else []


def _items(peer: Peer, values: Any) -> list[Any]:
    return [peer.encode(value) for value in values]


def _pairs(peer: Peer, values: Any) -> list[Any]:
    return [[peer.encode(key), peer.encode(value)] for key, value in values.items()]


def _named(peer: Peer, name: str, fields: list[str], *values: Any) -> Any:
    return collections.namedtuple(str(name), fields)(*map(peer.decode, values))


def _decoded(peer: Peer, pairs: tuple[Any, ...]) -> list[tuple[Any, Any]]:
    return [(peer.decode(key), peer.decode(value)) for key, value in pairs]


def _is_named(value: Any) -> bool:
    return isinstance(value, tuple) and isinstance(getattr(type(value), "_fields", None), tuple)


class _Named(type):
    def __instancecheck__(cls, value: object) -> bool:
        return _is_named(value)


class _NamedTuple(metaclass=_Named):
    """Any named tuple."""


# Subclasses before their base classes: the first that fits is taken.
_ENCODERS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "named": (_NamedTuple, lambda peer, v: [type(v).__name__, list(v._fields), *_items(peer, tuple(v))]),
    "list": (list, _items),
    "tuple": (tuple, _items),
    "Counter": (collections.Counter, _pairs),
    "OrderedDict": (collections.OrderedDict, _pairs),
    "dict": (dict, _pairs),
    "set": (set, _items),
    "frozenset": (frozenset, _items),
    "deque": (collections.deque, _items),
    "bytes": (bytes, lambda _, v: [v.hex()]),
    "bytearray": (bytearray, lambda _, v: [v.hex()]),
    "complex": (complex, lambda _, v: [v.real, v.imag]),
    "range": (range, lambda peer, v: _items(peer, (v.start, v.stop, v.step))),
    "slice": (slice, lambda peer, v: _items(peer, (v.start, v.stop, v.step))),
    "Decimal": (decimal.Decimal, lambda _, v: [str(v)]),
    "Fraction": (fractions.Fraction, lambda _, v: [str(v)]),
    "datetime": (datetime.datetime, lambda _, v: [v.isoformat()]),
    "date": (datetime.date, lambda _, v: [v.isoformat()]),
    "time": (datetime.time, lambda _, v: [v.isoformat()]),
    "timedelta": (datetime.timedelta, lambda _, v: [v.days, v.seconds, v.microseconds]),
}
_DECODERS: dict[str, Callable[..., Any]] = {
    "int": lambda _, text: int(text, 16),
    "named": _named,
    "list": lambda peer, *v: list(map(peer.decode, v)),
    "tuple": lambda peer, *v: tuple(map(peer.decode, v)),
    "Counter": lambda peer, *v: collections.Counter(dict(_decoded(peer, v))),
    "OrderedDict": lambda peer, *v: collections.OrderedDict(_decoded(peer, v)),
    "dict": lambda peer, *v: dict(_decoded(peer, v)),
    "set": lambda peer, *v: set(map(peer.decode, v)),
    "frozenset": lambda peer, *v: frozenset(map(peer.decode, v)),
    "deque": lambda peer, *v: collections.deque(map(peer.decode, v)),
    "bytes": lambda _, text: bytes.fromhex(text),
    "bytearray": lambda _, text: bytearray.fromhex(text),
    "complex": lambda _, real, imaginary: complex(real, imaginary),
    "range": lambda peer, *v: range(*map(peer.decode, v)),
    "slice": lambda peer, *v: slice(*map(peer.decode, v)),
    "Decimal": lambda _, text: decimal.Decimal(text),
    "Fraction": lambda _, text: fractions.Fraction(text),
    "datetime": lambda _, text: datetime.datetime.fromisoformat(text),
    "date": lambda _, text: datetime.date.fromisoformat(text),
    "time": lambda _, text: datetime.time.fromisoformat(text),
    "timedelta": lambda _, *parts: datetime.timedelta(*parts),
    "numpy": lambda peer, kind, v: importlib.import_module("numpy").array(peer.decode(v), dtype=kind),
}
