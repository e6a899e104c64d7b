"""``coterie parallel``: experts, merge, adaptation, evaluation, report; what is finished is not done again."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coterie.config import Config, ParallelConfig, load_config
from coterie.errors import UserError
from coterie.parallel.jobs import run_jobs
from coterie.parallel.plan import adapt_job, baseline_jobs, check_parallel, expert_jobs, workers
from coterie.parallel.report import summary, write_page
from coterie.parallel.stages import all_merges, base_folder, compare_times, compare_weights, evaluate_models, probe_base
from coterie.run import check
from coterie.rundir import write_atomic

_FREE = {"parallel", "threads", "tracking"}  # may differ from the command before; the rest decides what lies there
_FIXED = ("experts", "log_updates")  # of [parallel]: what a training run itself is given


def parallel(cfg: Config, note: Callable[[str], None] = print) -> dict[str, Any]:
    """Carry out ``cfg`` and return what ``parallel.json`` holds.

    Raises:
        UserError: a config that cannot be carried out, or a folder that belongs to another one.
        CoterieError: a part failed; the same command goes on with what is missing.
    """
    check_parallel(cfg)
    check(cfg)
    root = Path(cfg.run_dir)
    root.mkdir(parents=True, exist_ok=True)
    with open(root / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise UserError(f"run_dir {root}: another `coterie parallel` is at work there") from e
        _claim(cfg, root)
        return _carry_out(cfg, root, note)


def _claim(cfg: Config, root: Path) -> None:
    """Refuse a folder of other runs. Hidden files do not make it one: the lock, and what a kill left of writing the config."""
    file = root / "config.toml"
    if file.exists():
        before = load_config(file)
        changed = [k for k in Config.model_fields if k not in _FREE and getattr(before, k) != getattr(cfg, k)]
        changed += [f"parallel.{k}" for k in _FIXED if getattr(before.parallel, k) != getattr(cfg.parallel, k)]
        if changed:
            raise UserError(
                f"run_dir {root}: holds parts made with another config (differs in {', '.join(changed)}); choose another "
                "--run_dir. Merging, adaptation, baselines and the sweep may change"
            )
    elif any(not p.name.startswith(".") for p in root.iterdir()):
        raise UserError(f"run_dir {root}: not empty and not of `coterie parallel`; choose another --run_dir")
    write_atomic(file, cfg.to_toml())


def _carry_out(cfg: Config, root: Path, note: Callable[[str], None]) -> dict[str, Any]:
    experts, baselines = expert_jobs(cfg), baseline_jobs(cfg)
    # the longest first: a baseline has the steps of all experts together
    run_jobs([*baselines, *experts], root, cfg, workers(cfg), note)
    base = base_folder(cfg)
    trained = {j.name: j.model for j in experts}
    merges = all_merges(cfg, base, trained, note)
    adapt = adapt_job(cfg, merges["merged"])
    if adapt is not None:
        run_jobs([adapt], root, cfg, 1, note)
    models = {"base": base} | {f"expert/{n}": p for n, p in trained.items()} | merges
    models |= {j.name: j.model for j in [*([adapt] if adapt else []), *baselines]}
    evaluations = evaluate_models(cfg, models, note)
    weights = compare_weights(cfg, base, trained)
    jobs = [*experts, *([adapt] if adapt else []), *baselines]
    result = summary(cfg, evaluations, weights, compare_times(experts), jobs, probe_base(cfg, base, note))
    write_atomic(root / "parallel.json", json.dumps(result, indent=2) + "\n")
    write_page(result, root / "report.html")
    return result


def backend_override(cfg: Config, backend: str | None) -> Config:
    """``--backend`` wins over the config. Raises UserError for an unknown one."""
    if backend is None:
        return cfg
    if backend not in ("local", "ray"):
        raise UserError(f"--backend {backend}: local or ray")
    changed = ParallelConfig.model_validate(cfg.parallel.model_dump() | {"backend": backend})
    return cfg.model_copy(update={"parallel": changed})
