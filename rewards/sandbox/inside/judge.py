"""The process of the tests: they run here, and reach the program, which is another process, through proxies.

It reads `{"test", "word"}` as JSON from standard input and writes the word to standard output if the tests pass. The
program never sees the tests, the word or this process's memory.
"""

import builtins
import importlib
import json
import symtable
import sys
from collections.abc import Iterator
from typing import Any

from confine import forbid_execve, hide_memory
from wire import Gone, Peer, Proxy

_READER, _WRITER = 3, 4
# What a program may have imported for the tests, too: functions and classes whose results are nothing but computed.
_SHARED_MODULES = frozenset(
    ("array", "bisect", "calendar", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal", "enum")
    + ("fractions", "functools", "heapq", "itertools", "json", "math", "numbers", "numpy", "operator", "random", "re")
    + ("statistics", "string", "textwrap", "time", "typing")
)


def judge() -> None:
    """Ends with exit code 0 and the word, or 1 and a sentence on standard error."""
    hide_memory()
    forbid_execve()
    request = json.load(sys.stdin)
    problem = _problem(request["test"])
    stream = sys.stderr if problem else sys.stdout
    stream.write(f"{problem or request['word']}\n")
    stream.flush()
    sys.exit(1 if problem else 0)


def _problem(test: str) -> str:
    """Run the tests; what is wrong with the program, empty if nothing."""
    try:
        code = compile(test, "test", "exec", dont_inherit=True)
        peer = _Program()
        peer.send(["load"])
        said, content = peer.receive()
        if said != "loaded":
            return str(content)
        exec(code, _Globals(peer, dict(content), _wanted(test)))  # nosec B102
    except Gone:
        return "the program ended early"
    except SystemExit:
        return "SystemExit: the tests ended early"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


class _Program(Peer):
    """The other side may call our functions and go through our iterators, and nothing else."""

    def __init__(self) -> None:
        operations = {
            "call": lambda function, arguments, named: _callable(function)(*arguments, **named),
            "special": lambda value, name, *arguments: _iterated(value, name, *arguments),
        }
        super().__init__(_READER, _WRITER, operations, self._exception)
        self._exceptions: dict[tuple[str, ...], type[BaseException]] = {}

    def proxy(self, number: int, bases: Any) -> Any:
        if isinstance(bases, list) and bases:
            return self._exception_class(tuple(map(str, bases)))
        return super().proxy(number, bases)

    def _exception(self, kinds: str, text: str) -> BaseException:
        return self._exception_class(tuple(kinds.split()))(text)

    def _exception_class(self, kinds: tuple[str, ...]) -> type[BaseException]:
        """The builtin one, or one of our own that stands for the program's."""
        if not kinds:
            return Exception
        known = getattr(builtins, kinds[0], None)
        if isinstance(known, type) and issubclass(known, Exception):
            return known
        if kinds not in self._exceptions:
            self._exceptions[kinds] = type(kinds[0], (self._exception_class(kinds[1:]),), {})
        return self._exceptions[kinds]


class _Globals(dict[str, Any]):
    """Names of the tests: their own, then those of the program, then Python's."""

    def __init__(self, peer: _Program, places: dict[str, list[str]], wanted: frozenset[str]) -> None:
        super().__init__(__name__="__main__", __builtins__=builtins)
        self._peer, self._places, self._wanted = peer, places, wanted

    def __missing__(self, name: str) -> Any:
        if name not in self._wanted or name not in self._places:
            raise KeyError(name)
        place = self._places[name]
        if place and place[0].partition(".")[0] in _SHARED_MODULES:
            module = importlib.import_module(place[0])
            return getattr(module, place[1]) if place[1] else module
        return self._peer.ask("global", name)


def _wanted(test: str) -> frozenset[str]:
    """Names that the tests take from the program.

    Those that nothing else defines; where there are none, such as in `assert sum(10, 15) == 6`, a builtin's name can be
    meant. In all other tests a program that redefines `all` or `len` changes nothing.
    """
    table = symtable.symtable(test, "test", "exec")
    own = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    used = set(_used(table)) - own
    strange = {name for name in used if not hasattr(builtins, name)}
    return frozenset(strange or used)


def _used(table: symtable.SymbolTable) -> Iterator[str]:
    top = table.get_type() == "module"
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (top or symbol.is_global()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _used(child)


def _callable(value: Any) -> Any:
    if isinstance(value, Proxy) or type(value) not in _FUNCTIONS:
        raise TypeError("only functions of the tests can be called")
    return value


def _iterated(value: Any, name: str, *arguments: Any) -> Any:
    if arguments or name not in ("__iter__", "__next__") or type(value) not in _ITERATORS:
        raise TypeError("an object of the tests cannot be used in the program")
    return iter(value) if name == "__iter__" else next(value)


_FUNCTIONS: tuple[type, ...] = (type(judge), type(lambda: None), type(len))
_ITERATORS: tuple[type, ...] = (
    *map(type, map(iter, ([], (), {}, set(), range(1), "", (_ for _ in ())))),
    *(map, filter, zip, enumerate),
)
