"""The walls of a scoring worker, one function each, by direct system calls (no privilege, no library needed).

Each wall returns None when it stands, or the reason why it does not. None is trusted alone: files are closed by Landlock
and again by the system-call filter, the network by its own namespace, by Landlock and by the filter, and so on.

Sources: kernel documentation, https://docs.kernel.org/userspace-api/landlock.html,
https://docs.kernel.org/userspace-api/seccomp_filter.html, and the manual pages unshare(2), capabilities(7).
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterable

from coterie.sandbox.filters import program

LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 22, 4, 38
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_CAPSET_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True) if LINUX else None


def no_new_privileges() -> str | None:
    """No program run from here can gain rights; needed by the two filters below."""
    return _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def die_with_parent() -> str | None:
    """The kernel kills this process when the thread that started it ends."""
    return _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def namespaces() -> dict[str, str | None]:
    """Own users, network (without any interface), process numbers (for children), IPC and mounts.

    Where the system forbids user namespaces but the process is root, the others are tried without it.
    """
    rest = _NEWNET | _NEWPID | _NEWIPC | _NEWUTS | _NEWNS
    failed = _unshare(_NEWUSER | rest)
    if failed is not None and LINUX and os.geteuid() == 0:
        failed = _unshare(rest)
    return {"network namespace": failed, "process namespace": failed}


def drop_capabilities() -> str | None:
    """Give up every capability, also those that come with a user namespace or with being root."""
    if _libc is None:
        return "not Linux"
    header = struct.pack("<Ii", _CAPSET_VERSION_3, 0)
    return _result(_libc.capset(header, bytes(24)))


def landlock(readable: Iterable[str]) -> tuple[str | None, str | None]:
    """Close the file system (except reading below ``readable``), TCP, abstract sockets and signals to others.

    Returns the states of the walls (files, TCP and signals).
    """
    if _libc is None:
        return "not Linux", "not Linux"
    abi = _libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if abi < 1:
        reason = f"Landlock is not available ({os.strerror(ctypes.get_errno())})"
        return reason, reason
    fs = (1 << 13) - 1  # execute, write, read, list, remove, make (ABI 1)
    fs |= (1 << 13) if abi >= 2 else 0  # rename across folders
    fs |= (1 << 14) if abi >= 3 else 0  # truncate
    fs |= (1 << 15) if abi >= 5 else 0  # ioctl on devices
    attributes = struct.pack("<Q", fs)
    if abi >= 4:
        attributes += struct.pack("<Q", 0b11)  # bind and connect TCP
    if abi >= 6:
        attributes += struct.pack("<Q", 0b11)  # abstract sockets, signals
    ruleset = _libc.syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        reason = os.strerror(ctypes.get_errno())
        return reason, reason
    for path in readable:
        _allow_reading(ruleset, path)
    failed = _result(_libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0))
    os.close(ruleset)
    return failed, failed or (None if abi >= 6 else f"Landlock ABI {abi} knows no {'signals' if abi >= 4 else 'TCP'}")


def seccomp() -> str | None:
    """The last wall: from here on no new process or thread, program, socket, signal, and no file opened for writing."""
    if _libc is None:
        return "not Linux"
    code = program(os.uname().machine)
    if code is None:
        return f"no system-call filter for {os.uname().machine}"
    held = ctypes.create_string_buffer(code)
    spec = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(held))
    return _prctl(_PR_SET_SECCOMP, 2, spec)


def limits(memory_mb: int, cpu_s: float, *, output_bytes: int) -> str | None:
    """Address space, CPU seconds from now, output per file, processes, open files, no core dump."""
    try:
        _limit(resource.RLIMIT_AS, memory_mb * 2**20)
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + cpu_s) + 2)
        _limit(resource.RLIMIT_FSIZE, output_bytes)
        _limit(resource.RLIMIT_NOFILE, 64)
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_NPROC, 0)
    except (OSError, ValueError) as e:
        return str(e)
    return None


def mapped_mb() -> int:
    """Address space in use by this process, in MiB (an estimate where /proc is missing)."""
    if not LINUX:
        return 1024
    with open("/proc/self/statm", encoding="ascii") as f:
        return int(f.read().split()[0]) * resource.getpagesize() // 2**20


def hide_memory() -> str | None:
    """Other processes of the same user may not look into this one's memory."""
    return _prctl(_PR_SET_DUMPABLE, 0)


def _limit(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def _allow_reading(ruleset: int, path: str) -> None:
    assert _libc is not None
    try:
        fd = os.open(path, os.O_PATH)
    except OSError:
        return  # a folder of sys.path that does not exist needs no reading
    try:
        access = _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)
        _libc.syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("<Qi", access, fd), 0)
    finally:
        os.close(fd)


def _unshare(flags: int) -> str | None:
    return "not Linux" if _libc is None else _result(_libc.unshare(flags))


def _prctl(option: int, value: int, pointer: bytes | None = None) -> str | None:
    if _libc is None:
        return "not Linux"
    last = ctypes.c_ulong(0)
    third = ctypes.c_char_p(pointer) if pointer is not None else last
    return _result(_libc.prctl(option, ctypes.c_ulong(value), third, last, last))


def _result(code: int) -> str | None:
    return None if code == 0 else os.strerror(ctypes.get_errno())
