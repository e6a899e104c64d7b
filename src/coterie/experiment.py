"""``coterie experiment FILE``: arms x seeds, stated in a file before they run; then tables, paired tests and raw records.

Each (arm, seed) is an ordinary run in its own process and directory, so a stopped experiment goes on where it was, and any
of its runs can be repeated alone with the command in the table. Results are kept as JSONL beside the table made from them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tomli_w
from pydantic import Field, ValidationError

from coterie.config import Section
from coterie.console import say
from coterie.curves import AXES, Axis, at_same, record
from coterie.errors import CoterieError, UserError
from coterie.interrupts import sigterm_interrupts
from coterie.rundir import dumps, write_atomic
from coterie.stats import compare_paired, holm, mean_interval

NODE_SEEDS = 1000  # distance of the seeds of two simulated swarms
START = "start"  # in a comparison: the model that the arm started from


class Comparison(Section):
    first: str
    """An arm; or `ARM:K`: of its nodes those that have the change K (from 0) of its `simulation.vary`."""
    second: str
    """As `first`, or `start`: the first arm's own value before training."""
    metric: str = ""
    """Empty: the headline."""
    axis: Axis = "end"
    """The values at the `end` of the runs, or (headline only) where both runs of a seed have made as many steps (`step`), have
    generated as many `tokens` or have used as much processor time (`cpu_s`): the most that both reach."""
    family: str = ""
    """Comparisons with the same word here are corrected together (Holm)."""


class Experiment(Section):
    """An experiment file."""

    question: str
    """What the experiment is to answer; printed above the table."""
    seeds: tuple[int, ...] = Field(min_length=1)
    metric: str = "eval/accuracy"
    """Headline: its value at the last evaluation."""
    also: tuple[str, ...] = ()
    """Further metrics of the last evaluation to show, each beside its value at the start."""
    base: dict[str, Any] = Field(default_factory=dict)
    """Config of a run that is made first; all arms start from its model. Empty: from the one their config names."""
    nodes: int = Field(1, ge=1)
    """Nodes of a simulated swarm per run; the headline is their mean. Arms may set their own."""
    config: dict[str, Any]
    """The config all arms share."""
    arms: dict[str, dict[str, Any]] = Field(min_length=1)
    """Arm -> what it changes, merged into `config`; the key `nodes` sets the number of nodes, and the table `simulation` what
    a simulated swarm has of its own (:class:`coterie.simulate.Simulation`)."""
    compare: tuple[Comparison, ...] = ()
    """Pairs of arms for paired tests over seeds, corrected by family (Holm)."""
    kind: Literal["runs", "parallel"] = "runs"
    """`runs`: every (arm, seed) is one run; `parallel`: experts, baselines and every merge of them (see parallel/study.py)."""
    orders: Literal["all", "in turn"] = "all"
    """`parallel`: orders of a Latin square in which every seed trains domain after domain, or one per seed, in turn."""
    match: tuple[str, str] | tuple[()] = ()
    """`parallel`: two arms that are also compared at equal norm and at equal gain of their experts."""

    def kinds(self) -> dict[str, tuple[str, int, int]]:
        """`ARM:K` -> its arm, K, and how many kinds of nodes that has."""
        vary = {arm: len(changes.get("simulation", {}).get("vary", ())) for arm, changes in self.arms.items()}
        nodes = {arm: int(changes.get("nodes", self.nodes)) for arm, changes in self.arms.items()}
        return {f"{arm}:{k}": (arm, k, n) for arm, n in vary.items() for k in range(min(n, nodes[arm]))}

    def settings(self, arm: str) -> dict[str, Any]:
        """The config of an arm: the shared one with the arm's changes."""
        return _merged(self.config, {k: v for k, v in self.arms[arm].items() if k not in ("nodes", "simulation")})


