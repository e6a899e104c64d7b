"""``coterie demo``: a small swarm learns on this machine's CPU, beside the same nodes without sharing.

Two processes, one per arm, each with four nodes in turn (:mod:`coterie.simulate`); nothing is downloaded.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.table import Table

from coterie.config import Config, config_from_dict
from coterie.console import make_console
from coterie.errors import CoterieError
from coterie.rundir import read_jsonl

NODES = 4
STEPS = 30
ARMS = {"alone": {"peer_groups": 0, "share": "nothing"}, "sharing": {"peer_groups": 4, "share": "informative"}}
TASKS = ("spell_backward", "letter_counting", "count_bits")


def demo_config(run_dir: Path, arm: str, seed: int) -> Config:
    """Four own groups a step and, when sharing, four of peers on top: both arms generate the same number of tokens."""
    from coterie.models import tiny_tasks

    known = tiny_tasks()
    return config_from_dict(
        {
            "run_dir": str(run_dir / arm),
            "steps": STEPS,
            "seed": seed,
            "threads": 1,
            "tasks": {t: known[t].model_dump() for t in TASKS},
            "rollout": {"problems": 4, "group_size": 8, "max_new_tokens": 64},
            "optim": {"lr": 2e-4},
            "eval": {"every": STEPS // 3, "problems": 24, "samples": 2},
            "checkpoint": {"every": STEPS},
            "swarm": ARMS[arm],
        }
    )


def demo(run_dir: Path, seed: int) -> None:
    """Run both arms side by side, show a live table, write one report, and say what to try next.

    A demo that was run before is left alone: the new one gets a number.

    Raises:
        CoterieError: an arm failed.
    """
    run_dir = _free(run_dir)
    console = make_console()
    console.print(
        f"{NODES} nodes with the tiny model learn {', '.join(TASKS)}: once alone, once sharing what they try.\n"
    )
    start = time.monotonic()
    workers = _start(run_dir, seed)
    said = dict.fromkeys(ARMS, 0)
    with Live(console=console, refresh_per_second=2, transient=True) if console.is_terminal else nullcontext() as live:
        while any(w.is_alive() for w in workers.values()):
            if live is not None:
                live.update(_table(run_dir))
            else:
                _say_new_rows(console, run_dir, said)
            time.sleep(0.5)
    failed = [arm for arm, w in workers.items() if w.exitcode != 0]
    if failed:
        raise CoterieError(f"demo: the arm {failed[0]!r} stopped with exit code {workers[failed[0]].exitcode}")
    console.print(_table(run_dir))
    _last_words(console, run_dir, time.monotonic() - start)


def _free(run_dir: Path) -> Path:
    """``run_dir``, or the first of ``run_dir-2``, ``run_dir-3`` ... that is not there."""
    names = (run_dir if n == 1 else run_dir.with_name(f"{run_dir.name}-{n}") for n in count(1))
    return next(p for p in names if not p.exists() or not any(p.iterdir()))


def _start(run_dir: Path, seed: int) -> dict[str, Any]:
    """One process per arm, started clean (torch must not be forked), each on one core."""
    context = multiprocessing.get_context("spawn")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by the children when they import torch
    workers = {arm: context.Process(target=_arm, args=(run_dir, arm, seed), name=arm) for arm in ARMS}
    for w in workers.values():
        w.start()
    return workers


def _arm(run_dir: Path, arm: str, seed: int) -> None:
    from coterie.simulate import simulate

    simulate(demo_config(run_dir, arm, seed), NODES)


def _say_new_rows(console: Console, run_dir: Path, said: dict[str, int]) -> None:
    """Where output is piped: a line for every new row. ``said``: how many of each arm have been."""
    for arm in ARMS:
        for row in _rows(run_dir / arm)[said[arm] :]:
            said[arm] += 1
            console.print(f"{arm}: step {row.step}/{STEPS}, held-out {row.values['eval/accuracy']:.3f}")


@dataclass(frozen=True)
class _Row:
    step: int
    values: dict[str, float]  # mean over the nodes of the steps since the row before


def _rows(folder: Path) -> list[_Row]:
    """Rows at the evaluations that all nodes have reached."""
    logs = [list(read_jsonl(p)) for p in sorted(folder.glob("node_*/metrics.jsonl"))]
    if len(logs) < NODES:
        return []
    out, before = [], -1
    for step in range(0, STEPS + 1, STEPS // 3):
        if any(len(log) <= step for log in logs):
            break
        records = [r for log in logs for r in log if before < r["step"] <= step]
        keys = {k for r in records for k in r}
        out.append(_Row(step, {k: float(np.mean([r[k] for r in records if k in r])) for k in keys}))
        before = step
    return out


def _table(run_dir: Path) -> Table:
    rows = {arm: _rows(run_dir / arm) for arm in ARMS}
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("\n\nstep", no_wrap=True)
    for title in ("own\nreward", "\nheld-out"):
        for arm in ARMS:
            table.add_column(f"{title}\n{arm}", justify="right", no_wrap=True)
    for title in ("informative\ngroups\nsharing", "tokens/s\nper node\nsharing", "truncated\nanswers\nsharing"):
        table.add_column(title, justify="right", no_wrap=True)
    for alone, sharing in zip(*rows.values(), strict=False):
        both = [(key, r) for key in ("own/reward", "eval/accuracy") for r in (alone, sharing)]
        cells = [_cell(r, key, "{:.3f}") for key, r in both]
        cells += [_cell(sharing, "own/informative", "{:.0%}"), _cell(sharing, "time/tokens_per_s", "{:,.0f}")]
        table.add_row(f"{alone.step}/{STEPS}", *cells, _cell(sharing, "own/truncated", "{:.0%}"))
    return table


def _cell(row: _Row, key: str, form: str) -> str:
    return form.format(row.values[key]) if key in row.values else ""


def _last_words(console: Console, run_dir: Path, seconds: float) -> None:
    from coterie.report import write_report

    runs = [run_dir / arm / f"node_{i}" for arm in ARMS for i in range(NODES)]
    report = write_report(runs, run_dir / "report.html")
    coterie = "coterie" if shutil.which("coterie") else os.path.relpath(sys.argv[0])
    console.print(
        f"\n{seconds:.0f} s, on the CPU, offline. Own reward: mean over nodes and the steps since the row above. One seed of a "
        f"small demo: what sharing does is measured in docs/results/.\n\nreport: {report}\n\nnext:\n"
        f"  {coterie} train configs/tiny.toml    # one node, four tasks, a few minutes\n"
        f"  {coterie} swarm run configs/swarm.toml --nodes 4    # processes that share through a file\n"
        f"  {coterie} eval tiny --tasks all -k 1,8 --problems 50    # what the base model can do",
        soft_wrap=True,
    )
