"""Held-out evaluation: sampled pass@1 and unbiased pass@k per task, with intervals and the settings they were made with."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie.helpers.modes import Mode, sample_mode
from coterie.rng import derive
from coterie.stats import cluster_interval, pass_at_k
from coterie.types import Problem, Sampling

if TYPE_CHECKING:
    from coterie.engines.base import Engine
    from coterie.helpers.roles import HelperSet
    from coterie.prompting import PromptEncoder
    from coterie.tasks.scoring import Scorer


@dataclass(frozen=True)
class TaskResult:
    """Counts for one task: ``correct[i]`` of ``scored[i]`` answers to problem ``i`` were right."""

    task: str
    correct: tuple[int, ...]
    scored: tuple[int, ...]
    mean_length: float
    truncated: float

    def accuracy(self) -> float:
        """Sampled pass@1: the mean over problems of the share of right answers; NaN if none could be scored."""
        return pass_at_k(self.scored, self.correct, 1)

    def interval(self) -> tuple[float, float]:
        """95% interval of the accuracy, problems being the independent units."""
        return cluster_interval([c / n for c, n in zip(self.correct, self.scored, strict=True) if n])


@dataclass(frozen=True)
class Evaluation:
    tasks: dict[str, TaskResult]
    settings: dict[str, Any]
    seconds: float

    def accuracy(self) -> float:
        """Mean over tasks (each task counts the same); NaN if any task could not be scored."""
        return float(np.mean([t.accuracy() for t in self.tasks.values()])) if self.tasks else float("nan")

    def pass_at(self, k: int) -> float:
        """pass@k, mean over tasks; NaN if a problem has fewer than ``k`` scored answers."""
        if not self.tasks or any(0 < n < k for t in self.tasks.values() for n in t.scored):
            return float("nan")
        return float(np.mean([pass_at_k(t.scored, t.correct, k) for t in self.tasks.values()]))

    def metrics(self, ks: Sequence[int] = ()) -> dict[str, float]:
        out = {"eval/accuracy": self.accuracy(), "time/eval_s": self.seconds}
        out |= {f"eval/pass_{k}": self.pass_at(k) for k in ks}
        for name, t in self.tasks.items():
            low, high = t.interval()
            out |= {f"eval/{name}/accuracy": t.accuracy(), f"eval/{name}/low": low, f"eval/{name}/high": high}
            out |= {f"eval/{name}/length": t.mean_length, f"eval/{name}/truncated": t.truncated}
        return {k: v for k, v in out.items() if math.isfinite(v)}

    def to_json(self, ks: Sequence[int]) -> dict[str, Any]:
        """Everything a reader needs to check the figures: settings, counts per problem, pass@k, intervals."""
        tasks = {}
        for name, t in self.tasks.items():
            possible = [k for k in ks if k <= min(t.scored, default=0)]
            tasks[name] = {
                "pass": {str(k): pass_at_k(t.scored, t.correct, k) for k in possible},
                "interval95": list(t.interval()),
                "problems": len(t.correct),
                "correct": list(t.correct),
                "scored": list(t.scored),
                "mean_length": t.mean_length,
                "truncated": t.truncated,
            }
        mean = self.accuracy()
        known = mean if math.isfinite(mean) else None
        return {"settings": self.settings, "accuracy": known, "tasks": tasks, "seconds": self.seconds}


def evaluate(
    engine: Engine,
    encoder: PromptEncoder,
    problems: Mapping[str, Sequence[Problem]],
    samples: int,
    sampling: Sampling,
    scorer: Scorer,
    *,
    seed: int,
    mode: Mode = "plain",
    helpers: HelperSet | None = None,
) -> Evaluation:
    """Sample ``samples`` answers to every problem and score them.

    The same problems and the same random streams for every model evaluated with the same ``seed``, so that two models
    are compared on paired draws.
    """
    start = time.perf_counter()
    flat = [(name, p) for name, ps in problems.items() for p in ps]
    questions = [p.prompt for _, p in flat]
    seeds = [derive(seed, "eval", p.id) for _, p in flat]
    rows = [
        (i, t, None if t.failed else scorer.submit(flat[i][1], t.text))
        for i, _, t in sample_mode(mode, engine, encoder, questions, samples, sampling, seeds, helpers)
    ]
    correct, scored = [0] * len(flat), [0] * len(flat)
    lengths: dict[str, list[int]] = {name: [] for name in problems}
    cut: dict[str, list[bool]] = {name: [] for name in problems}
    for i, trajectory, future in rows:
        name, reward = flat[i][0], None if future is None else future.result().reward
        lengths[name].append(trajectory.response_length)
        cut[name].append(trajectory.truncated)
        if reward is not None:
            scored[i] += 1
            correct[i] += reward >= 1.0
    results = {}
    for name in problems:
        at = [i for i, (n, _) in enumerate(flat) if n == name]
        results[name] = TaskResult(
            name,
            tuple(correct[i] for i in at),
            tuple(scored[i] for i in at),
            float(np.mean(lengths[name])) if at else 0.0,
            float(np.mean(cut[name])) if at else 0.0,
        )
    settings = {
        "mode": mode,
        "samples": samples,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "stop": list(sampling.stop),
        "seed": seed,
    }
    return Evaluation(results, settings, time.perf_counter() - start)
