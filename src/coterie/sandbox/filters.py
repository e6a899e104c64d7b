"""The system-call filter as classic BPF, for x86_64 and aarch64.

A call that only an attack makes (new process, program, socket, signal, a file opened for writing) ends the process with
SIGSYS, so that the breach is seen and named. A call that a library may make in passing (prctl, io_uring, ...) is refused
with EPERM.
"""

from __future__ import annotations

import struct

_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | 1
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000
_WRITING = 0o3 | 0o100 | 0o1000  # O_WRONLY | O_RDWR, O_CREAT, O_TRUNC (O_TMPFILE needs O_RDWR)

# name: (x86_64, aarch64); None where the architecture has no such call
_FATAL: dict[str, tuple[int | None, int | None]] = {
    "fork": (57, None), "vfork": (58, None), "clone": (56, 220), "clone3": (435, 435),
    "execve": (59, 221), "execveat": (322, 281),
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    "accept": (43, 202), "accept4": (288, 242), "sendto": (44, 206), "sendmsg": (46, 211),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35),
    "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "link": (86, None), "linkat": (265, 37),
    "symlink": (88, None), "symlinkat": (266, 36), "mknod": (133, None), "mknodat": (259, 33), "creat": (85, None),
    "truncate": (76, 45), "chmod": (90, None), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchownat": (260, 54), "lchown": (94, None), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "reboot": (169, 142), "init_module": (175, 105), "finit_module": (313, 273),
}  # fmt: skip
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    "prctl": (157, 167), "unshare": (272, 97), "setns": (308, 268), "setsid": (112, 157), "setpgid": (109, 154),
    "openat2": (437, 437), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "memfd_create": (319, 279), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180), "setpriority": (141, 140), "setrlimit": (160, 164),
    "prlimit64": (302, 261), "sched_setaffinity": (203, 122), "utimensat": (280, 88), "setxattr": (188, 5),
    "fsetxattr": (190, 7), "fchmod": (91, 52), "fchown": (93, 55),
}  # fmt: skip
_OPEN: dict[str, tuple[int | None, int | None, int]] = {"open": (2, None, 1), "openat": (257, 56, 2)}  # argument: flags


def program(machine: str) -> bytes | None:
    """The filter as an array of ``struct sock_filter``, or None for an architecture without one."""
    if machine not in _ARCH:
        return None
    column = 0 if machine == "x86_64" else 1
    code = [
        _op(_LOAD, 4),  # the architecture of the call
        _op(_EQUAL, _ARCH[machine], 1, 0),
        _op(_RETURN, _KILL),
        _op(_LOAD, 0),  # its number
    ]
    if machine == "x86_64":
        code += [_op(_AT_LEAST, _X32, 0, 1), _op(_RETURN, _KILL)]
    for numbers, verdict in ((_FATAL, _KILL), (_REFUSED, _REFUSE)):
        for pair in numbers.values():
            number = pair[column]
            if number is not None:
                code += [_op(_EQUAL, number, 0, 1), _op(_RETURN, verdict)]
    for x86, arm, argument in _OPEN.values():
        number = x86 if column == 0 else arm
        if number is not None:
            code += [
                _op(_EQUAL, number, 0, 4),
                _op(_LOAD, 16 + 8 * argument),  # low half of the argument (little endian)
                _op(_ANY_BIT, _WRITING, 0, 1),
                _op(_RETURN, _KILL),
                _op(_RETURN, _ALLOW),
            ]
    return b"".join([*code, _op(_RETURN, _ALLOW)])


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)