@dataclass(frozen=True)
class Job:
    """One run of the grid."""

    arm: str
    seed: int
    nodes: int
    folder: Path

    @property
    def done(self) -> bool:
        return all((d / "DONE").exists() for d in self.run_dirs)

    @property
    def run_dirs(self) -> list[Path]:
        return [self.folder] if self.nodes == 1 else [self.folder / f"node_{i}" for i in range(self.nodes)]

    def command(self, config: Path) -> list[str]:
        if self.nodes == 1:
            args = ["coterie", "train", str(config), "--seed", str(self.seed)]
        else:  # node i of a swarm has its seed plus i: far enough apart that no two swarms share a node's problems
            swarm = ["--nodes", str(self.nodes), "--simulation", str(config.with_suffix(".simulation.toml"))]
            args = ["coterie.simulate", str(config), *swarm, "--seed", str(NODE_SEEDS * self.seed)]
        return [sys.executable, "-m", *args, "--run_dir", str(self.folder)]


def load_experiment(path: Path) -> Experiment:
    """Raises UserError: missing file, broken TOML, unknown key, or a comparison of an arm that does not exist."""
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in Path("experiments").glob("*.toml")))
        raise UserError(f"experiment {path}: no such file" + (f", and none of ./experiments: {known}" if known else ""))
    try:
        spec = Experiment.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, ValidationError) as e:
        raise UserError(f"experiment {path}: {e}") from e
    for named in (*((c.first, c.second) for c in spec.compare), spec.match):
        for arm in named:
            if arm not in (*spec.arms, *spec.kinds(), START):
                there = ", ".join((*spec.arms, *spec.kinds()))
                raise UserError(f"experiment {path}: compare or match names the arm {arm!r}; there are {there}")
    return spec


def _named(path: Path) -> Path:
    """``sharing`` stands for ``experiments/sharing.toml`` of the folder one is in."""
    named = Path("experiments") / f"{path}.toml"
    return named if not path.exists() and named.is_file() else path


def run_experiment(path: Path, out: Path, jobs: int, only: Sequence[str] = ()) -> Path:
    """Run what is not done yet, ``jobs`` processes at a time; ``results.jsonl`` and ``table.md`` in ``out`` hold whatever is done
    after each run, so a stopped experiment has them too. ``path``: a file, or the name of one in ``experiments/``.

    Raises:
        UserError: the file is wrong, or an unknown arm in ``only``.
        CoterieError: a run failed (its output is in ``ARM-SEED.log`` in ``out``); finished runs are kept.
    """
    path = _named(path)
    spec = load_experiment(path)
    if unknown := [a for a in only if a not in spec.arms]:
        raise UserError(f"experiment {path}: no arm {unknown[0]!r}; there are {', '.join(spec.arms)}")
    if out.exists() and not out.is_dir():
        raise UserError(f"experiment: --out {out} is a file; name a directory")
    out.mkdir(parents=True, exist_ok=True)
    with sigterm_interrupts():
        return _run(path, spec, out, jobs, only)


def _run(path: Path, spec: Experiment, out: Path, jobs: int, only: Sequence[str]) -> Path:
    if spec.kind == "parallel":
        if only:
            raise UserError(f"experiment {path}: --arms is for experiments of single runs; here the arms are compared")
        from coterie.parallel.study import run_study
        from coterie.parallel.study_table import tables

        found = run_study(path, spec, out, jobs)
        write_atomic(out / "results.jsonl", "".join(dumps(r) + "\n" for r in found))
        write_atomic(out / "table.md", tables(spec, found))
        return out / "table.md"
    _check_settings(spec, out)
    _make_base(spec, out)
    grid = [_job(spec, out, arm, seed) for seed in spec.seeds for arm in spec.arms]
    _write_results(spec, out)
    _run_all([j for j in grid if not j.done and (not only or j.arm in only)], spec, out, jobs)
    return out / "table.md"


def _check_settings(spec: Experiment, out: Path) -> None:
    """Raises UserError if ``out`` holds runs with other settings than the file's: they would pass for its own."""
    written = {arm: _configs(spec, arm, out) for arm in spec.arms if (out / "runs" / arm).is_dir()}
    if spec.base and (out / "base").is_dir():
        written["base"] = {out / "configs" / "base.toml": tomli_w.dumps(spec.base)}
    for arm, files in written.items():
        for file, text in files.items():
            if file.is_file() and file.read_text(encoding="utf-8") != text:
                raise UserError(
                    f"experiment: {out} holds runs of {arm!r} with other settings (see {file}); give another --out"
                )


