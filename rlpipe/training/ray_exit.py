"""Ray's library ends this process without a word, by `_Exit(1)`, when its object store breaks off in the middle of a
call. Here the calling thread waits instead, so that `RayWatch`, which sees the lost raylet a moment later, says what
happened and leaves in order.

The call is found where the loader has written its address: in the table of `_raylet.so` that lists imported functions.
"""

import ctypes
import importlib
import mmap
import os
import struct
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from rlpipe.shared.errors import EXIT_CODE
from rlpipe.shared.replaced_parts import relies_on

_LIBRARY = relies_on(
    "ray._raylet",
    why="it ends the process when its connection to the object store breaks; the run says why in a sentence first",
    drop_when="Ray raises an error of Python's instead",
)
_NAME = b"_Exit"
_WAIT_SECONDS = 20.0
# Of <elf.h>.
_SEGMENT_DYNAMIC = 2
_STRINGS, _SYMBOLS, _CALLS_BYTES, _CALLS = 5, 6, 2, 23
_HEADER, _SEGMENT, _ENTRY, _CALL, _SYMBOL = map(struct.Struct, ("32xQ14xHH", "I4x8xQ16xQ8x", "qQ", "QQq", "I20x"))


@cache
def hold_silent_exits() -> bool:
    """From now on Ray's library waits where it would end this process; whether its call was found."""
    path = Path(str(importlib.import_module(_LIBRARY.targets[0]).__file__))
    slot = _slot_of(_NAME, path)
    if slot is None:
        return False
    page = slot - slot % mmap.PAGESIZE
    writable = ctypes.CDLL(None, use_errno=True).mprotect(
        ctypes.c_void_p(page), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE
    )
    if writable != 0:
        return False
    ctypes.c_void_p.from_address(slot).value = ctypes.cast(_HOLD, ctypes.c_void_p).value
    return True


def _hold(code: int) -> None:
    end = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < end:
        with suppress(BaseException):  # a signal's exception has nowhere to go from here
            time.sleep(0.1)
    os.write(2, b"error: ray: the connection to its object store broke off, although its processes run; see its logs\n")
    os._exit(code and EXIT_CODE)


_HOLD = ctypes.CFUNCTYPE(None, ctypes.c_int)(_hold)
"""It has to outlive all calls."""


def _slot_of(name: bytes, library: Path) -> int | None:
    """Address of the slot through which the loaded `library` calls function `name`."""
    base = _address_of(library)
    if base is None:
        return None
    dynamic = _dynamic(base)
    for place, info, _ in _CALL.iter_unpack(ctypes.string_at(dynamic[_CALLS], dynamic[_CALLS_BYTES])):
        (offset,) = _SYMBOL.unpack(ctypes.string_at(dynamic[_SYMBOLS] + (info >> 32) * _SYMBOL.size, _SYMBOL.size))
        if ctypes.string_at(dynamic[_STRINGS] + offset) == name:
            return int(base + place)
    return None


def _address_of(library: Path) -> int | None:
    mapped = str(library.resolve())  # the kernel tells the file behind all links
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(mapped):
            return int(line.partition("-")[0], 16)
    return None


def _dynamic(base: int) -> dict[int, int]:
    """What the loader was told of a library at `base`, by the numbers of <elf.h>; addresses are absolute."""
    offset, size, count = _HEADER.unpack(ctypes.string_at(base, _HEADER.size))
    for index in range(count):
        kind, address, length = _SEGMENT.unpack(ctypes.string_at(base + offset + index * size, _SEGMENT.size))
        if kind == _SEGMENT_DYNAMIC:
            entries = dict(_ENTRY.iter_unpack(ctypes.string_at(base + address, length)))
            return {
                tag: value if tag == _CALLS_BYTES or value > base else base + value for tag, value in entries.items()
            }
    return {}
