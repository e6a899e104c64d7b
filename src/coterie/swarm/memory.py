"""Exchange within one process, for tests and simulation: the same leaves and listeners as the network, without one."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

from coterie.swarm.exchange import Frame, Request, Status
from coterie.swarm.sharding import Inbox, Listener, covers, fair_sample, random_leaf


class MemoryHub:
    """What the nodes of one process share. ``capacity`` bounds each node's inbox."""

    def __init__(self, capacity: int = 256) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()
        self._nodes: dict[int, MemoryExchange] = {}
        self._next = 0

    def join(self, seed: int = 0, node_id: str = "") -> MemoryExchange:
        """``node_id``: what receivers are told about who brings this member's messages."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            node = MemoryExchange(self, number, node_id, f"memory/{seed}/{number}")
            self._nodes[number] = node
            return node

    def send(self, number: int, sender: str, leaf: str, frame: bytes) -> None:
        with self._lock:
            for other, node in self._nodes.items():
                if other != number and covers(node.listener.prefixes, leaf):
                    node.deliver(sender, frame)

    def leave(self, number: int) -> None:
        with self._lock:
            self._nodes.pop(number, None)

    def size(self) -> int:
        return len(self._nodes)


class MemoryExchange:
    """One node's end of a :class:`MemoryHub`."""

    def __init__(self, hub: MemoryHub, number: int, node_id: str, key: str) -> None:
        self._hub, self._number, self._node_id = hub, number, node_id or f"#{number}"
        self._rng, self._sampler = random.Random(key), random.Random(f"{key}/sample")
        self._inbox = Inbox(hub.capacity)
        self.listener = Listener(self._rng)
        self._arrived: int | None = None  # at the last collect
        self._bytes = 0

    def deliver(self, sender: str, frame: bytes) -> None:
        self._inbox.put(sender, frame)
        self._bytes += len(frame)

    def publish(self, frames: Sequence[bytes]) -> None:
        for frame in frames:
            self._hub.send(self._number, self._node_id, random_leaf(self._rng), frame)

    def collect(self, request: Request) -> list[Frame]:
        if self._arrived is not None:
            self.listener.update(self._arrived, request.messages, request.useful)
        out = self._inbox.take()
        self._arrived = len(out)
        return fair_sample(out, 4 * request.messages, self._sampler)

    def beat(self, info: str) -> None:
        """Nobody outside this process asks."""

    def pending(self) -> int:
        return 0

    def status(self) -> Status:
        return Status("up", "", self._hub.size())

    def metrics(self) -> dict[str, float]:
        return {"swarm/bytes_received": float(self._bytes), "swarm/dropped_oldest": float(self._inbox.lost)}

    def close(self) -> None:
        self._hub.leave(self._number)
