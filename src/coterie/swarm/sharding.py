"""How a node listens to a fixed amount of a swarm of any size.

Every message goes to one random leaf of a 16-ary tree with 4 levels (65,536 leaves): ``g/a/3/f/0/<node>``. A node
listens to a few random subtrees that cover a fraction of the leaves; each message of the swarm then reaches it with
that probability, whoever sent it. No two nodes need to agree on a number of shards. The fraction follows what arrives:
:class:`Listener` moves it so that each step brings about as many messages as the node asked for.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

LEVELS = 4
BASE = 16
_FLOOD = 8.0
_DIGITS = "0123456789abcdef"
Prefix = str  # hex digits, e.g. "a3": the subtree g/a/3/**


def random_leaf(rng: random.Random) -> str:
    """A leaf as a key part, e.g. ``a/3/f/0``."""
    return "/".join(rng.choice(_DIGITS) for _ in range(LEVELS))


def plan(fraction: float) -> tuple[int, int]:
    """(depth, count) of the subtrees that cover about ``fraction`` of all leaves: count / 16^depth, count in 4..63.

    Depth 0 means everything. The error is at most 1/7 of the fraction, except below 4 / 16^4 (one leaf is the least).
    """
    if fraction >= 1 - 1 / 32:
        return 0, 1
    for depth in range(1, LEVELS + 1):
        count = round(fraction * BASE**depth)
        if count >= 4:
            return depth, count
    return LEVELS, max(1, count)


def redraw(current: set[Prefix], fraction: float, rng: random.Random, moves: int = 1) -> set[Prefix]:
    """The next subtrees: the plan for ``fraction``, keeping what is kept of ``current`` but ``moves`` of them."""
    depth, count = plan(fraction)
    if depth == 0:
        return {""}
    kept = [p for p in sorted(current) if len(p) == depth]
    rng.shuffle(kept)
    drop = moves if len(kept) >= count else 0
    chosen = set(kept[: max(0, count - drop)])
    while len(chosen) < count:
        chosen.add("".join(rng.choice(_DIGITS) for _ in range(depth)))
    return chosen


def covers(prefixes: set[Prefix], leaf: str) -> bool:
    """Whether a leaf (as made by :func:`random_leaf`) lies in one of the subtrees."""
    digits = leaf.replace("/", "")
    return any(digits.startswith(p) for p in prefixes)


def key_of(prefix: Prefix, levels: int = LEVELS) -> str:
    """Key expression of a subtree: ``a/3/*/*`` for ``a3``."""
    return "/".join([*prefix, *["*"] * (levels - len(prefix))])


def fair_sample(frames: Sequence[tuple[str, bytes]], most: int, rng: random.Random) -> list[bytes]:
    """At most ``most`` of the (sender, frame) pairs, at random, one sender after the other: who sends much leaves room for
    the rest. The sender is only what the carrier says; believing a frame is another matter."""
    if len(frames) <= most:
        return [frame for _, frame in frames]
    order = rng.sample(range(len(frames)), len(frames))
    seen: Counter[str] = Counter()
    turns: list[tuple[int, int]] = []
    for i in order:
        turns.append((seen[frames[i][0]], i))
        seen[frames[i][0]] += 1
    turns.sort(key=lambda t: t[0])  # stable: within a turn the order stays random
    return [frames[i][1] for _, i in turns[:most]]


class Listener:
    """Chooses the subtrees to listen to, step by step, so that about ``wanted`` messages arrive per step.

    The fraction starts from the size of the swarm (``wanted / (nodes * published)``) and is then corrected by what
    arrives, with a bounded step, whoever is fast or slow. Refused messages do not count as arrived, so that a flood does not
    make a node deaf to others; but it never takes more than ``_FLOOD`` times what it wants, whatever that costs it.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.fraction = 1.0
        self.prefixes: set[Prefix] = {""}
        self._mean: float | None = None

    def start(self, nodes: int, published: float, wanted: float) -> None:
        """First estimate: every one of ``nodes`` publishes ``published`` messages in one of my steps."""
        traffic = max(1, nodes - 1) * max(published, 1.0)
        self.fraction = min(1.0, wanted / traffic)
        self._mean = None
        self.prefixes = redraw(set(), self.fraction, self._rng)

    def update(self, arrived: int, wanted: float, wasted: float = 0.0) -> None:
        """One step has brought ``arrived`` messages, of which a share ``wasted`` was refused."""
        useful = max(arrived * (1.0 - wasted), arrived / _FLOOD)
        self._mean = 0.75 * (wanted if self._mean is None else self._mean) + 0.25 * useful
        ratio = wanted / max(self._mean, 0.25)
        step = min(1.25, max(0.8, ratio)) if abs(ratio - 1) > 0.2 else 1.0
        self._mean *= step
        self.fraction = min(1.0, max(BASE**-LEVELS, self.fraction * step))
        self.prefixes = redraw(self.prefixes, self.fraction, self._rng)
