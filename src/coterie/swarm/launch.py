"""``coterie swarm run``: several training processes on one machine that share through a file, watched in one table."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from coterie.config import Config
from coterie.errors import CoterieError
from coterie.interrupts import sigterm_interrupts
from coterie.rundir import read_jsonl

COLUMNS = {
    "own reward": ("own/reward", "{:.3f}"),
    "held-out": ("eval/accuracy", "{:.3f}"),
    "peer groups": ("swarm/used_groups", "{:.0f}"),
    "peers": ("swarm/peers_in_batch", "{:.0f}"),
    "pool": ("swarm/pool", "{:.0f}"),
    "s/step": ("time/step_s", "{:.2f}"),
}
_STATES = {2.0: ("sharing", "green"), 1.0: ("degraded", "yellow"), 0.0: ("solo", "red")}


@dataclass
class Child:
    """One node's process; what it prints goes to ``log``."""

    run_dir: Path
    log: Path
    process: subprocess.Popen[bytes]

    def last(self) -> dict[str, Any]:
        """Its newest metrics; evaluation figures from the newest line that has them."""
        file = self.run_dir / "metrics.jsonl"
        merged: dict[str, Any] = {}
        for row in read_jsonl(file) if file.exists() else ():
            merged |= row
        return merged

    def last_words(self) -> str:
        if (code := self.process.returncode) is not None and code < 0:
            return f"killed by signal {-code}; the same command goes on"
        lines = [x for x in self.log.read_text(errors="replace").splitlines() if x.strip()]
        return lines[-1].strip() if lines else "nothing printed"


def start(config: Path, overrides: Sequence[str], cfg: Config, nodes: int) -> list[Child]:
    """One ``coterie train`` per node: own run directory and seed, one shared file, its part of the cores."""
    base = Path(cfg.run_dir)
    base.mkdir(parents=True, exist_ok=True)
    threads = cfg.threads or max(1, (os.cpu_count() or 1) // nodes)
    children = []
    for i in range(nodes):
        run_dir, log = base / f"node_{i}", base / f"node_{i}.log"
        own: dict[str, Any] = {
            "run_dir": run_dir,
            "seed": cfg.seed + i,
            "threads": threads,
            "swarm.exchange": "local",
            "swarm.path": base / "swarm.sqlite",
        }
        flags = [x for k, v in own.items() for x in (f"--{k}", str(v))]
        command = [sys.executable, "-m", "coterie", "train", str(config), *overrides, *flags]
        with open(log, "ab") as out:
            children.append(Child(run_dir, log, _spawn(command, out, threads)))
    return children


def watch(children: Sequence[Child], steps: int, console: Console, every_s: float = 0.5) -> None:
    """Show the table until all have ended; on an interrupt, end those that still run.

    Raises:
        CoterieError: names the nodes that failed, with their last words; the others have finished.
    """
    with sigterm_interrupts():
        _watch(children, steps, console, every_s)
    console.print(table(children, steps))
    failed = [c for c in children if c.process.returncode != 0]
    if failed:
        raise CoterieError("\n".join(f"{c.run_dir.name} failed: {c.last_words()} (see {c.log})" for c in failed))


def _watch(children: Sequence[Child], steps: int, console: Console, every_s: float) -> None:
    """Until all have ended; whatever ends it, none of them is left running."""
    try:
        if console.is_terminal:
            with Live(console=console, refresh_per_second=2, transient=True) as live:
                while any(c.process.poll() is None for c in children):
                    live.update(table(children, steps))
                    time.sleep(every_s)
        else:
            _say_progress(children, steps, console)
    finally:
        for c in children:
            if c.process.poll() is None:
                c.process.terminate()
        for c in children:
            c.process.wait()


def _say_progress(children: Sequence[Child], steps: int, console: Console, every_s: float = 10.0) -> None:
    """Plain lines instead of a table: where the nodes are now and then, and each end when it comes."""
    running, said_at = list(children), time.monotonic()
    while running:
        time.sleep(0.2)
        for c in [c for c in running if c.process.poll() is not None]:
            running.remove(c)
            console.print(
                f"{c.run_dir.name}: " + ("finished" if c.process.returncode == 0 else f"failed: {c.last_words()}")
            )
        if running and time.monotonic() - said_at > every_s:
            said_at = time.monotonic()
            console.print(", ".join(f"{c.run_dir.name} {c.last().get('step', 0):.0f}/{steps}" for c in running))


def table(children: Sequence[Child], steps: int) -> Table:
    """One row a node."""
    out = Table("node", "step", "state", *COLUMNS, box=None, pad_edge=False)
    for c in children:
        row = c.last()
        state = Text(*_STATES.get(row.get("swarm/state", -1.0), ("starting", "")))
        cells = [fmt.format(row[key]) if key in row else "" for key, fmt in COLUMNS.values()]
        out.add_row(c.run_dir.name, f"{row.get('step', 0)}/{steps}", state, *cells)
    return out


def _spawn(command: list[str], out: IO[bytes], threads: int) -> subprocess.Popen[bytes]:
    env = os.environ | {"OMP_NUM_THREADS": str(threads)}
    return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env)
