"""The trainer's side of the cage: starts workers, hands them batches, replaces those that fail.

One thread per worker starts it, feeds it and reads its replies, and lives as long as the worker does (the kernel kills a
worker whose starting thread ends). Nothing a worker sends is unpickled; a reply is at most 64 KiB of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError
from coterie.sandbox import frames
from coterie.sandbox.replies import Reply, breach, check_reply

_Job = tuple[str, bytes, "Future[Reply]"]

_BATCH = 64  # jobs handed over at once: enough to hide the pipe, few enough to share among workers
_START_S = 120.0
_GRACE_S = 20.0  # beyond a job's own limit, before the whole worker is killed from here
_START = "import sys; sys.path[:0] = [sys.argv.pop(1)]; from coterie.sandbox.worker import main; main(sys.argv[1:])"


class Pool:
    """``workers`` scoring processes, started with the first job.

    Raises (from :meth:`submit`'s future): CoterieError if a worker cannot be started.
    """

    def __init__(self, workers: int, *, timeout_s: float, memory_mb: int) -> None:
        self.timeout_s, self.memory_mb = timeout_s, memory_mb
        self._size = workers
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._report: Future[dict[str, str | None]] = Future()
        self.restarts = 0

    def submit(self, op: str, payload: Any) -> Future[Reply]:
        """Score ``payload`` (pickled here, by the trainer) by scorer ``op``."""
        future: Future[Reply] = Future()
        self._start()
        self._jobs.put((op, pickle.dumps(payload, protocol=5), future))
        return future

    def report(self) -> dict[str, str | None]:
        """Wall -> None if it stands, else why not. Starts a worker if none runs. Raises CoterieError if none can."""
        self._start()
        return self._report.result()

    def close(self) -> None:
        """Finish what was submitted, then end the workers."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _start(self) -> None:
        with self._lock:
            while len(self._threads) < self._size:
                thread = threading.Thread(target=self._run, name=f"scoring-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _run(self) -> None:
        worker: _Process | None = None
        todo: list[_Job] = []
        suspect: _Job | None = None
        open_for_jobs = True
        while open_for_jobs or todo:
            try:
                worker = worker or self._spawn()
                if not todo:
                    todo, open_for_jobs = self._take()
                worker.score(todo)
            except _Lost as e:
                if worker is None:
                    self._give_up(todo, str(e))
                    return
                worker.kill()
                worker = None
                self.restarts += 1
                if todo and todo[0] is suspect:
                    todo.pop(0)[2].set_result(breach("worker", str(e)))
                suspect = todo[0] if todo else None  # tried once more: the loss may not be its fault
        if worker is not None:
            worker.kill()

    def _spawn(self) -> _Process:
        worker = _Process(self.memory_mb, self.timeout_s)
        with self._lock:
            if not self._report.done():
                self._report.set_result(worker.report)
        return worker

    def _take(self) -> tuple[list[_Job], bool]:
        """Wait for a job, then take what else is there, up to a batch. False: no more will come."""
        out: list[_Job] = []
        with contextlib.suppress(queue.Empty):
            while len(out) < _BATCH:
                job = self._jobs.get(block=not out)
                if job is None:
                    return out, False
                out.append(job)
        return out, True

    def _give_up(self, todo: list[_Job], why: str) -> None:
        """No worker can be started: say so to everybody who waits, now and later."""
        error = CoterieError(f"scoring worker could not be started: {why}")
        with self._lock:
            if not self._report.done():
                self._report.set_exception(error)
        more = True
        while more:
            for _, _, future in todo:
                future.set_exception(error)
            todo, more = self._take()
        for _, _, future in todo:
            future.set_exception(error)


class _Lost(Exception):
    """The worker process is of no more use."""


class _Process:
    """One worker process: a fresh interpreter without our environment, descriptors, session or folder."""

    def __init__(self, memory_mb: int, timeout_s: float) -> None:
        self._deadline_s = timeout_s + _GRACE_S
        self._folder = tempfile.mkdtemp(prefix="coterie-scoring-")
        source = str(Path(__file__).resolve().parents[2])
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _START, source, str(memory_mb), str(timeout_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            cwd=self._folder,
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        try:
            self.report: dict[str, str | None] = json.loads(frames.receive(self._from, frames.MAX_REPLY, _START_S))
        except (frames.Closed, frames.TooLate, frames.TooLong, ValueError) as e:
            self.kill()
            raise _Lost(f"no greeting ({type(e).__name__})") from e
        if "error" in self.report:
            self.kill()
            raise _Lost(str(self.report["error"]))

    def score(self, todo: list[_Job]) -> None:
        """Score and remove every job of ``todo``. Raises _Lost; the job that was being scored is then first in ``todo``."""
        try:
            if todo:
                frames.send(self._to, pickle.dumps([(op, blob) for op, blob, _ in todo], protocol=5))
            while todo:
                reply = check_reply(frames.receive(self._from, frames.MAX_REPLY, self._deadline_s))
                todo.pop(0)[2].set_result(reply)
        except frames.TooLate as e:
            raise _Lost(f"no reply within {self._deadline_s:g} s") from e
        except (frames.Closed, frames.TooLong) as e:
            raise _Lost(f"worker ended ({type(e).__name__})") from e

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)
