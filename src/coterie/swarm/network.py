"""Exchange over the network: a zenoh client that pushes groups to random leaves and listens to a few subtrees.

No Python callbacks: every subscription ends in a bounded drop-oldest ring, emptied a few times a second into an inbox
that is bounded sender by sender, so a slow node costs nobody anything, a loud one displaces only itself, and a process can
always exit. One thread opens the session, tries again while no relay answers (afterwards zenoh itself reconnects and
restores subscriptions), and then sends at a steady pace: a relay's rate limit drops what comes closer together than its
interval, bursts included.
"""

from __future__ import annotations

import json
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import zenoh

from coterie.swarm.exchange import Frame, Request, Status
from coterie.swarm.identity import Identity, duplicate_error, short_name
from coterie.swarm.sharding import BASE, Inbox, Listener, Prefix, fair_sample, key_of, random_leaf
from coterie.swarm.zenoh_config import Security, node_config

_COUNT_EVERY_S = 30.0
_BEAT_S = 2.0
_SETTLE_S = 3.0
_LOOK_S = 0.25  # how soon a reconnection is noticed
_WAITING = 256  # messages kept between two collects, at least
_ENOUGH = 8  # liveliness tokens from which the size of the swarm is estimated


class NetworkExchange:
    """One node's session.

    Args:
        connect: relays to dial, e.g. ``("tcp/host:7447",)``; several are tried in turn.
        listen: endpoints to open (serverless mesh); empty opens none.
        wait_s: time given to the first connection before work starts without it.
        published: messages this node publishes per step, a first guess of what others do.
        block: wait while the link is full instead of dropping (for measuring).
        pace: messages sent per second at most (half of what the relay allows, or less); 0: as fast as they come.

    Raises:
        UserError: an endpoint is malformed, or this identity is already in use in the swarm.
    """

    def __init__(
        self,
        swarm: str,
        identity: Identity,
        connect: tuple[str, ...],
        *,
        listen: tuple[str, ...] = (),
        security: Security | None = None,
        wait_s: float = 5.0,
        published: float = 4.0,
        pace: float = 50.0,
        block: bool = False,
        seed: int = 0,
    ) -> None:
        self._root, self._identity = f"coterie/{swarm}", identity
        self._config = node_config(connect, listen, security or Security())
        self._where = ", ".join(connect or listen)
        self._mesh = bool(listen)
        self._rng = random.Random(f"network/{identity.node_id}/{seed}")
        self.listener = Listener(self._rng)
        self._published = published
        self._nonce = secrets.token_hex(4)
        self._session: Any = None
        self._token: Any = None
        self._pace = pace
        self._info = ""
        self._congestion = zenoh.CongestionControl.BLOCK if block else zenoh.CongestionControl.DROP
        self._outbox: deque[tuple[str, bytes]] = deque(maxlen=256)
        self._rings: dict[Prefix, Any] = {}
        self._inbox, self._reading = Inbox(_WAITING), threading.Lock()  # the link's thread empties the rings too
        self._cap = 0
        self._nodes: int | None = None
        self._counted_at = float("-inf")
        self._sized = False  # whether the listener knows how large the swarm is
        self._cause = f"no relay answers at {self._where}"
        self._refused = False  # another node has this identity; asked again every _COUNT_EVERY_S
        self._arrived: int | None = None  # at the last collect
        self._bytes = self._messages = self._unsent = 0
        self._closing = threading.Event()
        self._opened = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._link_loop, name="coterie-link", daemon=True)
        self._thread.start()
        self._opened.wait(wait_s)
        if self._refused:
            self.close()
            raise duplicate_error(identity, f"in swarm {swarm!r} (a crashed node is forgotten after 10 s)")

    def publish(self, frames: Sequence[bytes]) -> None:
        """Push each frame to a random leaf. While the link is down nothing is queued: old groups are worth little."""
        if not self._ready() or not self._linked():  # zenoh would take the message and lose it without a word
            self._unsent += len(frames)
            return
        for frame in frames:
            key = f"{self._root}/g/{random_leaf(self._rng)}/{self._identity.node_id}"
            self._send(key, frame)
        self._published = 0.75 * self._published + 0.25 * len(frames)

    def collect(self, request: Request) -> list[Frame]:
        if not self._ready():
            return []
        self._count()
        if self._nodes is not None and not self._sized:
            self._sized = True
            self.listener.start(self._nodes, self._published, request.messages)
        if self._arrived is not None:
            self.listener.update(self._arrived, request.messages, request.useful)
        listening = bool(self._rings)
        with self._reading:
            self._subscribe(request)
        deadline = time.monotonic() + request.wait_s
        out = self._take()
        while not out and time.monotonic() < deadline:
            time.sleep(0.01)
            out = self._take()
        self._arrived = len(out) if listening else None  # nothing can be said of a step without subscriptions
        return fair_sample(out, 4 * request.messages, self._rng)

    def beat(self, info: str) -> None:
        self._info = info
        if self._ready():
            self._count()

    def pending(self) -> int:
        return len(self._outbox)

    def status(self) -> Status:
        if self._refused:
            return Status("down", "another node of this swarm uses the same identity", self._nodes)
        if self._session is None:
            return Status("down", self._cause, None)
        if not self._linked():
            return Status("down", f"connection to {self._where} lost; reconnecting", self._nodes)
        return Status("up", "", self._nodes)

    def metrics(self) -> dict[str, float]:
        return {
            "swarm/bytes_received": float(self._bytes),
            "swarm/messages_received": float(self._messages),
            "swarm/unsent": float(self._unsent),
            "swarm/dropped_oldest": float(self._inbox.lost),
            "swarm/listened_fraction": self.listener.fraction,
        }

    def close(self) -> None:
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout=5.0)
        self._unsent += len(self._outbox)  # what could not leave in that time
        self._outbox.clear()
        self._thread.join(timeout=5.0)
        if self._session is not None:
            self._session.close()
            self._session = None

    def _link_loop(self) -> None:
        """Open the session and enter the swarm; then send what is queued, one message per 1 / pace seconds, empty the rings,
        say every few seconds who is here, and after a reconnection, or now and then, see whether the identity is still
        this node's."""
        self._open()
        linked, ask_at, beat, read_at = False, 0.0, float("-inf"), 0.0
        while not (self._closing.is_set() and not self._outbox):
            now = time.monotonic()
            if now - read_at > _LOOK_S / 2:
                read_at = now
                with self._reading:
                    self._drain()
            was, linked = linked, self._linked()
            if linked and (not was or now > ask_at):
                ask_at = now + (_COUNT_EVERY_S if was else _SETTLE_S)  # relays need a moment to tell each other
                self._keep_place()
            if linked or self._mesh:
                self._opened.set()
            if self._info and self._token is not None and now - beat > _BEAT_S:
                beat = now
                self._put(f"{self._root}/info/{self._identity.node_id}", self._info.encode())
            elif self._outbox:
                self._put(*self._outbox.popleft())
            elif self._wake.wait(_LOOK_S):
                self._wake.clear()
                continue
            if self._pace > 0:
                time.sleep(1.0 / self._pace)

    def _send(self, key: str, payload: bytes) -> None:
        if self._pace > 0:
            self._unsent += len(self._outbox) == self._outbox.maxlen  # the oldest makes room
            self._outbox.append((key, payload))
            self._wake.set()
        else:
            self._put(key, payload)

    def _put(self, key: str, payload: bytes) -> None:
        self._session.put(key, payload, congestion_control=self._congestion)

    def _open(self) -> None:
        delay = 0.25
        while not self._closing.is_set():
            try:
                self._session = zenoh.open(self._config)
                return
            except zenoh.ZError as e:
                self._cause = f"no relay answers at {self._where} ({str(e).split(' at ')[0]}); trying again"
                self._closing.wait(delay)
                delay = min(4.0, 2 * delay)

    def _ready(self) -> bool:
        """Whether the session is open and this node has entered the swarm."""
        return self._token is not None and not self._refused

    def _keep_place(self) -> None:
        """Declare this node alive, or find that the identity is taken and stay out. Of two that are in already (they
        entered while the network was in parts) the one with the larger nonce leaves."""
        alive = f"{self._root}/alive/{self._alive_leaf()}/{self._identity.node_id}"
        for _ in range(4):  # a killed predecessor's token is gone within milliseconds
            others = {k.rsplit("/", 1)[1] for k in self._tokens(f"{alive}/*")} - {self._nonce}
            if not others or self._closing.wait(0.5):
                break
        if self._token is None:
            self._refused = bool(others)
        else:
            self._refused = any(o < self._nonce for o in others)
        if not self._refused and self._token is None:
            self._token = self._session.liveliness().declare_token(f"{alive}/{self._nonce}")
        elif self._refused and self._token is not None:
            self._token.undeclare()
            self._token = None

    def _alive_leaf(self) -> str:
        return "/".join(self._identity.node_id[:2])

    def _tokens(self, key: str) -> set[str]:
        replies = self._session.liveliness().get(key, timeout=0.5)
        return {str(r.ok.key_expr) for r in replies if r.ok is not None}  # a token may be reported twice

    def _count(self) -> None:
        """Estimate the swarm's size from the tokens of one random shard: wide enough for a few tokens, no wider."""
        if time.monotonic() - self._counted_at < _COUNT_EVERY_S or not self._linked():
            return
        self._counted_at = time.monotonic()
        depth = 0 if self._nodes is not None and self._nodes <= 4 * _ENOUGH else 2
        while True:
            prefix = "".join(self._rng.choice("0123456789abcdef") for _ in range(depth))
            found = len(self._tokens(f"{self._root}/alive/{key_of(prefix, 2)}/*/*"))
            if found >= _ENOUGH or depth == 0:
                break
            depth -= 1
        self._nodes = max(1, found * BASE**depth)

    def _subscribe(self, request: Request) -> None:
        """Open and close subscriptions until they match the listener's subtrees."""
        wanted = self.listener.prefixes
        self._cap, self._inbox.capacity = request.byte_cap, max(_WAITING, 4 * request.messages)
        size = 4 + self._inbox.capacity // len(wanted)
        for gone in [p for p in self._rings if p not in wanted]:
            self._read(gone)
            self._rings.pop(gone).undeclare()
        for prefix in wanted - self._rings.keys():
            key = f"{self._root}/g/{key_of(prefix)}/*"
            ring: Any = zenoh.handlers.RingChannel(size)
            self._rings[prefix] = self._session.declare_subscriber(key, ring, allowed_origin=zenoh.Locality.REMOTE)

    def _take(self) -> list[Frame]:
        with self._reading:
            self._drain()
            return self._inbox.take()

    def _drain(self) -> None:
        """Move what has arrived to the inbox, under the name that the key gives its sender."""
        for prefix in self._rings:
            self._read(prefix)

    def _read(self, prefix: Prefix) -> None:
        while (sample := self._rings[prefix].try_recv()) is not None:
            self._messages += 1
            self._bytes += len(sample.payload)
            if len(sample.payload) <= self._cap:
                self._inbox.put(str(sample.key_expr).rsplit("/", 1)[1], sample.payload.to_bytes())

    def _linked(self) -> bool:
        if self._session is None:
            return False
        info = self._session.info
        return bool(info.routers_zid()) or (self._mesh and bool(info.peers_zid()))


