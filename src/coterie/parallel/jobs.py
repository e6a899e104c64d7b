"""Training runs as processes: some at a time on this machine, or as tasks of a Ray cluster.

A run that dies is started again from its last checkpoint; the others are not touched. What is finished is not started.
"""

from __future__ import annotations

import importlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from coterie.config import Config
from coterie.errors import CoterieError, UserError
from coterie.interrupts import sigterm_interrupts
from coterie.parallel.plan import Job, finished, gpus
from coterie.rundir import write_atomic

Note = Callable[[str], None]


class Failed(CoterieError):
    """A run that died more often than it may."""


class Processes:
    """The processes started so far, so that all of them can be ended at once."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal may arrive while the main thread holds it
        self._live: set[subprocess.Popen[bytes]] = set()
        self.closed = False

    def run(self, command: Sequence[str], log: Path, threads: int, gpu: str | None = None) -> int:
        """Start, wait, return the exit code. What the process prints is appended to ``log``. ``gpu``: the only one it sees."""
        env = os.environ | {"OMP_NUM_THREADS": str(threads)} | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
        with open(log, "ab") as out:
            with self._lock:
                if self.closed:
                    return -signal.SIGTERM
                process = subprocess.Popen(
                    command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env
                )
                self._live.add(process)
            code = process.wait()
        with self._lock:
            self._live.discard(process)
        return code

    def close(self) -> None:
        """End what still runs; nothing can be started after."""
        with self._lock:
            self.closed = True
            for process in self._live:
                process.terminate()


def carry_out(job: Job, folder: Path, retries: int, note: Note, processes: Processes, gpu: str | None = None) -> float:
    """Do a job's runs in order; returns the seconds it took.

    Raises:
        Failed: names run, exit code, last words and log.
    """
    began = time.perf_counter()
    for i, cfg in enumerate(job.runs):
        if finished(cfg):
            continue
        name = job.name if len(job.runs) == 1 else f"{job.name}, stage {i + 1} of {len(job.runs)}"
        stem = folder / f"{job.name}_{i}"
        write_atomic(stem.with_suffix(".toml"), cfg.to_toml())
        command = [sys.executable, "-m", "coterie", "train"]
        command += [str(stem.with_suffix(".toml")), "--json"]
        resumed = (Path(cfg.run_dir) / "config.toml").exists()
        note(f"{name}: {'resumed' if resumed else 'started'} ({cfg.steps} steps{f', GPU {gpu}' if gpu else ''})")
        for attempt in range(retries + 1):
            code = processes.run(command, stem.with_suffix(".log"), cfg.threads, gpu)
            if code == 0:
                break
            words = f"exit code {code}: {_last_words(stem.with_suffix('.log'))} (see {stem.with_suffix('.log')})"
            # 2: the config or the folder, which another try does not change
            if code == 2 or attempt == retries or processes.closed:
                raise Failed(f"{name} failed, {words}")
            note(f"{name}: {words}; started again from its last checkpoint")
    seconds = time.perf_counter() - began
    note(f"{job.name}: finished after {seconds:.0f} s")
    return seconds


def run_jobs(jobs: Sequence[Job], root: Path, cfg: Config, workers: int, note: Note) -> None:
    """Carry out all jobs that are not finished, ``workers`` at a time.

    Raises:
        CoterieError: names those that failed; the others have been carried to their end. The same command goes on.
    """
    todo = [j for j in jobs if not all(finished(r) for r in j.runs)]
    for j in jobs:
        if j not in todo:
            note(f"{j.name}: finished before")
    if not todo:
        return
    folder = root / "jobs"
    folder.mkdir(parents=True, exist_ok=True)
    errors = (
        _on_ray(todo, folder, cfg, note) if cfg.parallel.backend == "ray" else _here(todo, folder, cfg, workers, note)
    )
    if errors:
        raise CoterieError("\n".join([*errors, "the same command goes on with what is missing"]))


def _here(todo: Sequence[Job], folder: Path, cfg: Config, workers: int, note: Note) -> list[str]:
    processes, errors = Processes(), []
    free: queue.Queue[str | None] = queue.Queue()
    for place in gpus(cfg) or [None] * workers:
        free.put(place)

    def work(job: Job) -> None:
        place = free.get()
        try:
            carry_out(job, folder, cfg.parallel.retries, note, processes, place)
        finally:
            free.put(place)

    with ThreadPoolExecutor(workers, "coterie-expert") as pool, sigterm_interrupts(processes.close):
        try:
            for done in as_completed([pool.submit(work, j) for j in todo]):
                try:
                    done.result()
                except Failed as e:
                    errors.append(str(e))
        finally:
            processes.close()
    return errors


def _on_ray(todo: Sequence[Job], folder: Path, cfg: Config, note: Note) -> list[str]:
    """One Ray task per job. Run directories must lie on a file system that all machines of the cluster share."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as e:
        raise UserError("parallel.backend = ray needs the extra: pip install -e '.[ray]'") from e
    if not ray.is_initialized():
        try:  # RAY_ADDRESS names a cluster; else one on this machine
            ray.init(log_to_driver=False, include_dashboard=False)
        except Exception as e:  # whatever of sockets, processes and time-outs stops it
            raise CoterieError(f"Ray does not start ({e}); does RAY_ADDRESS name a cluster that runs?") from e
    each = 1 if cfg.model.device != "cpu" and ray.cluster_resources().get("GPU", 0) >= 1 else 0
    task = ray.remote(num_cpus=todo[0].runs[0].threads, num_gpus=each, max_retries=cfg.parallel.retries)(remote_job)
    waiting = {task.remote(j, str(folder), cfg.parallel.retries): j for j in todo}
    errors = []
    while waiting:
        ready, _ = ray.wait(list(waiting), num_returns=1)
        job = waiting.pop(ready[0])
        try:
            lines, error = ray.get(ready[0])
        except ray.exceptions.RayError as e:
            lines, error = [], f"{job.name}: the cluster lost it ({type(e).__name__})"
        for line in lines:
            note(line)
        errors += [error] if error else []
    return errors


def remote_job(job: Job, folder: str, retries: int) -> tuple[list[str], str]:
    """What a Ray worker does: the same as here. Returns its notes, and what failed (empty: nothing)."""
    lines: list[str] = []
    try:
        carry_out(job, Path(folder), retries, lines.append, Processes())
    except Failed as e:
        return lines, str(e)
    return lines, ""


def _last_words(log: Path) -> str:
    lines = [x for x in log.read_text(errors="replace").splitlines() if x.strip()]
    return lines[-1].strip() if lines else "nothing printed"
