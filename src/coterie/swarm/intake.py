"""From bytes off the exchange to groups in the pool: every check, in the order of its cost, every refusal counted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from coterie.swarm.access import Access
from coterie.swarm.exchange import Frame
from coterie.swarm.identity import short_name
from coterie.swarm.pool import Entry, Pool
from coterie.swarm.trust import STRIKES, Ledger
from coterie.swarm.verify import Rebuilder
from coterie.swarm.wire import Header, Message, WireError, open_header, parse
from coterie.types import Group

_HONEST_RATE = 10.0  # messages a second of one author that are not called a flood


@dataclass
class Intake:
    """What stands between the exchange and the pool. ``events`` gets a line when an author goes into quarantine, floods, or
    is refused again and again."""

    swarm: str
    me: str
    access: Access
    rebuild: Rebuilder
    ledger: Ledger
    pool: Pool
    clock: Callable[[], float] = time.time  # seconds; compared with what authors write on their messages, and no more
    events: list[str] = field(default_factory=list)
    loud: list[str] = field(default_factory=list)  # who floods
    _read_at: float = field(default_factory=time.monotonic)
    brought: dict[str, Counter[str]] = field(default_factory=dict)  # who brought what nobody can be blamed for, by kind

    def take(self, frames: Sequence[Frame], now: int, deadline: float, each: int) -> Counter[str]:
        """Check messages until ``deadline``, in the order in which they came, at most ``each`` of an author. Returns how
        many groups of each author went into the pool."""
        opened: list[tuple[str, bytes, Header]] = []
        for sender, data in frames:
            try:
                frame = self.access.open(data, self.rebuild.limits.message_bytes)
                header = parse(frame, self.swarm, self.rebuild.limits)
                if len(sender) == 64 and sender != header.author:
                    raise WireError("carried", f"a message of {short_name(header.author)}, brought by another")
                opened.append((sender, frame, header))
            except WireError as e:
                self._refuse_nobody(sender, e, now)
        self._name_the_loud(Counter(header.author for _, _, header in opened), each)
        self._read_at = time.monotonic()
        worth = self.ledger.worth({e.group.author for e in self.pool.entries.values()})
        accepted: Counter[str] = Counter()
        read: Counter[str] = Counter()
        for sender, frame, header in opened:
            read[header.author] += 1
            if read[header.author] > each or time.monotonic() > deadline:
                self.ledger.blame(None, "rate", now)
            elif self._admit(sender, frame, header, now, worth):
                accepted[header.author] += 1
        return accepted

    def _name_the_loud(self, counts: Counter[str], each: int) -> None:
        paced = _HONEST_RATE * (time.monotonic() - self._read_at)  # a slow step hears more of an honest author
        for author, count in counts.items():
            name = short_name(author)
            if count > max(each, paced) and name not in self.loud and len(self.loud) < 64:
                self.loud.append(name)  # said once, and no fault: anybody can write a name on a frame
                self.events.append(f"peer {name} floods: {count} messages in one step, {each} are read")

    def refuse(self, author: str | None, error: WireError, now: int) -> None:
        """Count a refusal, against ``author`` if it is proven."""
        said = self.ledger.blame(author, error.kind, now)
        if author is not None and said:
            what = "in quarantine" if said == "quarantine" else "is refused again and again"
            self.events.append(f"peer {short_name(author)} {what}: {error}")

    def troubles(self) -> list[str]:
        """Who was named, and for what: one short line a peer."""
        kinds = {n: sorted(a.named) for n, a in self.ledger.authors.items() if a.named}
        out = [f"{short_name(n)}: {', '.join(k)}" for n, k in kinds.items()]
        carried = {n: [k for k, c in kinds.items() if c >= STRIKES] for n, kinds in self.brought.items()}
        out += [f"{short_name(n)} (as the link says): {', '.join(k)}" for n, k in carried.items() if k]
        return out + [f"{n}: flood" for n in self.loud]

    def _refuse_nobody(self, sender: str, error: WireError, now: int) -> None:
        """Count a refusal that no signature proves anybody guilty of; who brought it is named, and not punished."""
        self.ledger.blame(None, error.kind, now)
        if error.kind == "quarantined" or len(sender) != 64 or (sender not in self.brought and len(self.brought) >= 64):
            return
        kinds = self.brought.setdefault(sender, Counter())
        kinds[error.kind] += 1
        if kinds[error.kind] == STRIKES:
            self.events.append(f"peer {short_name(sender)} (as the link says) sends what is refused: {error}")

    def restore(self, frame: bytes) -> Group:
        """A group that was in the pool before a restart. Raises WireError if this node would refuse it today."""
        header = parse(frame, self.swarm, self.rebuild.limits)
        body = open_header(header, self.rebuild.limits)
        return self.rebuild.group(Message(header.id, header.author, body, frame))

    def _admit(self, sender: str, frame: bytes, header: Header, now: int, worth: Mapping[str, float]) -> bool:
        author = header.author
        try:
            if author == self.me:
                raise WireError("own", "own message")
            if not self.access.welcome(author):
                raise WireError("not_allowed", short_name(author))
            self.ledger.check_author(author, now)
            message = Message(header.id, author, open_header(header, self.rebuild.limits), frame)
            self.ledger.note_clock(author, self.clock() * 1000 - message.body.sent_ms)
            self.ledger.check_new(message, now)
            group = self.rebuild.group(message)
            copied = self.pool.remember(group)
            if all(copied):
                raise WireError("copy", "these answers were here before", signed=True)
        except WireError as e:
            if e.signed:
                self.refuse(author, e, now)
            else:
                self._refuse_nobody(sender, e, now)
            return False
        self.pool.add(Entry(group, frame, now, copied), worth)
        return True
