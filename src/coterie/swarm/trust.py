"""What a node remembers about authors: what it has taken from them, how new it was, and what they did wrong.

* **Replay and age** follow counters, never a clock. An author numbers its messages (``session``, ``seq``); a number is
  accepted once, and numbers that have left the window of the last 1024 are refused, so nothing is taken twice even after
  a restart. The age of a group is the author's newest known policy version minus the group's own.
* **Faults** count against an author only where its signature proves that it is the author; a forged message is nobody's.
  Honest differences (another task, a longer answer than this node takes, a late message) are counted and cost nothing.
* **Quarantine**: at four faults an author is ignored for 32 collects, then 64, 128, ...
* **Worth**: of the groups scored here, how many could teach something. An author far below own groups is *idle*: its groups
  come last, and do not count as traffic wanted. It is forgiven as soon as the share recovers.
* **Names**: whoever has sent four messages of one kind that were refused, and idle authors, are named once, whatever the kind.

Everything is bounded: 4096 authors (the least recently heard go first), two sessions each.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from math import comb
from typing import Any

import msgspec

from coterie.swarm.identity import short_name
from coterie.swarm.wire import Message, WireError
from coterie.types import Group

WINDOW = 1024
MAX_AUTHORS = 4096
STRIKES = 4
BAR = 32
MEMORY, ACCIDENT = 128, 0.01  # groups scored that count; how unlikely a share must be to be no accident
BLAMELESS = frozenset(
    "other_task too_long stale replay copy rate quarantined not_allowed longer implausible carried".split()  # noqa: SIM905
)


class Session(msgspec.Struct):
    """Messages of one start of an author: those at or below ``newest - WINDOW`` are refused, ``seen`` lists the rest."""

    number: int
    since: int  # my collect count when it was first heard of
    newest: int = -1
    version: int = 0
    seen: set[int] = msgspec.field(default_factory=set)


class Author(msgspec.Struct):
    """What is known about one author."""

    sessions: list[Session] = msgspec.field(default_factory=list)  # newest first, at most two
    accepted: int = 0
    used: int = 0
    used_at: int = -(10**9)
    scored: int = 0  # lately
    useful: int = 0  # of them
    named: set[str] = msgspec.field(default_factory=set)  # kinds for which the console has named it
    strikes: int = 0
    bars: int = 0
    barred_until: int = 0
    faults: dict[str, int] = msgspec.field(default_factory=dict)
    skew_ms: float | None = None  # smallest (my clock - its clock) lately: transit time plus clock difference
    heard_at: int = 0


class Ledger:
    """The authors' records.

    Args:
        max_age: groups older than this many of the author's own policy versions are refused as stale.
    """

    def __init__(self, max_age: int) -> None:
        self.max_age = max_age
        self.authors: OrderedDict[str, Author] = OrderedDict()
        self.refused: Counter[str] = Counter()
        self.own_scored = self.own_useful = 0  # own groups, lately

    def check_author(self, author: str, now: int) -> None:
        """Refuse who is in quarantine (before any signature is computed). Raises WireError."""
        record = self.authors.get(author)
        if record is not None and now < record.barred_until:
            raise WireError("quarantined", short_name(author))

    def check_new(self, message: Message, now: int) -> None:
        """Refuse what was taken before and what is too old; remember the rest as taken. Raises WireError."""
        record = self._record(message.author)
        record.heard_at = now
        body = message.body
        session = self._session(record, body.session, now)
        if body.seq in session.seen or body.seq <= session.newest - WINDOW:
            raise WireError("replay", f"message {body.session}/{body.seq} of {short_name(message.author)}", signed=True)
        age = session.version - body.policy_version
        session.seen.add(body.seq)
        if body.seq > session.newest:
            session.newest = body.seq
            if len(session.seen) > WINDOW // 2:
                session.seen = {s for s in session.seen if s > session.newest - WINDOW}
        session.version = max(session.version, body.policy_version)
        if age > self.max_age:
            raise WireError("stale", f"{age} versions behind its author's newest", signed=True)
        record.accepted += 1

    def note_clock(self, author: str, difference_ms: float) -> None:
        """Remember the smallest recent difference of the clocks; old minima fade."""
        record = self._record(author)
        old = record.skew_ms
        record.skew_ms = difference_ms if old is None else min(difference_ms, old + 0.1 * abs(difference_ms - old))

    def skew_s(self) -> float:
        """Median over authors of (my clock - theirs), seconds. Transit time is part of it, so small values mean nothing."""
        values = sorted(a.skew_ms for a in self.authors.values() if a.skew_ms is not None)
        return values[(len(values) - 1) // 2] / 1000.0 if values else 0.0

    def blame(self, author: str | None, kind: str, now: int) -> str:
        """Count a refusal; with a proven ``author`` and a real fault, a strike too.

        Returns:
            "quarantine" if that began one, "name" if the author should be named for this kind, else "".
        """
        self.refused[kind] += 1
        if author is None:
            return ""
        record = self._record(author)
        record.faults[kind] = record.faults.get(kind, 0) + 1
        if kind not in BLAMELESS:
            record.strikes += 1
            if record.strikes >= STRIKES:
                record.barred_until = now + BAR * 2 ** min(record.bars, 10)
                record.bars += 1
                record.strikes = 0
                record.named.add(kind)
                return "quarantine"
        if kind == "quarantined" or kind in record.named or record.faults[kind] < max(STRIKES, record.accepted // 4):
            return ""
        record.named.add(kind)
        return "name"

    def judge(self, author: str, useful: bool) -> bool:
        """Count a group that was scored. True if its author has just become idle and should be named."""
        record = self._record(author)
        record.scored, record.useful = _faded(record.scored, record.useful)
        record.scored += 1
        record.useful += useful
        if not self.idle(author):
            record.named.discard("idle")
            return False
        new = "idle" not in record.named
        record.named.add("idle")
        return new

    def idle(self, author: str) -> bool:
        """Whether :meth:`idlers` has this author."""
        return author in self.idlers([author])

    def idlers(self, among: Iterable[str]) -> set[str]:
        """Authors of whose groups so few were useful that, were they half as useful as own ones, this would be an accident of
        one in a hundred. Own groups are the measure, so what other authors do makes nobody idle or busy."""
        p = 0.5 * self.own_useful / max(1, self.own_scored)
        out = set()
        for name in among:
            a = self.authors.get(name)
            n, k = (a.scored, a.useful) if a is not None else (0, 0)
            if sum(comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1)) < ACCIDENT:
                out.add(name)
        return out

    def worth(self, among: Iterable[str]) -> dict[str, float]:
        """How much a group of each author counts, 0 to 1: fully if they are at least half as often useful as own ones.
        The little that is known of an author is completed by two groups as useful as those of all authors are on average."""
        own = self.own_useful / max(1, self.own_scored)
        typical = (sum(a.useful for a in self.authors.values()) + own) / (
            sum(a.scored for a in self.authors.values()) + 1
        )
        out = {}
        for name in among:
            a = self.authors.get(name)
            n, k = (a.scored, a.useful) if a is not None else (0, 0)
            out[name] = min(1.0, 2 * (k + 2 * typical) / (n + 2) / own) if own > 0 else 1.0
        return out

    def note_own(self, useful: bool) -> None:
        """Count an own group: whether it can teach something is what others' groups are measured by."""
        self.own_scored, self.own_useful = _faded(self.own_scored, self.own_useful)
        self.own_scored += 1
        self.own_useful += useful

    def quarantined(self, now: int) -> list[str]:
        return [a for a, r in self.authors.items() if now < r.barred_until]

    def age(self, group: Group) -> int:
        """Versions between a group and the newest known of its author."""
        record = self.authors.get(group.author)
        newest = record.sessions[0].version if record is not None and record.sessions else 0
        return max(0, newest - group.policy_version)

    def trusted(self, now: int) -> dict[str, int]:
        """Newest known policy version of every author that is not in quarantine."""
        return {n: a.sessions[0].version for n, a in self.authors.items() if a.sessions and now >= a.barred_until}

    def table(self, now: int) -> list[dict[str, Any]]:
        """Name, groups accepted and used, faults by kind and quarantine of every author, as plain data."""
        return [
            {
                "node": node,
                "name": short_name(node),
                "accepted": a.accepted,
                "used": a.used,
                "faults": dict(a.faults),
                "named": sorted(a.named),
                "quarantined": now < a.barred_until,
            }
            for node, a in self.authors.items()
        ]

    def state(self) -> dict[str, Any]:
        """Plain JSON data."""
        authors = {name: msgspec.to_builtins(a) for name, a in self.authors.items()}
        return {"authors": authors, "refused": dict(self.refused), "own": [self.own_scored, self.own_useful]}

    def load(self, state: dict[str, Any]) -> None:
        self.authors = OrderedDict((n, msgspec.convert(a, Author)) for n, a in state["authors"].items())
        self.refused = Counter(state["refused"])
        self.own_scored, self.own_useful = state["own"]

    def _record(self, author: str) -> Author:
        record = self.authors.get(author)
        if record is None:
            record = self.authors[author] = Author()
            if len(self.authors) > MAX_AUTHORS:
                self.authors.popitem(last=False)
        self.authors.move_to_end(author)
        return record

    def _session(self, record: Author, number: int, now: int) -> Session:
        for s in record.sessions:
            if s.number == number:
                return s
        newest = record.sessions[0] if record.sessions else None
        if newest is None or number > newest.number:
            fresh = Session(number, now)
            record.sessions = [fresh, *record.sessions[:1]]
            return fresh
        # An older start of this author, never heard while it ran: nothing says which of its numbers were taken.
        raise WireError("stale", f"from start {number} of its author, which is at start {newest.number}", signed=True)


def _faded(scored: int, useful: int) -> tuple[int, int]:
    """Old counts weigh less: both are halved when they reach ``MEMORY``."""
    return (scored // 2, useful // 2) if scored >= MEMORY else (scored, useful)