def _write_results(spec: Experiment, out: Path) -> None:
    grid = [_job(spec, out, arm, seed) for seed in spec.seeds for arm in spec.arms]
    named = {arm for c in spec.compare for arm in (c.first, c.second)}
    records = []
    for job in (j for j in grid if j.done):
        records.append(record(job.arm, job.seed, job.run_dirs, spec.metric, spec.also))
        for kind, (arm, k, n) in spec.kinds().items():
            if arm == job.arm and kind in named:
                records.append(record(kind, job.seed, job.run_dirs[k::n], spec.metric, spec.also))
    write_atomic(out / "results.jsonl", "".join(dumps(r) + "\n" for r in records))
    write_atomic(out / "table.md", table(spec, records))


def _job(spec: Experiment, out: Path, arm: str, seed: int) -> Job:
    return Job(arm, seed, int(spec.arms[arm].get("nodes", spec.nodes)), out / "runs" / arm / f"seed_{seed}")


def _run_all(todo: list[Job], spec: Experiment, out: Path, jobs: int) -> None:
    """Whatever ends it, no process of it is left running."""
    running: dict[Job, subprocess.Popen[bytes]] = {}
    try:
        for i, job in enumerate(todo):
            while len(running) >= jobs:
                _reap(running, spec, out)
            running[job] = _start(job, spec, out)
            say(f"[{i + 1}/{len(todo)}] {job.arm} seed {job.seed}")
        while running:
            _reap(running, spec, out)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


def _start(job: Job, spec: Experiment, out: Path) -> subprocess.Popen[bytes]:
    config = _write_config(spec, job.arm, out)
    job.folder.mkdir(parents=True, exist_ok=True)
    if job.nodes > 1:  # the nodes of a swarm that was stopped are not all at the same step: it begins anew
        for d in job.run_dirs:
            (d / "DONE").unlink(missing_ok=True)
            shutil.rmtree(d / "checkpoints", ignore_errors=True)
    with open(out / f"{job.arm}-{job.seed}.log", "ab") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(job.command(config), stdout=log, stderr=log, env=environment)


def _write_config(spec: Experiment, arm: str, out: Path) -> Path:
    """The config of an arm, and beside it what its simulated swarm has of its own."""
    files = _configs(spec, arm, out)
    for file, text in files.items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return next(iter(files))


def _configs(spec: Experiment, arm: str, out: Path) -> dict[Path, str]:
    config = out / "configs" / f"{arm}.toml"
    return {
        config: tomli_w.dumps(from_base(spec.settings(arm), spec, out)),
        config.with_suffix(".simulation.toml"): tomli_w.dumps(spec.arms[arm].get("simulation", {})),
    }


