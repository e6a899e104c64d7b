"""Groups that have arrived and wait to be used: bounded in number, in age and per author, each content once."""

from __future__ import annotations

import base64
import random
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

from coterie.swarm.verify import content_digest
from coterie.types import Group

REMEMBERED = 4096  # digests of contents that have been here


@dataclass(frozen=True)
class Entry:
    """A group that waits. ``frame``: the bytes it came in, from which a restarted node rebuilds it."""

    group: Group
    frame: bytes
    arrived: int  # collect count
    scored: bool = False


class Pool:
    """A node's own stock of peers' groups.

    Args:
        capacity: most groups; when full, the author with the most groups loses its oldest.
        ttl: collects after which an unused group goes.
    """

    def __init__(self, capacity: int, ttl: int) -> None:
        self.capacity, self.ttl = capacity, ttl
        self.entries: OrderedDict[str, Entry] = OrderedDict()  # by group id, oldest first
        self.dropped: Counter[str] = Counter()
        self._contents: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.entries)

    def remember(self, group: Group) -> bool:
        """Note a group's content. False if it was here before (a copy, whoever signed it)."""
        digest = content_digest(group)
        new = digest not in self._contents
        self._contents[digest] = None
        self._contents.move_to_end(digest)
        if len(self._contents) > REMEMBERED:
            self._contents.popitem(last=False)
        return new

    def add(self, entry: Entry) -> None:
        self.entries[entry.group.id] = entry
        if len(self.entries) > self.capacity:
            counts = Counter(e.group.author for e in self.entries.values())
            most = max(counts.values())
            oldest = next(i for i, e in self.entries.items() if counts[e.group.author] == most)
            del self.entries[oldest]
            self.dropped["full"] += 1

    def order(self, seed: int) -> list[str]:
        """Ids at random, one author after the other: a flood waits behind everybody's first group."""
        ids = sorted(self.entries)
        random.Random(seed).shuffle(ids)
        seen: Counter[str] = Counter()
        turn: dict[str, int] = {}
        for i in ids:
            author = self.entries[i].group.author
            turn[i] = seen[author]
            seen[author] += 1
        return sorted(ids, key=turn.__getitem__)

    def expire(self, now: int) -> None:
        for i in [i for i, e in self.entries.items() if now - e.arrived > self.ttl]:
            del self.entries[i]
            self.dropped["expired"] += 1

    def remove(self, group_id: str, why: str) -> None:
        if self.entries.pop(group_id, None) is not None:
            self.dropped[why] += 1

    def state(self) -> dict[str, Any]:
        """Plain JSON data. Entries as (frame, arrived, rewards or None)."""
        rows = []
        for e in self.entries.values():
            rewards = e.group.rewards if e.scored else None
            rows.append([base64.b64encode(e.frame).decode(), e.arrived, rewards])
        return {"entries": rows, "contents": list(self._contents), "dropped": dict(self.dropped)}

    def load_contents(self, state: dict[str, Any]) -> None:
        """Everything but the entries, which only the node can rebuild."""
        self._contents = OrderedDict.fromkeys(state["contents"])
        self.dropped = Counter(state["dropped"])
