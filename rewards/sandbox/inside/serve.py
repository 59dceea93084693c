"""The program's process: loads `main.py` when the tests are ready, and does what they ask for.

Nothing in here can be trusted once the program is loaded, and nobody does: the tests compare in their own process.
"""

import builtins
import sys
from typing import Any

from confine import forbid_execve
from wire import Gone, Peer

_READER, _WRITER = 3, 4
_OPERATIONS = {
    "getattr": getattr,
    "setattr": setattr,
    "delattr": delattr,
    "isinstance": lambda kind, value: isinstance(value, kind),
    "call": lambda function, arguments, named: function(*arguments, **named),
    "operate": lambda one, name, other: _operate(one, name, other),
    "special": lambda value, name, *arguments: _special(value, name, *arguments),
    "global": lambda name: sys.modules["__main__"].__dict__[name],
}


def serve() -> None:
    """Load, say what the program defines, answer until the tests end."""
    forbid_execve()
    peer = Peer(_READER, _WRITER, _OPERATIONS, _raised)
    (word, *_) = peer.receive()
    assert word == "load"
    try:
        run_main()
    except SystemExit as leaving:
        peer.send(["failed", f"SystemExit: {leaving}"])
        return
    except BaseException as error:
        peer.send(["failed", f"{type(error).__name__}: {error}"])
        return
    peer.send(["loaded", [[name, _place(value)] for name, value in vars(sys.modules["__main__"]).items()]])
    while True:
        try:
            message = peer.receive()
        except Gone:
            return
        peer.serve(message)


def run_once() -> None:
    """A program that is judged by what it prints."""
    forbid_execve()
    run_main()


def run_main() -> None:
    """`main.py` as Python would run it."""
    sys.argv[:] = ["main.py"]
    module = sys.modules["__main__"]
    for name in [name for name in vars(module) if not name.startswith("__")]:
        delattr(module, name)
    with open("main.py", encoding="utf-8", errors="replace") as file:
        source = file.read()
    exec(compile(source, "main.py", "exec", dont_inherit=True), module.__dict__)  # nosec B102


def _place(value: Any) -> list[str]:
    """Module and name of what was imported, so that the tests can import it themselves."""
    if isinstance(value, type(sys)):
        return [value.__name__, ""]
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return [module, name] if isinstance(module, str) and isinstance(name, str) and module != "__main__" else []


def _operate(one: Any, name: str, other: Any) -> Any:
    result = getattr(type(one), name)(one, other)
    if result is NotImplemented and name == "__eq__":
        return one is other
    if result is NotImplemented:
        raise TypeError(f"unsupported operands for {name}")
    return result


def _special(value: Any, name: str, *arguments: Any) -> Any:
    if name == "__bool__":
        return bool(value)
    if name == "__iter__":
        return iter(value)
    method = getattr(type(value), name, None)
    if method is None:
        raise TypeError(f"{type(value).__name__!r} object has no {name}")
    return method(value, *arguments)


def _raised(kinds: str, text: str) -> BaseException:
    """For what a function of the tests raised: the builtin exception of that name."""
    known = getattr(builtins, kinds.split()[0], None)
    return known(text) if isinstance(known, type) and issubclass(known, Exception) else RuntimeError(text)
