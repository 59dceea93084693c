"""What a process of the sandbox takes from itself before anybody else's code runs in it."""

import ctypes
import os
import struct

_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 4, 22, 38, 2
_EXECVE = {"x86_64": (59, 322), "aarch64": (221, 281)}  # execve, execveat; enter.py has refused other architectures
# kill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_open, prlimit64: each names a process first.
_SIGNALS = {"x86_64": (62, 234, 129, 297, 434, 302), "aarch64": (129, 131, 138, 240, 434, 261)}
# ptrace, process_vm_readv, process_vm_writev: no grader needs them, and the process is no first argument.
_MEMORY = {"x86_64": (101, 310, 311), "aarch64": (117, 270, 271)}
_LOAD, _EQUAL, _ANSWER = 0x20, 0x15, 0x06
_NUMBER, _FIRST_ARGUMENT = 0, 16
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050001


def forbid_execve() -> None:
    """No other program, with other flags, takes the place of this one or starts beside it."""
    rules = [(_LOAD, 0, 0, _NUMBER)]
    for number in _EXECVE[os.uname().machine]:
        rules += [(_EQUAL, 0, 1, number), (_ANSWER, 0, 0, _REFUSE)]
    _install([*rules, (_ANSWER, 0, 0, _ALLOW)])


def forbid_reach(process: int, group: int) -> None:
    """No signals to one process and its group, no limits for it, and no tracing of any; where the system calls of this
    machine are known."""
    rules = [(_LOAD, 0, 0, _NUMBER)]
    for number in _MEMORY.get(os.uname().machine, ()):
        rules += [(_EQUAL, 0, 1, number), (_ANSWER, 0, 0, _REFUSE)]
    numbers = _SIGNALS.get(os.uname().machine, ())
    for left, number in zip(range(len(numbers), 0, -1), numbers, strict=True):
        rules += [(_EQUAL, left, 0, number)]
    rules += [(_ANSWER, 0, 0, _ALLOW), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    for named in (process, -group):
        rules += [(_EQUAL, 0, 1, named % 2**32), (_ANSWER, 0, 0, _REFUSE)]
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _install([*rules, (_ANSWER, 0, 0, _ALLOW)])


def _install(rules: list[tuple[int, int, int, int]]) -> None:
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    program = struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code))
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(program), 0, 0)


def hide_memory() -> None:
    """Nobody of the same user can read this process's memory or descriptors in /proc."""
    _prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def _prctl(*arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(*arguments) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
