"""From one config to the runs it stands for: experts, baselines, adaptation, and where each of them lies.

    runs/parallel/
      config.toml   jobs/*.toml, *.log      what each process was given, what it printed
      experts/NAME  mixed  multi_stage/N_NAME  adapted/TAG        run directories: each resumes by itself
      merged/TAG    shrink/TAG/NAME                               merged models with their receipts
      eval/*.json   interference/  parallel.json  report.html

TAG names the merge (``sum_0.6``), so another lambda or method never meets the files of an earlier one.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from coterie.config import Config, ParallelConfig
from coterie.errors import UserError
from coterie.parallel.evidence import sole_owners


@dataclass(frozen=True)
class Job:
    """Runs that one process after the other carries out."""

    name: str
    runs: tuple[Config, ...]

    @property
    def model(self) -> Path:
        return model_of(self.runs[-1])


def model_of(cfg: Config) -> Path:
    """Where a run leaves its model."""
    return Path(cfg.run_dir) / "model"


def finished(cfg: Config) -> bool:
    return (Path(cfg.run_dir) / "DONE").exists() and model_of(cfg).is_dir()


def check_parallel(cfg: Config) -> None:
    """Raises UserError for what cannot be carried out."""
    p = cfg.parallel
    if len(p.experts) < 2:
        raise UserError('parallel: name at least two experts, [parallel.experts] NAME = ["task", ...]')
    if cfg.swarm.exchange != "none":
        raise UserError("parallel: experts train apart; leave [swarm] out")
    if cfg.method == "rl" and cfg.steps < 1:
        raise UserError("parallel: steps must be at least 1")
    if p.probe and len(set(sole_owners(p.experts).values())) < 2:
        raise UserError(
            "parallel.probe: fewer than two experts have a task of their own to be compared on; set it to 0"
        )


def workers(cfg: Config) -> int:
    """Training processes at a time: on GPUs at most one per GPU."""
    wanted, places = cfg.parallel.jobs or len(cfg.parallel.experts), gpus(cfg)
    if places is not None:
        return min(wanted, len(places))
    return cfg.parallel.jobs or min(os.cpu_count() or 1, wanted)


def gpus(cfg: Config) -> list[str | None] | None:
    """What each training process may see as CUDA_VISIBLE_DEVICES, one entry per GPU; None: they train on the CPU.

    With ``cuda:N`` they all go to that one, whose number they must see unchanged (an entry of None).
    """
    device = cfg.model.device
    if device != "auto" and not device.startswith("cuda"):
        return None
    if ":" in device:
        return [None]
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [n.strip() for n in named.split(",")] if named else [str(i) for i in range(count)]
    return list(names[:count]) or None


def threads(cfg: Config) -> int:
    """CPU threads of each training process."""
    return cfg.threads or max(1, (os.cpu_count() or 1) // workers(cfg))


def expert_jobs(cfg: Config) -> list[Job]:
    """One run per expert, each with a seed of its own (equal seeds would start LoRA experts from equal factors)."""
    root = Path(cfg.run_dir)
    return [
        Job(name, (_run(cfg, root / "experts" / name, tasks, cfg.seed + i),))
        for i, (name, tasks) in enumerate(cfg.parallel.experts.items())
    ]


def baseline_jobs(cfg: Config) -> list[Job]:
    """The runs that merging is compared with, each with the steps of all experts together."""
    root, experts, out = Path(cfg.run_dir), cfg.parallel.experts, []
    if "mixed" in cfg.parallel.baselines:
        mixed = _run(cfg, root / "mixed", all_tasks(cfg), cfg.seed + len(experts), steps=cfg.steps * len(experts))
        out.append(Job("mixed", (mixed,)))
    if "multi_stage" in cfg.parallel.baselines:
        stages: list[Config] = []
        for i, (name, tasks) in enumerate(experts.items()):
            base = str(model_of(stages[-1])) if stages else ""
            stages.append(_run(cfg, root / "multi_stage" / f"{i + 1}_{name}", tasks, cfg.seed + i, base=base))
        out.append(Job("multi_stage", tuple(stages)))
    return out


def adapt_job(cfg: Config, merged: Path) -> Job | None:
    """A short run on all tasks from the merged model."""
    p = cfg.parallel
    steps = p.adapt_steps or math.ceil(p.adapt_share * cfg.steps * len(p.experts))
    if not steps:
        return None
    folder = Path(cfg.run_dir) / "adapted" / f"{tag(p, p.lam)}_{steps}"
    seed = cfg.seed + len(p.experts) + 1
    return Job("adapted", (_run(cfg, folder, all_tasks(cfg), seed, steps=steps, base=str(merged)),))


def all_tasks(cfg: Config) -> tuple[str, ...]:
    """Those that some expert is trained on; the config may list more, which are only evaluated."""
    return tuple(dict.fromkeys(t for tasks in cfg.parallel.experts.values() for t in tasks))


def tag(p: ParallelConfig, lam: float) -> str:
    """Names a merge: method, lambda, and what else it depends on."""
    density = f"_d{p.density:g}" if p.density and p.method in ("ties", "dare", "dare_ties") else ""
    rank = f"_r{p.rank}" if p.method == "svd" else ""
    return f"{p.method}_{lam:g}{density}{rank}"


def _run(
    cfg: Config, folder: Path, tasks: tuple[str, ...], seed: int, *, steps: int | None = None, base: str = ""
) -> Config:
    return cfg.model_copy(
        update={
            "run_dir": str(folder),
            "tasks": {t: cfg.tasks[t] for t in tasks},
            "seed": seed,
            "steps": cfg.steps if steps is None else steps,
            "threads": threads(cfg),
            "model": cfg.model.model_copy(update={"name": base}) if base else cfg.model,
            "parallel": ParallelConfig(log_updates=cfg.parallel.log_updates),
        }
    )
