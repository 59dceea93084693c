"""Runs one program with as little as possible: a script of its own, started by `rewards.sandbox.program`.

It reads a request (JSON) from standard input and writes what happened (JSON) to standard output. It imports nothing but
the standard library, because it runs without the packages of its environment. With namespaces it is three processes:
the launcher keeps the time, the first process of the PID namespace only waits (when it ends, the kernel kills whatever
else lives in there), and the third one gives up its rights and becomes the program. Where a judge is asked for, it is a
process beside the program: a pipe each way joins them, its streams are the ones that are reported, and its end counts.
"""

import ctypes
import errno
import fcntl
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from functools import partial

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWUSER, _CLONE_NEWNS, _CLONE_NEWPID = 0x10000000, 0x00020000, 0x20000000
_CLONE_NEWNET, _CLONE_NEWIPC, _CLONE_NEWUTS = 0x40000000, 0x08000000, 0x04000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _PR_SET_CHILD_SUBREAPER = 1, 4, 22, 38, 36
_SECCOMP_MODE_FILTER = 2
_SETUP_FAILED = 97
_NEW_ROOT, _WORK = "/tmp", "/sandbox"
_FIRST_FREE_DESCRIPTOR = 10
# What a machine answers that permits no namespaces; anything else is a fault of the set-up.
_NOT_PERMITTED = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ENOSPC, errno.EINVAL)

# Numbers of the system calls of each architecture, and what marks it in a filter.
_ARCHITECTURES = {
    "x86_64": {
        "audit": 0xC000003E, "pivot_root": 155, "clone": 56, "clone3": 435,
        "denied": [41, 101, 165, 248, 249, 250, 272, 298, 308, 310, 311, 321, 323, 424, 425], "signals": [62, 200, 234],
    },
    "aarch64": {
        "audit": 0xC00000B7, "pivot_root": 41, "clone": 220, "clone3": 435,
        "denied": [198, 117, 40, 217, 218, 219, 97, 241, 268, 270, 271, 280, 282, 424, 425], "signals": [129, 130, 131],
    },
}  # fmt: skip
# In that order: socket, ptrace, mount, add_key, request_key, keyctl, unshare, perf_event_open, setns,
# process_vm_readv, process_vm_writev, bpf, userfaultfd, pidfd_send_signal, io_uring_setup; kill, tkill, tgkill.


def main() -> None:
    request = json.load(sys.stdin)
    _check(_LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), "prctl")
    if not request["namespaces"]:  # in them nothing sees this process, and a process that hides cannot map its user
        _check(_LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")
    owner = _own_uid()
    if request["namespaces"]:
        try:
            _enter_namespaces()
        except OSError as error:
            json.dump({"not_permitted" if error.errno in _NOT_PERMITTED else "set_up_failure": str(error)}, sys.stdout)
            return
        _build_root(request["visible"], request["work_bytes"])
        work = _WORK
        os.mkdir(work)
        answer = _run(request, work, owner)
    else:
        answer = _run_in_folder(request, owner)
    json.dump(answer, sys.stdout)


def _run_in_folder(request: dict, owner: int) -> dict:
    import shutil
    import tempfile  # both are slow to import, and not needed in namespaces

    _check(_LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1), "prctl")
    work = tempfile.mkdtemp(prefix="rlpipe-code-")
    try:
        return _run(request, work, owner)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _own_uid() -> int:
    """A user id that nothing else on this machine has, if we are root: it holds the process limit and owns no file."""
    return 2**30 + os.getpid() if os.geteuid() == 0 else os.geteuid()


def _enter_namespaces() -> None:
    uid, gid = os.geteuid(), os.getegid()
    flags = _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS
    if uid:
        flags |= _CLONE_NEWUSER
    _check(_LIBC.unshare(flags), "unshare")
    if uid:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)


