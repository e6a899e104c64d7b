"""The experiment on parallel training (``kind = "parallel"`` in an experiment file): one process per seed.

An arm is a config with a ``[parallel]`` section. It trains the experts, and where ``parallel.baselines`` ask for them one run on
all tasks and runs of one domain after the other, in orders of a Latin square (every domain comes once at every place and
once after every other; all orders for every seed, or one per seed in turn). All of it starts from one base. Experts are
trained once and enter every merge. ``match`` names two arms that are also compared at equal norm and at equal gain of their
experts.

All runs of a seed are made in one process (a process for each would cost more than the training) and skipped where they lie.
"""

from __future__ import annotations

import fcntl
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.config import Config, config_from_dict
from coterie.console import say
from coterie.errors import CoterieError, UserError
from coterie.models import folder_of
from coterie.parallel.jobs import Processes
from coterie.parallel.plan import adapt_job, baseline_jobs, expert_jobs, finished, model_of
from coterie.parallel.stages import merge_experts
from coterie.rundir import dumps, write_atomic

if TYPE_CHECKING:
    from coterie.experiment import Experiment

MATCHED = "matched"  # name under which the comparison of the two arms is recorded


def orders(n: int) -> list[list[int]]:
    """A Latin square of ``n`` orders: each of ``n`` comes once at every place and, for even n, once after every other
    (Williams 1949). For odd n only the places are balanced."""
    first = [k // 2 if k % 2 == 0 else n - 1 - k // 2 for k in range(n)] if n % 2 == 0 else list(range(n))
    first = [-i % n for i in first]
    return [[(i + k) % n for i in first] for k in range(n)]


class Shop:
    """Trains and evaluates on shared parts: scoring processes, tasks, one policy for evaluation."""

    def __init__(self, cfg: Config, stack: ExitStack, orders: Sequence[int] = ()) -> None:
        import torch

        from coterie.tasks.scoring import Scorer
        from coterie.tasks.taskset import build_tasks

        torch.set_num_threads(1)
        self.cfg, self.orders = cfg, orders
        self.scorer = stack.enter_context(Scorer(cfg.scoring))
        self.tasks = build_tasks(cfg.tasks)

    def train(self, cfg: Config) -> None:
        """One run into ``cfg.run_dir``: `model` (LoRA: the adapter), `run.json` with what it cost."""
        import torch

        from coterie.engines.torch import TorchEngine
        from coterie.policy import Policy
        from coterie.rng import derive
        from coterie.run import TRAINERS
        from coterie.tasks.taskset import TaskSet

        folder = Path(cfg.run_dir)
        if finished(cfg):
            return
        torch.manual_seed(derive(cfg.seed, "torch") % 2**31)
        critic = cfg.method == "rl" and cfg.advantage.kind == "gae"
        policy = Policy.load(cfg.model, seed=cfg.seed, optim=cfg.optim, value_head=critic)
        tasks = TaskSet({t: self.tasks.tasks[t] for t in cfg.tasks}, {t: self.tasks.weights[t] for t in cfg.tasks})
        engine = TorchEngine(policy, token_budget=cfg.rollout.token_budget)
        trainer = TRAINERS[cfg.method](cfg, policy, engine, tasks, self.scorer)
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = 0.0
        for _ in range(cfg.steps):
            metrics, _ = trainer.train_step()
            tokens += metrics.get("tokens/generated", 0.0)
        cost = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "tokens": tokens}
        policy.save_pretrained(model_of(cfg), merged=not policy.lora)
        write_atomic(folder / "run.json", json.dumps({"steps": cfg.steps, "run_seed": cfg.seed, **cost}))
        (folder / "DONE").touch()
        print(f"trained {folder} in {cost['cpu_s']:.0f} s", flush=True)


def stage_runs(cfg: Config, which: Sequence[int]) -> dict[str, list[Config]]:
    """Order -> its runs, for the orders ``which`` of the square. The first run of an order is the expert itself (same steps,
    same seed, same start)."""
    experts = [j.runs[0] for j in expert_jobs(cfg)]
    root = Path(cfg.run_dir) / "multi_stage"
    out = {}
    square = orders(len(experts))
    for k in which:
        order = square[k]
        runs = [experts[order[0]]]
        for place, i in enumerate(order[1:], 2):
            start = cfg.model.model_copy(update={"name": str(model_of(runs[-1]))})
            folder = root / f"order_{k}" / f"{place}_{list(cfg.parallel.experts)[i]}"
            runs.append(experts[i].model_copy(update={"run_dir": str(folder), "model": start}))
        out[f"order_{k}"] = runs
    return out


