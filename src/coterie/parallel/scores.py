"""What merging kept: scores, gains and their intervals from paired evaluations (pure functions of counts).

All models answer the same held-out problems with the same random streams, so differences are taken problem by problem;
problems are the independent units, resampled within their task. A problem of which a model has no scored answer (its scoring
failed) is left out of every comparison with that model, on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import CoterieError

RESAMPLES = 2000
Rates = Mapping[str, Sequence[float]]  # task -> share of right answers per held-out problem; NaN: none could be scored


def rates(evaluation: Mapping[str, Any]) -> dict[str, list[float]]:
    """Per task and problem, from the JSON of an evaluation."""
    return {
        name: [c / n if n else float("nan") for c, n in zip(t["correct"], t["scored"], strict=True)]
        for name, t in evaluation["tasks"].items()
    }


def unscored(evaluation: Mapping[str, Any]) -> int:
    """Answers whose scoring failed."""
    asked = evaluation["asked"]["samples"]
    return sum(asked - n for t in evaluation["tasks"].values() for n in t["scored"])


def score(model: Rates, tasks: Sequence[str]) -> float:
    """Mean over tasks of sampled pass@1 (see :func:`paired`)."""
    (known,) = paired([model], tasks)
    return float(np.mean([np.mean(known[t]) for t in tasks]))


def paired(models: Sequence[Rates], tasks: Sequence[str]) -> list[Rates]:
    """The models on the problems of which all of them have a scored answer.

    Raises:
        CoterieError: there is no such problem of a task.
    """
    out: list[dict[str, Sequence[float]]] = [{} for _ in models]
    for t in tasks:
        every = np.array([m[t] for m in models], float)  # [models, problems]
        known = every[:, ~np.isnan(every).any(0)]
        if not known.shape[1]:
            raise CoterieError(
                f"evaluation: no problem of {t} has a scored answer of every model compared; look at the scoring settings, "
                "delete the folder eval and run again"
            )
        for kept, row in zip(out, known, strict=True):
            kept[t] = row.tolist()
    return list(out)


def resampled(models: Sequence[Rates], tasks: Sequence[str], seed: int = 0) -> NDArray[np.float64]:
    """[models, RESAMPLES] scores under resampling of problems within each task; the same draws for all models."""
    rng = np.random.default_rng(seed)
    out = np.zeros((len(models), RESAMPLES))
    for t in tasks:
        n = len(models[0][t])
        draws = rng.integers(n, size=(RESAMPLES, n))
        for i, m in enumerate(models):
            out[i] += np.asarray(m[t])[draws].mean(1) / len(tasks)
    return out


def retention(base: Rates, expert: Rates, model: Rates, tasks: Sequence[str]) -> dict[str, Any]:
    """What ``model`` keeps of ``expert`` on the expert's tasks.

    ``score_retention = model / expert`` flatters where the base is good already; ``gain_retention = (model - base) /
    (expert - base)`` does not, and is None (undefined) where the interval of the expert's gain reaches 0. Intervals: 95%.
    """
    base, expert, model = paired([base, expert, model], tasks)
    b, e, m = score(base, tasks), score(expert, tasks), score(model, tasks)
    draws = resampled([base, expert, model], tasks)  # [3, R]
    gain, kept = draws[1] - draws[0], draws[2] - draws[0]  # [R]
    gain_interval = _interval(gain)
    defined = gain_interval[0] > 0
    return {
        "base": b,
        "expert": e,
        "score": m,
        "expert_gain": e - b,
        "expert_gain_interval": gain_interval,
        "difference_to_expert_interval": _interval(draws[2] - draws[1]),
        "score_retention": m / e if e else None,
        "gain_retention": (m - b) / (e - b) if defined else None,
        "gain_retention_interval": _interval(kept[gain > 0] / gain[gain > 0]) if defined else None,
    }


def pooled(base: Rates, experts: Sequence[tuple[Rates, Sequence[str]]], model: Rates) -> dict[str, Any]:
    """What ``model`` keeps over all experts (each with its tasks): ``sum (model - base) / sum (expert - base)``, and the same
    of the scores. Sums first: a mean of ratios would be ruled by the expert that gained least."""
    known = [(paired([base, e, model], tasks), tasks) for e, tasks in experts]
    of = np.array([[score(m, tasks) for m in three] for three, tasks in known])  # [D, 3]
    draws = sum(resampled(three, tasks, seed=i) for i, (three, tasks) in enumerate(known))  # [3, R]
    assert isinstance(draws, np.ndarray)
    b, e, m = of.sum(0)
    gain, kept = draws[1] - draws[0], draws[2] - draws[0]  # [R]
    defined = _interval(gain)[0] > 0
    return {
        "score_retention": float(m / e) if e else None,
        "gain_retention": float((m - b) / (e - b)) if defined else None,
        "gain_retention_interval": _interval(kept[gain > 0] / gain[gain > 0]) if defined else None,
    }


def difference(first: Rates, second: Rates, tasks: Sequence[str]) -> dict[str, Any]:
    """``first - second`` with its interval."""
    first, second = paired([first, second], tasks)
    draws = resampled([first, second], tasks)  # [2, R]
    return {"difference": score(first, tasks) - score(second, tasks), "interval": _interval(draws[0] - draws[1])}


def _interval(values: NDArray[np.float64]) -> list[float]:
    low, high = np.quantile(values, [0.025, 0.975])
    return [float(low), float(high)]
