"""Where figures go: ``metrics.jsonl`` and ``trajectories.jsonl`` always, TensorBoard, W&B and trackio when asked."""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.config import Config, TrackingConfig
from coterie.errors import UserError
from coterie.rundir import RunDir
from coterie.types import Group, Source

if TYPE_CHECKING:
    from coterie.prompting import PromptEncoder

Sink = Callable[[int, dict[str, float]], None]


class Tracker:
    """Writes a run's figures and sampled transcripts."""

    def __init__(self, cfg: Config, run: RunDir) -> None:
        self._run, self._cfg = run, cfg
        self._sinks, self._closers = _sinks(cfg, run)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *exc: object) -> None:
        for close in self._closers:
            close()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """One line of metrics.jsonl. ``step`` is the number of updates done."""
        self._run.append("metrics.jsonl", [{"step": step, **metrics}])
        for sink in self._sinks:
            sink(step, metrics)

    def transcripts(self, step: int, records: Sequence[dict[str, Any]]) -> None:
        """Keep the first ``tracking.transcripts`` records of the step."""
        kept = records[: self._cfg.tracking.transcripts]
        if kept:
            self._run.append("trajectories.jsonl", [{"step": step, **r} for r in kept])


def transcript(group: Group, encoder: PromptEncoder) -> dict[str, Any]:
    """One trajectory of ``group`` for people: the one with the most questions to helpers, of these a right one."""
    best = max(group.trajectories, key=lambda t: (len(t.consults), t.reward or 0.0))
    return {
        "group": group.id,
        "problem": group.problem.id,
        "task": group.problem.task,
        "author": group.author,
        "prompt": group.problem.prompt,
        "prompt_ids": [int(i) for i in best.token_ids[: best.prompt_length]],
        "segments": [{"source": Source(s.source).name.lower(), "text": s.text} for s in best.segments],
        "reward": best.reward,
        "group_rewards": group.rewards,
        "stop_reason": str(best.stop_reason),
        "consults": [
            {"role": c.role, "helper": c.helper, "query": c.query, "outcome": c.outcome, "latency_s": c.latency_s,
             "tokens": c.end - c.start}
            for c in best.consults
        ],
    }  # fmt: skip


def _sinks(cfg: Config, run: RunDir) -> tuple[list[Sink], list[Callable[[], Any]]]:
    sinks: list[Sink] = []
    closers: list[Callable[[], Any]] = []
    if cfg.tracking.tensorboard:
        writer = _extra("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(run.path / "tensorboard"))
        sinks.append(partial(_scalars, writer))
        closers.append(writer.close)
    for name, settings in (("wandb", _wandb), ("trackio", _trackio)):
        if getattr(cfg.tracking, name):
            library = _extra(name, name)
            _start(name, library, settings(run.path) | {"config": cfg.model_dump(mode="json")})
            sinks.append(partial(_log, library))
            closers.append(library.finish)
    return sinks, closers


def _wandb(path: Path) -> dict[str, Any]:
    """Everything it writes goes under the run directory; a continued run is the same one there."""
    kept = path / "wandb" / "id"
    kept.parent.mkdir(exist_ok=True)
    if not kept.exists():
        kept.write_text(secrets.token_hex(6), encoding="utf-8")
    return {"name": path.name, "dir": str(path), "id": kept.read_text(encoding="utf-8"), "resume": "allow"}


def _trackio(path: Path) -> dict[str, Any]:
    return {"name": path.name, "resume": "allow"}


def _start(name: str, library: Any, settings: dict[str, Any]) -> None:
    try:
        library.init(project="coterie", **settings)
    except Exception as e:  # no login, no network: whatever it raises, the user has to act
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        hint = "; WANDB_MODE=offline keeps everything in the run directory" if name == "wandb" else ""
        raise UserError(f"tracking.{name}: {reason}{hint}") from e


def _scalars(writer: Any, step: int, metrics: dict[str, float]) -> None:
    for key, value in metrics.items():
        writer.add_scalar(key, value, step)


def _log(library: Any, step: int, metrics: dict[str, float]) -> None:
    library.log(metrics, step=step)


def _extra(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as e:
        flag = {f: f"tracking.{f}" for f in TrackingConfig.model_fields}[extra]
        raise UserError(f"{flag} = true needs the extra: pip install -e '.[{extra}]'") from e
