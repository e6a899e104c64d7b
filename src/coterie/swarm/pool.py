"""Groups that have arrived and wait to be used: bounded in number, in age and per author, each content once."""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from coterie.rng import derive
from coterie.swarm.verify import answer_digests
from coterie.types import Group

REMEMBERED = 16_384  # digests of answers that have been here


@dataclass(frozen=True)
class Entry:
    """A group that waits. ``frame``: the bytes it came in, from which a restarted node rebuilds it."""

    group: Group
    frame: bytes
    arrived: int  # collect count
    copied: tuple[bool, ...] = ()  # per trajectory: the same answer was here before
    scored: bool = False


class Pool:
    """A node's own stock of peers' groups.

    Args:
        capacity: most groups; when full, the author with the most groups for its worth loses its oldest.
        ttl: collects after which an unused group goes.
    """

    def __init__(self, capacity: int, ttl: int) -> None:
        self.capacity, self.ttl = capacity, ttl
        self.entries: OrderedDict[str, Entry] = OrderedDict()  # by group id, oldest first
        self.dropped: Counter[str] = Counter()
        self._answers: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.entries)

    def remember(self, group: Group) -> tuple[bool, ...]:
        """Note a group's answers. For each: whether it was here before, as an answer to the same problem, whoever signed it."""
        digests = answer_digests(group)
        known = tuple(d in self._answers for d in digests)
        for d in digests:
            self._answers[d] = None
            self._answers.move_to_end(d)
        while len(self._answers) > REMEMBERED:
            self._answers.popitem(last=False)
        return known

    def add(self, entry: Entry, worth: Mapping[str, float] = MappingProxyType({})) -> None:
        """``worth``: of an author's groups, 0 to 1 (1 for those not in it)."""
        self.entries[entry.group.id] = entry
        if len(self.entries) > self.capacity:
            counts = Counter(e.group.author for e in self.entries.values())
            loser = max(counts, key=lambda a: counts[a] / max(worth.get(a, 1.0), 0.01))
            oldest = next(i for i, e in self.entries.items() if e.group.author == loser)
            del self.entries[oldest]
            self.dropped["full"] += 1

    def order(self, seed: int, last: Collection[str] = ()) -> list[str]:
        """Ids at random, one author after the other: a flood waits behind everybody's first group. Authors
        in ``last`` come after all others. What some author adds never changes the order of the others' groups."""
        seen: Counter[str] = Counter()
        turn: dict[str, tuple[bool, int, int]] = {}
        for place, i in sorted((derive(seed, i), i) for i in self.entries):
            author = self.entries[i].group.author
            turn[i] = (author in last, seen[author], place)
            seen[author] += 1
        return sorted(turn, key=turn.__getitem__)

    def expire(self, now: int) -> None:
        for i in [i for i, e in self.entries.items() if now - e.arrived > self.ttl]:
            del self.entries[i]
            self.dropped["expired"] += 1

    def remove(self, group_id: str, why: str) -> None:
        if self.entries.pop(group_id, None) is not None:
            self.dropped[why] += 1

    def state(self) -> dict[str, Any]:
        """Plain JSON data. Entries as (frame, arrived, rewards or None, copied)."""
        rows = []
        for e in self.entries.values():
            rewards = e.group.rewards if e.scored else None
            rows.append([base64.b64encode(e.frame).decode(), e.arrived, rewards, e.copied])
        return {"entries": rows, "contents": list(self._answers), "dropped": dict(self.dropped)}

    def load_contents(self, state: dict[str, Any]) -> None:
        """Everything but the entries, which only the node can rebuild."""
        self._answers = OrderedDict.fromkeys(state["contents"])
        self.dropped = Counter(state["dropped"])
