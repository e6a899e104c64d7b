"""How many peer groups to ask for: fixed, or backing off while the node drifts."""

from __future__ import annotations

from typing import Any


class FixedShare:
    """J never changes."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted

    def feedback(self, accuracy: float, kl: float) -> None:
        """Ignored."""

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


class AdaptiveShare(FixedShare):
    """Halves J when own held-out accuracy falls ``margin`` below its best, or the KL to the start model jumps over
    ``kl_limit``; gives back one group after every evaluation without either (additive increase, multiplicative decrease).
    J never exceeds its configured value."""

    def __init__(self, wanted: int, margin: float = 0.03, kl_limit: float = 0.5) -> None:
        super().__init__(wanted)
        self.most, self.margin, self.kl_limit = wanted, margin, kl_limit
        self.best = float("-inf")

    def feedback(self, accuracy: float, kl: float) -> None:
        self.best = max(self.best, accuracy)
        if accuracy < self.best - self.margin or kl > self.kl_limit:
            self.wanted //= 2
            self.best = self.best if kl > self.kl_limit else accuracy  # judge the next step from here
        else:
            self.wanted = min(self.most, self.wanted + 1)

    def state(self) -> dict[str, Any]:
        return {"wanted": self.wanted, "best": self.best if self.best > float("-inf") else None}

    def load(self, state: dict[str, Any]) -> None:
        self.wanted = int(state["wanted"])
        self.best = float("-inf") if state["best"] is None else float(state["best"])
