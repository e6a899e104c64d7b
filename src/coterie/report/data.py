"""What a report shows, read back from a run directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.errors import UserError
from coterie.rundir import read_jsonl

STATES = ("solo", "degraded", "sharing")  # the values 0, 1, 2 of swarm/state


@dataclass(frozen=True)
class RunLog:
    """One run's files."""

    name: str
    path: Path
    config: str
    metrics: list[dict[str, Any]]
    trajectories: list[dict[str, Any]]
    finished: bool

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of ``key``, where it was logged."""
        rows = [r for r in self.metrics if key in r]
        return [r["step"] for r in rows], [r[key] for r in rows]

    def last(self, key: str) -> float | None:
        values = self.series(key)[1]
        return values[-1] if values else None

    def first(self, key: str) -> float | None:
        values = self.series(key)[1]
        return values[0] if values else None

    def eval_tasks(self) -> list[str]:
        keys = {k for r in self.metrics for k in r if k.startswith("eval/") and k.endswith("/accuracy")}
        return sorted(k.split("/")[1] for k in keys if k.count("/") == 2)


def load_runs(paths: list[Path]) -> list[RunLog]:
    """Read run directories; names are made unique.

    Raises:
        UserError: a folder is not a run or has no metrics yet.
    """
    if not paths:
        raise UserError("report: name at least one run directory")
    names = _short_names(paths)
    runs = []
    for path, name in zip(paths, names, strict=True):
        if not (path / "metrics.jsonl").is_file():
            raise UserError(f"{path}: no metrics.jsonl there; is it a run directory?")
        metrics = list(read_jsonl(path / "metrics.jsonl"))
        if not metrics:
            raise UserError(f"{path}: metrics.jsonl is empty; the run has not finished a step yet")
        transcripts = path / "trajectories.jsonl"
        config = path / "config.toml"
        runs.append(
            RunLog(
                name,
                path,
                config.read_text(encoding="utf-8") if config.is_file() else "",
                metrics,
                list(read_jsonl(transcripts)) if transcripts.is_file() else [],
                (path / "DONE").exists(),
            )
        )
    return runs


def _short_names(paths: list[Path]) -> list[str]:
    """The paths without the folders they all share."""
    parts = [p.resolve().parts for p in paths]
    if len(parts) == 1:
        return [parts[0][-1]]
    shared = 0
    while all(len(p) > shared + 1 for p in parts) and len({p[shared] for p in parts}) == 1:
        shared += 1
    return ["/".join(p[shared:]) for p in parts]
