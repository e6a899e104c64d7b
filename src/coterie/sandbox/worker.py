"""The process inside the cage that never sees an answer itself: it starts, seals, times and replaces those that do.

Started by :mod:`coterie.sandbox.pool` as a fresh interpreter. It imports everything the scorers need, raises the walls that
hold for all processes below it, and then serves: each answer goes to a *runner*, a sealed child, or (generated code) to a
pair of children of its own. A runner that does not answer in time, dies or says something malformed is killed and replaced;
forking one takes milliseconds, since everything is imported already.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import sys
from typing import NoReturn

from coterie.sandbox import frames, jobs, walls
from coterie.sandbox.replies import Reply, breach, check_reply

OUTPUT_BYTES = 2**20  # most bytes a sealed process may write to its standard output
_RECYCLE = 5000  # jobs after which a runner is replaced, so that leaks in libraries stay bounded
_SIGNAL_KINDS = {signal.SIGSYS: "syscall", signal.SIGXCPU: "timeout", signal.SIGXFSZ: "output"}


class Runner:
    """A sealed child that scores answers one at a time."""

    def __init__(self, memory_mb: int, timeout_s: float) -> None:
        request_read, self._to = os.pipe()
        self._from, reply_write = os.pipe()
        self.pid = os.fork()
        self.jobs = 0
        if self.pid == 0:
            _become_runner(request_read, reply_write, memory_mb)
        os.close(request_read)
        os.close(reply_write)
        self._timeout_s = timeout_s
        self.report = json.loads(frames.receive(self._from, frames.MAX_REPLY, 30.0))

    def ask(self, op: str, blob: bytes) -> Reply:
        self.jobs += 1
        try:
            frames.send(self._to, op.encode() + b"\n" + blob)
            return check_reply(frames.receive(self._from, frames.MAX_REPLY, self._timeout_s))
        except frames.TooLate:
            return breach("timeout", f"no result within {self._timeout_s:g} s")
        except frames.TooLong:
            return breach("reply", "reply too long")
        except frames.Closed:
            return breach(*died(self.pid))

    def close(self) -> None:
        os.close(self._to)
        os.close(self._from)
        kill_and_reap(self.pid)


class Worker:
    """Serves batches of jobs from ``request`` and writes one reply each to ``reply`` (file descriptors)."""

    def __init__(self, request: int, reply: int, memory_mb: int, timeout_s: float) -> None:
        self._request, self._reply = request, reply
        self._memory_mb, self._timeout_s = memory_mb, timeout_s
        self._runner: Runner | None = None

    def serve(self, report: dict[str, str | None]) -> None:
        self._runner = Runner(self._memory_mb, self._timeout_s)
        frames.send(self._reply, json.dumps(report | self._runner.report).encode())
        while True:
            try:
                batch = pickle.loads(frames.receive(self._request, frames.MAX_REQUEST))  # from the trainer: trusted
            except frames.Closed:
                return
            for op, blob in batch:
                frames.send(self._reply, json.dumps(self._score(op, blob)).encode())

    def _score(self, op: str, blob: bytes) -> Reply:
        if op == "code":
            from coterie.sandbox.code import run_tests

            return run_tests(*pickle.loads(blob), memory_mb=self._memory_mb, timeout_s=self._timeout_s)
        if self._runner is None:
            self._runner = Runner(self._memory_mb, self._timeout_s)
        answer = self._runner.ask(op, blob)
        if op == "task_alone" or answer["outcome"] == "breach" or self._runner.jobs >= _RECYCLE:
            self._runner.close()
            self._runner = None
        return answer


def main(argv: list[str]) -> None:
    """Entry point: ``argv`` holds the memory limit (MiB) and the time limit (s)."""
    walls.die_with_parent()
    request, reply = _take_pipes()
    try:
        _serve(request, reply, int(argv[0]), float(argv[1]))
    except Exception as e:  # told to the trainer, whose side raises it
        frames.send(reply, json.dumps({"error": f"{type(e).__name__}: {e}"}).encode())
        raise


def _serve(request: int, reply: int, memory_mb: int, timeout_s: float) -> None:
    jobs.prepare()
    memory_mb += walls.mapped_mb()
    report = walls.namespaces()
    walls.die_with_parent()  # a change of user namespace forgets it
    child = os.fork()  # the first process of the new process namespace
    if child:
        os.close(request)
        os.close(reply)
        os.waitpid(child, 0)
        os._exit(0)
    walls.die_with_parent()
    report["no new privileges"] = walls.no_new_privileges()
    report["capabilities"] = walls.drop_capabilities()
    report["files"], report["tcp and signals"] = walls.landlock(sys.path)  # the interpreter's own folders
    walls.hide_memory()
    Worker(request, reply, memory_mb, timeout_s).serve(report)


def died(pid: int) -> tuple[str, str]:
    """How a child that closed its pipe ended: (kind of breach, words)."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # it may have closed its pipe and gone on
    return name_of_end(os.waitpid(pid, 0)[1])


def name_of_end(status: int) -> tuple[str, str]:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return _SIGNAL_KINDS.get(signal.Signals(number), "crash"), f"ended by {signal.Signals(number).name}"
    return "crash", f"ended with status {os.waitstatus_to_exitcode(status)}"


def kill_and_reap(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def reap_orphans() -> None:
    """Answer processes whose test process was killed (which kills them) become children of the worker: let them go."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def seal(keep: tuple[int, ...], memory_mb: int, cpu_s: float) -> dict[str, str | None]:
    """Make this process fit to see an answer: only ``keep`` and a small, capped standard output stay open."""
    walls.die_with_parent()
    sink = os.memfd_create("output") if walls.LINUX else os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        os.dup2(sink, fd)
    low = 3
    for fd in sorted(keep):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, 4096)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    walls.hide_memory()
    limited = walls.limits(memory_mb, cpu_s, output_bytes=OUTPUT_BYTES)
    return {"memory, time and output": limited, "system calls": walls.seccomp()}


def _become_runner(request: int, reply: int, memory_mb: int) -> NoReturn:
    report = seal((request, reply), memory_mb, cpu_s=24 * 3600.0)
    try:
        frames.send(reply, json.dumps(report).encode())
        while True:
            op, _, blob = frames.receive(request, frames.MAX_REQUEST).partition(b"\n")
            frames.send(reply, json.dumps(jobs.score(op.decode(), blob)).encode())
    finally:
        os._exit(0)


def _take_pipes() -> tuple[int, int]:
    """Move the pipes to the trainer away from the standard streams, which become /dev/null."""
    request, reply = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    sys.dont_write_bytecode = True
    return request, reply
