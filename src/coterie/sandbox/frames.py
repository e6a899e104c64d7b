"""Length-prefixed messages over pipes, with a cap and a deadline: what the two ends of the cage say to each other."""

from __future__ import annotations

import os
import select
import struct
import time

MAX_REPLY = 64 * 1024
"""Most bytes accepted from a process that has seen an answer."""
MAX_REQUEST = 256 * 2**20


class Closed(Exception):
    """The other end is gone."""


class TooLate(Exception):
    """Nothing complete came before the deadline."""


class TooLong(Exception):
    """The other end announced more than it may send."""


def send(fd: int, payload: bytes) -> None:
    """Write one message. Raises Closed."""
    view = memoryview(struct.pack("<I", len(payload)) + payload)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except (BrokenPipeError, OSError) as e:
        raise Closed from e


def receive(fd: int, limit: int, timeout_s: float | None = None) -> bytes:
    """Read one message of at most ``limit`` bytes. Raises Closed, TooLate, TooLong."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    (size,) = struct.unpack("<I", _exactly(fd, 4, deadline))
    if size > limit:
        raise TooLong
    return _exactly(fd, size, deadline)


def _exactly(fd: int, size: int, deadline: float | None) -> bytes:
    out = bytearray()
    while len(out) < size:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                raise TooLate
        try:
            chunk = os.read(fd, min(size - len(out), 2**20))
        except OSError as e:
            raise Closed from e
        if not chunk:
            raise Closed
        out += chunk
    return bytes(out)
