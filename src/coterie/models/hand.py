"""The hand that writes a worked answer, and may slip once.

A worked answer is a chain of steps. Every step goes through :class:`Hand`, which returns the right result, or, at the one
step chosen to go wrong, a wrong one; what follows is worked out from what was written. So mistakes are of many kinds,
stand at any step, and are carried through, as those of a real writer are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


class Hand:
    """Writes steps. ``slip_at`` is the number of the step that goes wrong (None: every step is right)."""

    def __init__(self, rng: Random, slip_at: int | None = None) -> None:
        self.rng = rng
        self.slip_at = slip_at
        self.steps = 0

    def step(self, right: T, wrong: Callable[[], T]) -> T:
        """One step with any result; ``wrong`` makes a wrong one."""
        self.steps += 1
        return wrong() if self.steps - 1 == self.slip_at else right

    def number(self, right: int, low: int | None = None, high: int | None = None) -> int:
        """A step whose result is a number, kept within [low, high] when it goes wrong."""
        return self.step(right, lambda: self._near(right, low, high))

    def choice(self, right: T, options: Sequence[T]) -> T:
        """A step that picks one of a few options."""
        return self.step(right, lambda: self.rng.choice([o for o in options if o != right] or [right]))

    def _near(self, n: int, low: int | None, high: int | None) -> int:
        """A plausible wrong number: off by a little, by ten, or with one digit changed."""
        digits = list(str(abs(n)))
        place = self.rng.randrange(len(digits))
        digits[place] = str(self.rng.randrange(10))
        changed = int("".join(digits)) * (-1 if n < 0 else 1)
        off = self.rng.choice([-1, 1, -1, 1, -2, 2, -10, 10])
        options = [changed, n + off, n + 1, n - 1]
        fits = [o for o in options if o != n and (low is None or o >= low) and (high is None or o <= high)]
        return fits[0] if fits else n
