"""From bytes off the exchange to groups in the pool: every check, in the order of its cost, every refusal counted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from coterie.swarm.access import Access
from coterie.swarm.identity import short_name
from coterie.swarm.pool import Entry, Pool
from coterie.swarm.trust import Ledger
from coterie.swarm.verify import Rebuilder
from coterie.swarm.wire import Message, WireError, open_header, parse
from coterie.types import Group


@dataclass
class Intake:
    """What stands between the exchange and the pool. ``events`` gets a line when an author
    goes into quarantine or floods."""

    swarm: str
    me: str
    access: Access
    rebuild: Rebuilder
    ledger: Ledger
    pool: Pool
    events: list[str] = field(default_factory=list)
    loud: list[str] = field(default_factory=list)  # who floods

    def take(self, frames: Sequence[bytes], now: int, deadline: float, each: int) -> int:
        """Check messages until ``deadline``, at most ``each`` of an author, one author after the other so that none
        crowds out the rest. Returns how many groups went into the pool."""
        queues: dict[bytes, list[bytes]] = {}
        for data in frames:
            try:
                frame = self.access.open(data, self.rebuild.limits.message_bytes)
            except WireError as e:
                self.ledger.blame(None, e.kind, now)
                continue
            queues.setdefault(frame[5:37], []).append(frame)
        for author, queue in queues.items():
            name = short_name(author.hex())
            if len(queue) > each and len(author) == 32 and name not in self.loud and len(self.loud) < 64:
                self.loud.append(name)  # said once, and no fault: anybody can write a name on a frame
                self.events.append(f"peer {name} floods: {len(queue)} messages in one step, {each} are read")
        accepted = 0
        for turn in range(max(map(len, queues.values()), default=0)):
            for queue in queues.values():
                if turn >= len(queue):
                    continue
                if turn >= each or time.monotonic() > deadline:
                    self.ledger.blame(None, "rate", now)
                    continue
                accepted += self._admit(queue[turn], now)
        return accepted

    def refuse(self, author: str | None, error: WireError, now: int) -> None:
        """Count a refusal, against ``author`` if it is proven."""
        if self.ledger.blame(author, error.kind, now) and author is not None:
            self.events.append(f"peer {short_name(author)} in quarantine: {error}")

    def restore(self, frame: bytes) -> Group:
        """A group that was in the pool before a restart. Raises WireError if this node would refuse it today."""
        header = parse(frame, self.swarm, self.rebuild.limits)
        body = open_header(header, self.rebuild.limits)
        return self.rebuild.group(Message(header.id, header.author, body, frame))

    def _admit(self, frame: bytes, now: int) -> bool:
        author: str | None = None
        try:
            header = parse(frame, self.swarm, self.rebuild.limits)
            if header.author == self.me:
                raise WireError("own", "own message")
            if not self.access.welcome(header.author):
                raise WireError("not_allowed", short_name(header.author))
            self.ledger.check_author(header.author, now)
            author = header.author
            message = Message(header.id, author, open_header(header, self.rebuild.limits), frame)
            self.ledger.note_clock(author, time.time() * 1000 - message.body.sent_ms)
            self.ledger.check_new(message, now)
            group = self.rebuild.group(message)
            if not self.pool.remember(group):
                raise WireError("copy", "these answers were here before", signed=True)
        except WireError as e:
            self.refuse(author if e.signed else None, e, now)
            return False
        self.pool.add(Entry(group, frame, now))
        return True
