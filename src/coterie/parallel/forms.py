"""Whose form does an answer have? Format leakage: answers to one task written the way another task is answered.

A form is what remains of a text when every digit is a ``0``, every letter an ``a`` or ``A``. Forms are told apart by the three
characters at each place (multinomial naive Bayes over the examples' trigrams, equal priors).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from coterie.types import Problem

if TYPE_CHECKING:
    from concurrent.futures import Future

    from coterie.tasks.scoring import Score, Scorer

_ORDER = 3
_SMOOTHING = 0.1


def form(text: str) -> str:
    """``38-57=-19<answer>-19`` -> ``00-00=-00<answer>-00`` (tags are kept)."""
    parts = re.split(r"(</?answer>)", text.strip())
    return "".join(p if i % 2 else _bare(p) for i, p in enumerate(parts))


def _bare(text: str) -> str:
    return re.sub(r"[^\W\d_]", lambda m: "A" if m[0].isupper() else "a", re.sub(r"\d", "0", text))


def _trigrams(text: str) -> Counter[str]:
    padded = "\x02" * (_ORDER - 1) + form(text).replace("<answer>", "\x03").replace("</answer>", "") + "\x04"
    return Counter(padded[i : i + _ORDER] for i in range(len(padded) - _ORDER + 1))


class Forms:
    """Learned from example answers per task."""

    def __init__(self, examples: Mapping[str, Sequence[str]]) -> None:
        counts = {task: sum((_trigrams(t) for t in texts), Counter[str]()) for task, texts in examples.items()}
        size = len({g for c in counts.values() for g in c}) + 1  # one for what none has
        self._tables = {}
        for task, c in counts.items():
            total = sum(c.values()) + _SMOOTHING * size
            self._tables[task] = (
                {g: math.log((n + _SMOOTHING) / total) for g, n in c.items()},
                math.log(_SMOOTHING / total),
            )

    def task_of(self, text: str) -> str:
        """The task whose answers look most like ``text``."""
        found = _trigrams(text)
        return max(
            self._tables,
            key=lambda task: sum(n * self._tables[task][0].get(g, self._tables[task][1]) for g, n in found.items()),
        )


class Listener:
    """A scorer that keeps the texts it was given."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self.texts: dict[str, list[str]] = {}  # problem id -> answers

    def submit(self, problem: Problem, text: str) -> Future[Score]:
        self.texts.setdefault(problem.id, []).append(text)
        return self._scorer.submit(problem, text)

    def of(self, problems: Sequence[Problem]) -> list[str]:
        """All answers to some problems."""
        return [a for p in problems for a in self.texts.get(p.id, [])]


def leaked(forms: Forms, domains: Mapping[str, Sequence[str]], task: str, texts: Sequence[str]) -> float:
    """Share of ``texts``, answers to ``task``, that have the form of a task of another domain (a task that belongs to none is
    its own)."""
    own = {task} | {t for tasks in domains.values() if task in tasks for t in tasks}
    return sum(forms.task_of(t) not in own for t in texts) / len(texts) if texts else 0.0
