"""Own answers as the measure of others': what a right/wrong verifier cannot see in a right answer is its form.

Over-long answers and answers with foreign text in them earn full reward and teach their form along with their content (arXiv
2511.09780). Limits in absolute numbers would depend on model and task; these are relative to what this node writes itself, so
they move with it. They are off for a node that has written too little to compare with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.swarm.selection import worst_stretch
from coterie.types import Group, Source, StopReason

WINDOW = 16  # tokens
_ANSWERS, _LEAST = 512, 16
_NEVER_ABOVE = -2.0  # a stretch as likely as this is not strange, however certain this node is


class Yardstick:
    """Keeps the last answers' lengths (per task) and likelihoods.

    Args:
        longer: peers' right answers may be so many times as long as the 99th percentile of own finished ones; 0: no limit.
        less_likely: a peer's most unlikely 16 tokens may have so many times the negative mean log-prob of the 1st percentile
            of own answers' most unlikely 16 tokens; 0: no limit.
    """

    def __init__(self, longer: float, less_likely: float) -> None:
        self.longer, self.less_likely = longer, less_likely
        self._lengths: dict[str, deque[int]] = {}
        self._worst: deque[float] = deque(maxlen=_ANSWERS)

    def note(self, groups: Sequence[Group]) -> None:
        """Own groups, as rolled out."""
        for g in groups:
            lengths = self._lengths.setdefault(g.problem.task, deque(maxlen=_ANSWERS))
            for t in g.trajectories:
                own = t.behavior_logprobs[t.source == int(Source.POLICY)]  # [t]
                if t.stop_reason is StopReason.EOS:
                    lengths.append(len(own))
                if len(own) and np.isfinite(own).all():
                    self._worst.append(worst_stretch(own, WINDOW))

    def longest(self, task: str) -> float:
        """Tokens that the policy may have written in a right answer (what helpers wrote into it does not count)."""
        lengths = self._lengths.get(task, ())
        return self.longer * float(np.quantile(lengths, 0.99)) if self.longer and len(lengths) >= _LEAST else np.inf

    def least_likely(self) -> float:
        """Mean log-prob that the most unlikely stretch of an answer must reach."""
        if not self.less_likely or len(self._worst) < _LEAST:
            return -np.inf
        return min(_NEVER_ABOVE, self.less_likely * float(np.quantile(self._worst, 0.01)))

    def too_long(self, group: Group) -> bool:
        """Whether an answer that would be learned from is too long. ``group``: scored."""
        limit = self.longest(group.problem.task)
        return any((t.source == int(Source.POLICY)).sum() > limit for t in better(group))

    def implausible(self, logprobs: Sequence[NDArray[np.float32]]) -> bool:
        """Whether this node could hardly have written one of a group's answers. ``logprobs``: its own, [t] per trajectory.

        The worst stretch, not the mean: text injected around a right answer would vanish in the mean over all tokens.
        """
        limit = self.least_likely()
        return any(worst_stretch(row, WINDOW) < limit for row in logprobs)

    def state(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {"lengths": {k: list(v) for k, v in self._lengths.items()}, "worst": list(self._worst)}

    def load(self, state: dict[str, Any]) -> None:
        self._lengths = {k: deque(v, maxlen=_ANSWERS) for k, v in state["lengths"].items()}
        self._worst = deque(state["worst"], maxlen=_ANSWERS)


def better(group: Group) -> list[Any]:
    """Trajectories with more than the group's mean reward: those that teach by example."""
    rewards = group.valid_rewards
    mean = float(np.mean(rewards)) if rewards else 0.0
    return [t for t in group.trajectories if t.reward is not None and t.reward > mean]
