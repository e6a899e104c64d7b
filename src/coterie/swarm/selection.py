"""Which groups enter an update: pure functions of (groups, seed, limits).

The result depends on the set of groups and the seed, never on the order in which they arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from coterie.rng import derive
from coterie.types import Group

Strategy = Literal["uniform", "informative", "variance"]


@dataclass(frozen=True)
class Quotas:
    """Most groups of one author and of one task in a selection; 0: no limit.

    ``share`` is an author's equal share: beyond it, and up to ``author``, it only fills what the others leave open.
    """

    author: int = 0
    task: int = 0
    share: int = 0


def select(
    groups: Sequence[Group], count: int, strategy: Strategy, seed: int, quotas: Quotas | None = None
) -> list[Group]:
    """At most ``count`` groups.

    ``uniform``: any; ``informative``: those whose rewards differ, then uniform (arXiv 2509.08721, section 5);
    ``variance``: largest variance of the rewards first, ties at random. Fewer than ``count`` come back if quotas or the
    supply say so: never a group over its quota.
    """
    quotas = quotas or Quotas()
    ordered = sorted(groups, key=lambda g: (derive(seed, g.id), g.id))  # a group's place depends on no other group
    if strategy != "uniform":
        ordered = [g for g in ordered if g.informative]
    if strategy == "variance":
        ordered.sort(key=lambda g: -float(np.var(g.valid_rewards)))  # stable: ties stay shuffled
    authors: Counter[str] = Counter()
    tasks: Counter[str] = Counter()
    chosen: list[Group] = []
    for limit in dict.fromkeys([quotas.share or quotas.author, quotas.author]):
        for g in ordered:
            over = (limit and authors[g.author] >= limit) or (quotas.task and tasks[g.problem.task] >= quotas.task)
            if len(chosen) >= count or over or g in chosen:
                continue
            authors[g.author] += 1
            tasks[g.problem.task] += 1
            chosen.append(g)
    return chosen


def equal_share(wanted: int, authors: int) -> int:
    """``wanted`` over ``authors``, rounded up."""
    return max(1, -(-wanted // max(1, authors)))


def fresh(groups: Sequence[Group], newest: Mapping[str, int], max_age: int) -> list[Group]:
    """Groups at most ``max_age`` versions behind the ``newest`` known of their author; none of an author not listed."""
    return [g for g in groups if g.author in newest and newest[g.author] - g.policy_version <= max_age]


def worst_stretch(logprobs: NDArray[np.float32], window: int) -> float:
    """Smallest mean over ``window`` consecutive tokens of ``logprobs`` [t] (over all of them if t <= window)."""
    if len(logprobs) == 0:
        return 0.0
    width = min(window, len(logprobs))
    total = np.concatenate([[0.0], np.cumsum(logprobs, dtype=np.float64)])
    return float(((total[width:] - total[:-width]) / width).min())
