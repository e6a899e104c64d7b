"""Updates as applied, step by step, and what their inner products across time say (``parallel.log_updates``).

With ``u_t = w_{t+1} - w_t`` measured on the weights (after Adam, clipping and decay), ``sum_t u_t`` is the delta exactly,
so ``<delta_i, delta_j> = sum_{t,s} <u_it, u_js>``: two runs can be orthogonal step by step and still overlap as wholes.
Gradients do not add up like that, which is why updates are logged.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.errors import CoterieError
from coterie.merging.sketch import VERSION, CountSketch
from coterie.policy import HEAD, Policy
from coterie.rundir import write_atomic

NAME = "updates.f32"
BANDS = (1, 10, 100)  # |t - s| below which pairs of steps are summed up in the report


class UpdateLog:
    """One sketch per step, appended to a file of float32 rows that is cut back when a run goes back to a checkpoint."""

    def __init__(self, folder: Path, width: int, policy: Policy) -> None:
        self._file, self._policy = folder / NAME, policy
        self._sketch = CountSketch(width)
        self._before: dict[str, Tensor] = {}
        header = folder / "updates.json"
        write_atomic(header, json.dumps({"version": VERSION, "width": width}))

    def rewind(self, step: int) -> None:
        """Keep the first ``step`` rows. Raises CoterieError if there are fewer."""
        size = step * self._sketch.width * 4
        with open(self._file, "ab") as f:
            if f.tell() < size:
                raise CoterieError(f"{self._file}: holds fewer updates than the run has done; start a new run_dir")
            f.truncate(size)

    def watch(self) -> None:
        """Remember the weights before a step."""
        self._before = {n: w.clone() for n, w in self._weights().items()}

    def append(self) -> dict[str, float]:
        """Log what the step did to the weights; its exact L2 norm is a metric."""
        row = torch.zeros(self._sketch.width)
        square = 0.0
        for name, w in self._weights().items():
            moved = (w - self._before[name]).cpu()
            square += float(moved.double().square().sum())
            self._sketch.add(row, name, moved)
        with open(self._file, "ab") as f:
            f.write(row.numpy().tobytes())
        return {"update/l2": square**0.5}

    def _weights(self) -> dict[str, Tensor]:
        return {n: w for n, w in self._policy.weights().items() if not n.startswith(HEAD)}


def load_updates(folder: Path) -> NDArray[np.float32]:
    """[steps, width] sketches of a run.

    Raises:
        CoterieError: none were logged, or by another version of the hash.
    """
    if not (folder / NAME).is_file():
        raise CoterieError(f"{folder}: no updates were logged there (parallel.log_updates)")
    header = json.loads((folder / "updates.json").read_text(encoding="utf-8"))
    if header["version"] != VERSION:
        raise CoterieError(f"{folder}: updates sketched by hash version {header['version']}, this is {VERSION}")
    return np.fromfile(folder / NAME, np.float32).reshape(-1, header["width"])


def coherence(updates: NDArray[Any]) -> float:
    """``|sum_t u_t|^2 / sum_t |u_t|^2``: 1 for a random walk, the number of steps for a straight line."""
    u = updates.astype(np.float64)  # [T, k]
    each = float(np.square(u).sum())
    return float(np.square(u.sum(0)).sum()) / each if each else 0.0


def cross_time(first: NDArray[Any], second: NDArray[Any]) -> dict[str, Any]:
    """Inner products of two runs' updates over all pairs of steps ``C_ts = <u_1t, u_2s>``.

    Args:
        first: [T, k] second: [S, k], sketches (or whole updates) made by one projection.

    Returns:
        ``total`` (= the inner product of the deltas), ``same_step`` (sum over t = s), ``bands`` (share of the total from
        ``|t - s|`` below 1, 10, 100), cosines of the wholes and, as mean and standard deviation, of the steps.
    """
    a, b = first.astype(np.float64), second.astype(np.float64)
    c = a @ b.T  # [T, S]
    gap = np.abs(np.arange(len(a))[:, None] - np.arange(len(b))[None])  # [T, S]
    norms = np.outer(np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1))  # [T, S]
    steps = np.divide(c, norms, out=np.zeros_like(c), where=norms > 0)  # [T, S]
    whole = float(np.linalg.norm(a.sum(0)) * np.linalg.norm(b.sum(0)))
    total, same = float(c.sum()), float(c[gap == 0].sum())
    return {
        "total": total,
        "cosine": total / whole if whole else None,
        "same_step": same,
        "same_step_share": same / total if total else None,
        "bands": {str(w): (float(c[gap < w].sum()) / total if total else None) for w in BANDS},
        "step_cosine_mean": float(steps.mean()) if steps.size else None,
        "step_cosine_sd": float(steps.std()) if steps.size else None,
    }
