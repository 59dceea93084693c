"""Ctrl-C and SIGTERM. A signal is state of the whole process, so this module holds it.

Raising KeyboardInterrupt is not enough: raised inside a library's callback or a finalizer it is swallowed, and the run
would go on. So the request is also remembered, and looked at where a phase begins.
"""

import signal
from typing import NoReturn

_requested = False


def install() -> None:
    """Handle SIGINT and SIGTERM alike, in the main thread."""
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)


def raise_if_requested() -> None:
    """Raise KeyboardInterrupt when a signal came, even if its own exception was swallowed."""
    global _requested
    if _requested:
        _requested = False
        raise KeyboardInterrupt


def _interrupt(*_: object) -> NoReturn:
    global _requested
    _requested = True
    raise KeyboardInterrupt