def read_swarm(
    swarm: str, connect: tuple[str, ...], security: Security, listen_s: float = 2.5, most: int = 1000
) -> list[tuple[str, str]]:
    """(node id, info) of up to ``most`` nodes of a swarm: their tokens, and what they say within ``listen_s`` seconds (they
    speak every two).

    Raises:
        zenoh.ZError: no relay answers.
    """
    with zenoh.open(node_config(connect, (), security)) as session:
        ring = session.declare_subscriber(f"coterie/{swarm}/info/*", zenoh.handlers.RingChannel(most))
        tokens = session.liveliness().get(f"coterie/{swarm}/alive/*/*/*/*", timeout=2.0)
        found = {str(r.ok.key_expr).split("/")[-2]: "" for r in tokens if r.ok is not None}
        deadline = time.monotonic() + listen_s
        while not all(found.values()) and time.monotonic() < deadline:
            time.sleep(0.05)
            while (sample := ring.try_recv()) is not None:
                node = str(sample.key_expr).split("/")[-1]
                if node in found and len(sample.payload) <= 4096:
                    found[node] = sample.payload.to_bytes().decode(errors="replace")
    return sorted(found.items())[:most]


def describe(info: str, node: str) -> dict[str, Any]:
    """A node's info line as a dict with its name; garbage is shown as unknown, never trusted."""
    try:
        data = json.loads(info) if info else {}
    except ValueError:
        data = {}
    return (data if isinstance(data, dict) else {}) | {"name": short_name(node), "node": node}
