"""The machine: memory, shared memory, limits, ports, disk."""

import importlib.util
import os
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rlpipe.commands.doctor.check import Check, fail, ok, warn

_SHARED_MEMORY_BYTES = 2 * 10**9
_OPEN_FILES = 16384
_FREE_DISK_BYTES = 5 * 10**9
_PORTS = 16


def check_machine(run_directory: Path) -> Iterator[Check]:
    """Everything that needs no GPU and no configuration."""
    yield _python()
    yield _bytecode()
    yield _memory()
    yield _shared_memory(Path("/dev/shm"))
    yield _open_files()
    yield _ports()
    yield _disk(run_directory)


def _python() -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] in ((3, 11), (3, 12)):
        return ok("python", found)
    return fail("python", found, "use Python 3.11 or 3.12")


def _bytecode() -> Check:
    """Processes of a run import thousands of modules each, which take two to three times as long to compile as well."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return warn("compiled modules", "torch is missing", "install the packages, then ask again")
    kept = Path(importlib.util.cache_from_source(spec.origin))
    existing = next(path for path in kept.parents if path.exists())
    try:
        if not kept.exists():
            tempfile.TemporaryFile(dir=existing).close()
    except OSError:
        fix = "set PYTHONPYCACHEPREFIX to a folder of yours: without them a start takes two to three times as long"
        return warn("compiled modules", f"{existing} cannot be written", fix)
    return ok(
        "compiled modules", f"kept below {sys.pycache_prefix}" if sys.pycache_prefix else "kept beside their sources"
    )


def _memory() -> Check:
    import psutil

    memory = psutil.virtual_memory()
    cores = len(os.sched_getaffinity(0))
    found = f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free, {cores} cores"
    if memory.available < 4e9:
        return warn("host memory", found, "the demo needs 4 GB: end other programs")
    return ok("host memory", found)


def _shared_memory(path: Path) -> Check:
    """Ray keeps its object store there, and falls back to slow files where it is too small."""
    if not path.exists():
        return warn("/dev/shm", "does not exist", "mount a tmpfs there; in Docker set --shm-size")
    free = shutil.disk_usage(path).free
    if free < _SHARED_MEMORY_BYTES:
        fix = "mount it with more room, in Docker by --shm-size=16g; or lower ray.object_store_bytes"
        return warn("/dev/shm", f"{free / 1e9:.2f} GB free", fix)
    return ok("/dev/shm", f"{free / 1e9:.1f} GB free")


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _OPEN_FILES:
        return warn("open files", f"limit {soft}", f"ulimit -n {min(65536, hard) if hard > 0 else 65536}")
    return ok("open files", f"limit {'none' if soft == resource.RLIM_INFINITY else soft}")


def _ports() -> Check:
    """Engines, Ray and the actor take free ports of this address and talk to each other through it."""
    address = _own_address()
    sockets = []
    try:
        for _ in range(_PORTS):
            listener = socket.create_server((address, 0))
            sockets.append(listener)
            socket.create_connection(listener.getsockname(), timeout=2).close()
    except OSError as error:
        return fail("ports", f"{address}: {error}", "allow connections of this host to itself in its firewall")
    finally:
        for listener in sockets:
            listener.close()
    return ok("ports", f"{_PORTS} free ports of {address} answer")


def _own_address() -> str:
    """The address that other hosts would reach; the loopback where there is no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a datagram socket sends nothing when it connects
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def _disk(folder: Path) -> Check:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if not os.access(existing, os.W_OK):
        return fail("disk", f"{existing} cannot be written", "set run.directory to a folder of yours")
    if free < _FREE_DISK_BYTES:
        return warn("disk", f"{free / 1e9:.1f} GB free at {existing}", "free some, or set run.directory elsewhere")
    return ok("disk", f"{free / 1e9:.0f} GB free at {existing}")