def _build_root(visible: list[str], work_bytes: int) -> None:
    """A root in memory that shows `visible` read-only and is gone with this process."""
    # Opened before the new root covers the place where they may lie.
    sources = {path: os.open(path, os.O_PATH) for path in visible if os.path.exists(path)}
    _mount("tmpfs", _NEW_ROOT, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={work_bytes},mode=0755")
    for path, descriptor in sources.items():
        target = _NEW_ROOT + path
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            os.makedirs(target, mode=0o755, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        _mount(f"/proc/self/fd/{descriptor}", target, None, _MS_BIND)
        kept = os.statvfs(target).f_flag & 0xF  # flags that a user namespace may not take away
        _mount(None, target, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | kept)
        os.close(descriptor)
    os.makedirs(f"{_NEW_ROOT}/tmp", exist_ok=True)  # it is there if a folder below it is visible
    os.chmod(f"{_NEW_ROOT}/tmp", 0o1777)  # nosec B103
    os.chdir(_NEW_ROOT)
    pivot_root = _architecture()["pivot_root"]
    _check(_LIBC.syscall(pivot_root, b".", b"."), "pivot_root")
    _check(_LIBC.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir("/")


def _run(request: dict, work: str, owner: int) -> dict:
    for name, text in request["files"].items():
        _write(os.path.join(work, name), text)
    if os.geteuid() == 0:
        os.chown(work, owner, owner)
    os.chmod(work, 0o700)
    jobs, outputs = _jobs(request)
    # Both ends close when a program is executed, so that what arrives can only come from the set-up.
    failures, failure = os.pipe()
    if request["namespaces"]:
        children = [_fork(failure, lambda: _first_process(request, work, owner, jobs, failure))]
    else:
        children = [_fork(failure, partial(_alone, request, work, owner, job)) for job in jobs]
    os.close(failure)
    _close_all(jobs)
    status, timed_out = _wait(children, request["wall_seconds"])
    if not request["namespaces"]:
        _kill_left_over(owner)
    return {
        "exit_code": os.waitstatus_to_exitcode(status),
        "timed_out": timed_out,
        "set_up_failure": os.read(failures, 1000).decode(errors="replace"),
        **{name: _read(descriptor, request["output_bytes"]) for name, descriptor in outputs.items()},
    }


def _jobs(request: dict) -> tuple[list[dict], dict[str, int]]:
    """What to execute with which descriptors, the one whose end counts first; and the files of its output.

    These have no name, so that nothing in the sandbox can open them.
    """
    outputs = {name: _free(os.memfd_create(name)) for name in ("stdout", "stderr")}
    source = _free(os.memfd_create("stdin"))
    os.pwrite(source, (request["judge"] or request)["stdin"].encode("utf-8", errors="replace"), 0)
    streams = [source, *outputs.values()]
    if request["judge"] is None:
        return [{"arguments": request["arguments"], "descriptors": streams}], outputs
    to_judge, to_program = (tuple(map(_free, os.pipe())) for _ in range(2))
    nothing = [_free(os.open("/dev/null", os.O_RDWR)) for _ in range(3)]
    judge = {"arguments": request["judge"]["arguments"], "descriptors": [*streams, to_judge[0], to_program[1]]}
    program = {"arguments": request["arguments"], "descriptors": [*nothing, to_program[0], to_judge[1]]}
    return [judge, program], outputs


def _free(descriptor: int) -> int:
    """The same file under a number that stands for nothing else; closes the old number."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_DESCRIPTOR)
    os.close(descriptor)
    return moved


def _close_all(jobs: list[dict]) -> None:
    """What only the programs may hold: the end of one closes its pipes. Outputs are read afterwards, and stay."""
    for job in jobs:
        for descriptor in job["descriptors"][3:]:
            os.close(descriptor)


def _fork(failure: int, action: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        _in_child(failure, action)
    return child


def _wait(children: list[int], wall_seconds: float) -> tuple[int, bool]:
    """How the first child ended, and whether it was late. All are gone then."""
    late = []

    def kill(*_: object) -> None:
        late.append(True)
        os.kill(children[0], signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill)
    signal.setitimer(signal.ITIMER_REAL, wall_seconds)
    _, status = os.waitpid(children[0], 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    for other in children[1:]:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
    return status, bool(late)


def _first_process(request: dict, work: str, owner: int, jobs: list[dict], failure: int) -> None:
    """Waits for the process whose end counts; with this one the kernel ends all others of the namespace."""
    _check(_LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), "prctl")
    first, *_ = [_fork(failure, partial(_become, request, work, owner, job)) for job in jobs]
    os.close(failure)
    _close_all(jobs)
    while True:
        ended, status = os.wait()
        if ended == first:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _alone(request: dict, work: str, owner: int, job: dict) -> None:
    _check(_LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), "prctl")
    os.setsid()
    _become(request, work, owner, job)


def _become(request: dict, work: str, owner: int, job: dict) -> None:
    """Give up every right and execute the program."""
    for target, descriptor in enumerate(job["descriptors"]):
        os.dup2(descriptor, target)
    os.chdir(work)
    for name, value in request["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(owner, owner, owner)
        os.setresuid(owner, owner, owner)
    _check(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    _install_filter(deny_signals=not request["namespaces"])
    os.execve(job["arguments"][0], job["arguments"], {**request["environment"], "HOME": work, "TMPDIR": work})


def _install_filter(deny_signals: bool) -> None:
    """Refuse the system calls that open the network, touch other processes or make namespaces."""
    numbers = _architecture()
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, kill, absent = 0x7FFF0000, 0x00050001, 0x80000000, 0x00050026
    denied = numbers["denied"] + (numbers["signals"] if deny_signals else [])
    rules = [(load, 0, 0, 4), (equal, 1, 0, numbers["audit"]), (answer, 0, 0, kill), (load, 0, 0, 0)]
    rules += [(at_least, 0, 1, 0x40000000), (answer, 0, 0, kill)]
    # glibc falls back from clone3, whose flags a filter cannot see, to clone.
    rules += [(equal, 0, 1, numbers["clone3"]), (answer, 0, 0, absent)]
    for number in denied:
        rules += [(equal, 0, 1, number), (answer, 0, 0, refuse)]
    rules += [
        (equal, 0, 3, numbers["clone"]),
        (load, 0, 0, 16),
        (any_bit, 0, 1, _CLONE_NEWUSER),
        (answer, 0, 0, refuse),
    ]
    rules += [(answer, 0, 0, allow)]
    code = b"".join(struct.pack("HBBI", *rule) for rule in rules)
    buffer = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxP", len(rules), ctypes.addressof(buffer))
    _check(_LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(program), 0, 0), "seccomp")


def _kill_left_over(owner: int) -> None:
    """Without a PID namespace, as root: all processes of the own user id. (Any other user's program cannot fork.)"""
    if os.geteuid():
        return
    killer = os.fork()
    if killer == 0:
        os.setresuid(owner, owner, owner)
        try:
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    # They are our children now, whoever started them: wait until the last one is gone.
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


def _in_child(failure: int, action: Callable[[], None]) -> None:
    try:
        action()
    except BaseException as error:
        os.write(failure, str(error).encode())
    os._exit(_SETUP_FAILED)


def _architecture() -> dict:
    try:
        return _ARCHITECTURES[os.uname().machine]
    except KeyError:
        raise OSError(f"no system call numbers for {os.uname().machine}") from None


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind)]
    _check(_LIBC.mount(*encoded, ctypes.c_ulong(flags), None if data is None else data.encode()), f"mount {target}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)


def _read(descriptor: int, limit: int) -> str:
    return os.pread(descriptor, limit, 0).decode("utf-8", errors="replace")


if __name__ == "__main__":
    main()
