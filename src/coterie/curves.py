"""Curves of an experiment's runs: held-out accuracy against updates, generated tokens and processor seconds.

A point is what a run's nodes had reached at one evaluation: ``step``, ``tokens`` (generated, mean over nodes), ``trained``
tokens, ``cpu_s`` (processor seconds, mean over nodes), ``metric`` (mean over nodes), ``low`` and ``high`` (over nodes), and
since the point before: ``own_reward`` of own groups and ``mix_reward`` of all answers trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

Axis = Literal["end", "step", "tokens", "cpu_s"]
AXES = {"step": "at equal steps", "tokens": "at equal generated tokens", "cpu_s": "at equal processor time"}
Row = dict[str, Any]
Points = Sequence[dict[str, float]]


def generated(row: Row) -> float:
    """Tokens that a step's line of the metrics stands for: all that were sampled (supervised: trained on)."""
    return float(row.get("tokens/generated", row.get("sft/tokens", 0.0)) + row.get("tokens/extra", 0.0))


def curve(logs: Sequence[Sequence[Row]], metric: str) -> list[dict[str, float]]:
    """The points of a run from the metrics of its nodes, at the steps at which all of them evaluated."""
    steps = sorted(set.intersection(*({r["step"] for r in log if metric in r} for log in logs)))
    out = []
    for i, step in enumerate(steps):
        values = [r[metric] for log in logs for r in log if r["step"] == step and metric in r]
        until = [r for log in logs for r in log if 0 < r["step"] <= step]
        since = [r for r in until if r["step"] > (steps[i - 1] if i else 0)]
        point = {
            "step": float(step),
            "tokens": sum(generated(r) for r in until) / len(logs),
            "trained": sum(r.get("loss/trained_tokens", 0.0) for r in until) / len(logs),
            "cpu_s": sum(r.get("time/cpu_s", 0.0) for r in until) / len(logs),
            "metric": float(np.mean(values)),
            "low": min(values),
            "high": max(values),
        }
        for name, key in (("own_reward", "own/reward"), ("mix_reward", "update/mix_reward")):
            if found := [r[key] for r in since if key in r]:
                point[name] = float(np.mean(found))
        out.append(point)
    return out


def value_at(points: Points, axis: str, x: float, of: str = "metric") -> float:
    """``of`` at ``x`` on ``axis``: a straight line between evaluations, the last value beyond them."""
    return float(np.interp(x, [p[axis] for p in points], [p[of] for p in points]))


def at_same(axis: str, first: Sequence[Points], second: Sequence[Points]) -> tuple[list[float], list[float]]:
    """The metric of two lists of curves, paired, where both of a pair have come equally far on ``axis``: the most that both
    reach."""
    ends = [min(a[-1][axis], b[-1][axis]) for a, b in zip(first, second, strict=True)]
    return (
        [value_at(p, axis, x) for p, x in zip(first, ends, strict=True)],
        [value_at(p, axis, x) for p, x in zip(second, ends, strict=True)],
    )
