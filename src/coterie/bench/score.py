"""Scores per second of each kind of verifier, on answers of which half are right.

Rates are wall-clock over a batch that was submitted at once, after one batch for warm-up, with the scorer's default settings.
"""

from __future__ import annotations

import time
from typing import Any

from coterie.config import ScoringConfig, TaskConfig
from coterie.tasks import Scorer, build_tasks
from coterie.types import Problem

Pairs = list[tuple[Problem, str]]

_TESTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0"


def run(workers: int = 1, scale: float = 1.0) -> dict[str, Any]:
    """Measure. ``scale`` multiplies the number of scores (1: some seconds in all).

    Returns:
        ``{"workers": int, "start_s": float, "scores_per_s": {kind: float}, "cage": {wall: None or the reason it is missing}}``.
        ``spiral_matrix`` and ``countdown`` are worker-scored reasoning-gym tasks (own scorer; sympy); ``code`` starts two
        processes per score.
    """
    with Scorer(ScoringConfig(workers=workers)) as scorer:
        start = time.perf_counter()
        cage = scorer.cage_report()
        start_s = time.perf_counter() - start
        rates = {kind: _rate(scorer, pairs) for kind, pairs in _batches(scale).items()}
    return {"workers": workers, "start_s": round(start_s, 2), "scores_per_s": rates, "cage": cage}


def _batches(scale: float) -> dict[str, Pairs]:
    many, some, few = (max(2, int(n * scale)) for n in (20000, 3000, 40))
    return {
        "exact": _pairs("exact", "42", "<answer>42</answer>", "<answer>43</answer>", many),
        "numeric": _pairs("numeric", "42", "<answer>42.0</answer>", "<answer>43</answer>", many),
        "spiral_matrix": _task_pairs("spiral_matrix", some),
        "countdown": _task_pairs("countdown", some),
        "math": _pairs("math", "\\frac{1}{3}x", "\\boxed{x/3}", "\\boxed{x/2}", some // 3),
        "code": _pairs("code", _TESTS, _program("+"), _program("-"), few),
    }


def _rate(scorer: Scorer, pairs: Pairs) -> float:
    scorer.score(pairs[: max(2, len(pairs) // 10)])
    start = time.perf_counter()
    scores = scorer.score(pairs)
    seconds = time.perf_counter() - start
    right = sum(s.reward == 1.0 for s in scores)
    if not 0.4 <= right / len(pairs) <= 0.6:  # a rate over failures would mean nothing
        raise AssertionError(f"{right} of {len(pairs)} right where half should be: {scores[:2]}")
    return round(len(pairs) / seconds, 1)


def _pairs(verifier: str, reference: str, right: str, wrong: str, n: int) -> Pairs:
    problem = Problem("jsonl/000000000000#1", "bench", "", reference, verifier)
    return [(problem, right if i % 2 else wrong) for i in range(n)]


def _task_pairs(name: str, n: int) -> Pairs:
    problems = build_tasks({name: TaskConfig()}).draw("bench", 0, 8)
    answers = [p.metadata["entry"]["metadata"].get("expression") or p.reference for p in problems]
    return [
        (problems[i % 8], f"<answer>{answers[i % 8]}</answer>" if i // 8 % 2 else "<answer>1 + 1</answer>")
        for i in range(n)
    ]


def _program(operator: str) -> str:
    return f"```python\ndef add(a, b):\n    return a {operator} b\n```"