def _make_base(spec: Experiment, out: Path) -> None:
    """Train the model that all arms start from, unless it is there."""
    folder, config = out / "base", out / "configs" / "base.toml"
    if not spec.base or (folder / "DONE").exists():
        return
    say(f"making the base, from whose model all arms start (log: {out / 'base.log'})")
    config.parent.mkdir(exist_ok=True)
    config.write_text(tomli_w.dumps(spec.base), encoding="utf-8")
    command = [sys.executable, "-m", "coterie", "train", str(config), "--run_dir", str(folder)]
    with open(out / "base.log", "ab") as log:
        done = subprocess.run(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode != 0:
        raise CoterieError(f"experiment: the base failed; see {out / 'base.log'}")


def from_base(config: dict[str, Any], spec: Experiment, out: Path) -> dict[str, Any]:
    """``config`` with the model that the experiment makes first, unless it names one."""
    if not spec.base:
        return config
    return {**config, "model": {"name": str(out / "base" / "model"), **config.get("model", {})}}


def _reap(running: dict[Job, subprocess.Popen[bytes]], spec: Experiment, out: Path) -> None:
    """Wait a moment, or note one run that has ended."""
    ended = next((job for job, process in running.items() if process.poll() is not None), None)
    if ended is None:
        time.sleep(0.2)
        return
    if running.pop(ended).returncode != 0:
        raise CoterieError(
            f"experiment: {ended.arm} seed {ended.seed} failed; see {out / f'{ended.arm}-{ended.seed}.log'}"
        )
    _write_results(spec, out)


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes``: sections are merged, except `tasks` and `roles`, which an arm replaces as a whole."""
    out = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict) and key not in ("tasks", "roles")
        out[key] = _merged(out[key], value) if both else value
    return out


def table(spec: Experiment, records: Sequence[dict[str, Any]]) -> str:
    """Markdown: arms with means and 95% intervals over seeds, then paired comparisons with Holm's correction."""
    arms = list(dict.fromkeys(r["arm"] for r in records))
    of = {a: {r["seed"]: r for r in records if r["arm"] == a} for a in arms}
    needed = [(a, spec.metric) for a in arms]
    needed += [(a, c.metric or spec.metric) for c in spec.compare for a in (c.first, c.second) if a in of]
    for a, metric in needed:
        if without := next((r for r in of[a].values() if metric not in r["end"]), None):
            there = ", ".join(sorted(without["end"]))
            raise UserError(f"experiment: the last evaluation of {a} has no metric {metric!r}; it has {there}")
    titles = ("arm", "start", f"{spec.metric} at the end", "95% interval", "gain", "own reward, last tenth")
    lines = [spec.question, "", *_header(*titles, *(f"{m} (start)" for m in spec.also), "generated tokens", "seeds")]
    for a in arms:
        rows = list(of[a].values())
        end = [r["end"][spec.metric] for r in rows]
        start = float(np.mean([r["start"][spec.metric] for r in rows]))
        low, high = mean_interval(end)
        interval = f"{low:.3f} to {high:.3f}" if np.isfinite(low) else "one seed"
        own = float(np.mean([r["own_reward_last_tenth"] for r in rows]))
        tokens = float(np.mean([r["generated_tokens"] for r in rows]))
        also = "".join(f"| {_mean(rows, 'end', m)} ({_mean(rows, 'start', m)}) " for m in spec.also)
        lines.append(
            f"| {a} | {start:.3f} | {np.mean(end):.3f} | {interval} | {np.mean(end) - start:+.3f} | {own:.3f} "
            f"{also}| {tokens:,.0f} | {len(rows)} |"
        )
    return "\n".join([*lines, "", *_comparisons(spec, of)]) + "\n"


def _mean(rows: Sequence[dict[str, Any]], when: str, metric: str) -> str:
    values = [r[when][metric] for r in rows if metric in r[when]]
    return f"{np.mean(values):.3f}" if values else "-"


def _comparisons(spec: Experiment, of: dict[str, dict[int, dict[str, Any]]]) -> list[str]:
    pairs = []
    for c in spec.compare:
        metric = c.metric or spec.metric
        second = c.first if c.second == START else c.second
        seeds = sorted(of.get(c.first, {}).keys() & of.get(second, {}).keys())
        if len(seeds) >= 2:
            if c.axis == "end":
                first = [of[c.first][s]["end"][metric] for s in seeds]
                other = [of[second][s]["start" if c.second == START else "end"][metric] for s in seeds]
            else:
                first, other = at_same(c.axis, *([of[a][s]["curve"] for s in seeds] for a in (c.first, second)))
            pairs.append((c, compare_paired(first, other)))
    if not pairs:
        return []
    adjusted = dict[int, float]()
    for family in {c.family for c, _ in pairs}:
        of_family = [i for i, (c, _) in enumerate(pairs) if c.family == family]
        adjusted |= zip(of_family, holm([pairs[i][1].p_t for i in of_family]), strict=True)
    lines = _header("comparison (paired over seeds)", "difference", "95% interval", "effect size", "p", "p (Holm)")
    for i, (c, done) in enumerate(pairs):
        named = (f" ({c.metric})" if c.metric else "") + (f", {AXES[c.axis]}" if c.axis != "end" else "")
        lines.append(
            f"| {c.first} - {c.second}{named} | {done.difference:+.3f} | {done.low:+.3f} to {done.high:+.3f} "
            f"| {done.effect:.2f} | {done.p_t:.3f} | {adjusted[i]:.3f}{f' ({c.family})' if c.family else ''} |"
        )
    return lines


def _header(*titles: str) -> list[str]:
    return [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]


def summary(out: Path) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {"results": [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]}
