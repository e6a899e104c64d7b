"""What an experiment's runs reached: held-out accuracy at the end, and against updates, tokens and processor seconds.

A point of a curve is what a run's nodes had reached at one evaluation: ``step``, ``tokens`` (generated, mean over nodes),
``trained`` tokens, ``cpu_s`` (processor seconds, mean over nodes), ``metric`` (mean over nodes), ``low`` and ``high`` (over
nodes), and since the point before: ``own_reward`` of own groups and ``mix_reward`` of all answers trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from coterie.rundir import read_jsonl

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


def record(arm: str, seed: int, run_dirs: Sequence[Path], metric: str, also: Sequence[str]) -> dict[str, Any]:
    """One line of results.jsonl: first and last evaluation (means over nodes), and what the run cost."""
    logs = [list(read_jsonl(d / "metrics.jsonl")) for d in run_dirs]
    ends = [[r for r in log if "eval/accuracy" in r] for log in logs]
    keys = sorted(
        {k for log in ends for r in (log[0], log[-1]) for k in r if k.startswith("eval/") or k in (metric, *also)}
    )
    steps = [r for log in logs for r in log if r["step"] > 0]
    tails = [[r["own/reward"] for r in log[-max(1, len(log) // 10) :] if "own/reward" in r] for log in logs]
    return {
        "arm": arm,
        "seed": seed,
        "nodes": len(logs),
        "steps": max(r["step"] for log in logs for r in log),
        "start": {k: float(np.mean([log[0][k] for log in ends if k in log[0]])) for k in keys},
        "end": {k: float(np.mean([log[-1][k] for log in ends if k in log[-1]])) for k in keys},
        "end_per_node": [log[-1].get(metric) for log in ends],
        "own_reward_last_tenth": float(np.mean([np.mean(tail) for tail in tails if tail] or [0.0])),
        "generated_tokens": sum(generated(r) for r in steps) / len(logs),
        "trained_tokens": sum(r.get("loss/trained_tokens", 0.0) for r in steps) / len(logs),
        "step_seconds": sum(r["time/step_s"] for r in steps) / len(logs),
        "curve": curve(logs, metric),
    }


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
