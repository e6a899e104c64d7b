"""A helper process with a fixed hash seed that makes the problems which depend on it.

A few reasoning-gym tasks walk over sets of texts while they draw, and the order of such a set differs from process to process
(Python randomises the hash of text). Their problems are made in one helper process started with ``PYTHONHASHSEED=0``, so that
an id means the same problem everywhere. It sees no answers, only task names and indices.
"""

from __future__ import annotations

import atexit
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError
from coterie.tasks.base import UnknownProblem

_START = "import sys; sys.path[:0] = [sys.argv[1]]; from coterie.tasks.maker import serve; serve()"
_lock = threading.Lock()
_process: subprocess.Popen[bytes] | None = None


def item(name: str, params: str, index: int) -> dict[str, Any]:
    """The record of reasoning-gym task ``name`` (``params``: JSON) at ``index``, made under hash seed 0.

    Raises:
        UnknownProblem: there is no problem at that index.
        CoterieError: the helper process ended.
    """
    with _lock:
        process = _running()
        assert process.stdin is not None and process.stdout is not None
        try:
            pickle.dump((name, params, index), process.stdin)
            process.stdin.flush()
            record, error = pickle.load(process.stdout)
        except (OSError, EOFError) as e:
            raise CoterieError(f"task {name}: the process that makes its problems ended") from e
    if error is not None:
        raise UnknownProblem(error)
    out: dict[str, Any] = record
    return out


def serve() -> None:
    """Main function of the helper process: until its input ends, read requests and write records."""
    import json

    from coterie.tasks import reasoning_gym

    requests, records = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not end up among the records
    while True:
        try:
            name, params, index = pickle.load(requests)
        except EOFError:
            return
        reply: tuple[dict[str, Any] | None, str | None]
        try:
            reply = reasoning_gym.item(name, json.loads(params), index), None
        except UnknownProblem as e:
            reply = None, str(e)
        pickle.dump(reply, records)
        records.flush()


def _running() -> subprocess.Popen[bytes]:
    global _process
    if _process is None or _process.poll() is not None:
        source = str(Path(__file__).resolve().parents[2])
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        command = [sys.executable, "-P", "-c", _START, source]
        _process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        atexit.register(_end, _process)
    return _process


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.wait()
    process.stdout.close()
