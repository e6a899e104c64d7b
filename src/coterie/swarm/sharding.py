"""How a node listens to a fixed amount of a swarm of any size.

Every message goes to one random leaf of a 16-ary tree with 4 levels (65,536 leaves): ``g/a/3/f/0/<node>``. A node
listens to a few random subtrees that cover a fraction of the leaves; each message of the swarm then reaches it with
that probability, whoever sent it. No two nodes need to agree on a number of shards. The fraction follows what arrives:
:class:`Listener` moves it so that each step brings about as many messages as the node asked for.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from typing import TypeVar

LEVELS = 4
BASE = 16
_FLOOD = 32.0
_DIGITS = "0123456789abcdef"
T = TypeVar("T")
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


def fair_sample(items: Sequence[tuple[str, T]], most: int, rng: random.Random) -> list[tuple[str, T]]:
    """At most ``most`` of the (sender, thing) pairs, drawn one sender after the other, in the order in which they came: who
    sends much leaves room for the rest. The sender is only what the carrier says; believing a frame is another matter."""
    if len(items) <= most:
        return list(items)
    order = rng.sample(range(len(items)), len(items))
    seen: Counter[str] = Counter()
    turns: list[tuple[int, int]] = []
    for i in order:
        turns.append((seen[items[i][0]], i))
        seen[items[i][0]] += 1
    turns.sort(key=lambda t: t[0])  # stable: within a turn the order stays random
    return [items[i] for i in sorted(i for _, i in turns[:most])]


class Inbox:
    """Frames that wait for the next collect, bounded as a whole: what is over ``capacity`` is lost by whoever has most
    waiting (its oldest goes), so a flood displaces itself."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.lost = 0
        self._queues: dict[str, deque[tuple[int, bytes]]] = {}
        self._count = self._size = 0

    def put(self, sender: str, frame: bytes) -> None:
        self._queues.setdefault(sender, deque()).append((self._count, frame))
        self._count += 1
        self._size += 1
        if self._size > self.capacity:
            most = max(self._queues, key=lambda s: len(self._queues[s]))
            self._queues[most].popleft()
            if not self._queues[most]:
                del self._queues[most]
            self._size -= 1
            self.lost += 1

    def take(self) -> list[tuple[str, bytes]]:
        """Everything, as (sender, frame) in the order of arrival."""
        rows = sorted((n, sender, frame) for sender, queue in self._queues.items() for n, frame in queue)
        self._queues, self._size = {}, 0
        return [(sender, frame) for _, sender, frame in rows]


class Listener:
    """Chooses the subtrees to listen to, step by step, so that about ``wanted`` messages arrive per step.

    The fraction starts from the size of the swarm (``wanted / (nodes * published)``) and is then corrected by what
    arrives, with a bounded step, whoever is fast or slow. Only *useful* messages count as arrived (the node says how many
    were), so that a flood neither makes a node deaf to others nor passes for plenty; but a node never takes more than
    ``_FLOOD`` times what it wants, whatever that costs it.
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

    def update(self, arrived: float, wanted: float, useful: float | None = None) -> None:
        """One step has brought ``arrived`` messages, of which ``useful`` were worth hearing (None: all)."""
        counted = arrived if useful is None else max(useful, arrived / _FLOOD)
        self._mean = 0.75 * (wanted if self._mean is None else self._mean) + 0.25 * counted
        ratio = wanted / max(self._mean, 0.25)
        step = min(1.25, max(0.8, ratio)) if abs(ratio - 1) > 0.2 else 1.0
        self._mean *= step
        self.fraction = min(1.0, max(BASE**-LEVELS, self.fraction * step))
        self.prefixes = redraw(self.prefixes, self.fraction, self._rng)