def mixed_runs(cfg: Config, merged: Path) -> dict[str, Config]:
    """One run on all tasks with all experts' steps; a short one from the merge, and the same short one from the base."""
    out = {"mixed": next(j.runs[0] for j in baseline_jobs(cfg) if j.name == "mixed")}
    if (job := adapt_job(cfg, merged)) is not None:
        out["adapted"] = job.runs[0].model_copy(update={"run_dir": str(Path(cfg.run_dir) / "adapted")})
        folder = str(Path(cfg.run_dir) / "adapted_base")
        out["adapted_base"] = out["adapted"].model_copy(update={"run_dir": folder, "model": cfg.model})
    return out


def work(file: Path, out: Path, seed: int) -> None:
    """Everything of one seed: training runs, then ``records/ARM-SEED.jsonl`` with one line per model and per run.

    Raises:
        CoterieError: another process is at work on this seed.
    """
    from coterie.experiment import load_experiment

    with open(out / f"seed-{seed}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise CoterieError(f"{out}: another process is at work on seed {seed}; wait for it, or end it") from e
        _work(load_experiment(file), out, seed)


def _work(spec: Experiment, out: Path, seed: int) -> None:
    from coterie.parallel.study_models import matched_models, own_models

    for arm in (*spec.arms, *([MATCHED] if spec.match else [])):
        record = _record(out, arm, seed)
        if record.is_file():
            continue
        with ExitStack() as stack:
            if arm == MATCHED:
                first, second = (_config(spec, out, a, seed) for a in spec.match)
                scratch = out / "runs" / arm / f"seed_{seed}"
                rows = matched_models(Shop(first, stack), dict(zip(spec.match, (first, second), strict=True)), scratch)
            else:
                cfg = _config(spec, out, arm, seed)
                n = len(cfg.parallel.experts)
                shop = Shop(cfg, stack, range(n) if spec.orders == "all" else [spec.seeds.index(seed) % n])
                _train(shop)
                rows = own_models(shop, with_base=arm == next(iter(spec.arms)))
        record.parent.mkdir(exist_ok=True)
        write_atomic(record, "".join(dumps({"arm": arm, "seed": seed, **r}) + "\n" for r in rows))


def _train(shop: Shop) -> None:
    cfg = shop.cfg
    experts = {j.name: j.runs[0] for j in expert_jobs(cfg)}
    for run in experts.values():
        shop.train(run)
    if "multi_stage" in cfg.parallel.baselines:
        for runs in stage_runs(cfg, shop.orders).values():
            for run in runs:
                shop.train(run)
    if "mixed" in cfg.parallel.baselines:
        folder = Path(cfg.run_dir) / "merged"
        trained = {n: model_of(r) for n, r in experts.items()}
        merged = merge_experts(cfg, Path(folder_of(cfg.model.name)), trained, folder, cfg.parallel.lam, print)
        for run in mixed_runs(cfg, merged).values():
            shop.train(run)


def _record(out: Path, arm: str, seed: int) -> Path:
    return out / "records" / f"{arm}-{seed}.jsonl"


def _read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _config(spec: Experiment, out: Path, arm: str, seed: int) -> Config:
    raw = spec.settings(arm)
    return config_from_dict(raw | {"seed": seed, "run_dir": str(out / "runs" / arm / f"seed_{seed}")})


def _claim(spec: Experiment, out: Path) -> None:
    """What lies in ``out`` is taken as it is, so it must have been made with these settings; only the seeds may change."""
    settings = dumps(spec.model_dump(mode="json", exclude={"seeds", "question"}))
    file = out / "settings.json"
    before = file.read_text(encoding="utf-8") if file.is_file() else ""
    if before != settings and (before or (out / "runs").exists()):
        raise UserError(f"experiment: {out} holds runs made with other settings; choose another --out")
    write_atomic(file, settings)


def run_study(file: Path, spec: Experiment, out: Path, jobs: int) -> list[dict[str, Any]]:
    """Every seed that is not done, ``jobs`` processes at a time. Returns all records.

    Raises:
        UserError: ``out`` belongs to an experiment with other settings.
        CoterieError: a process failed (its output is in ``seed-N.log``); what is finished is kept.
    """
    _claim(spec, out)
    arms = [*spec.arms, *([MATCHED] if spec.match else [])]

    def one(seed: int) -> str:
        if all(_record(out, a, seed).is_file() for a in arms):
            return ""
        log = out / f"seed-{seed}.log"
        say(f"seed {seed}: experts, baselines and merges of {', '.join(arms)} (log: {log})")
        command = [sys.executable, "-m", "coterie.parallel.study", str(file), str(out), str(seed)]
        return f"seed {seed} failed; see {log}" if processes.run(command, log, threads=1) else ""

    processes = Processes()
    with ThreadPoolExecutor(jobs) as pool:
        try:
            failed = [text for text in pool.map(one, spec.seeds) if text]
        finally:
            processes.close()
    if failed:
        raise CoterieError("experiment: " + "; ".join(failed))
    return [r for seed in spec.seeds for a in arms for r in _read(_record(out, a, seed))]


if __name__ == "__main__":  # FILE OUT SEED
    work(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
