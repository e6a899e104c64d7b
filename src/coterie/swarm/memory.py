"""Exchange within one process, for tests and simulation: the same leaves and listeners as the network, without one."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Sequence

from coterie.swarm.exchange import Request, Status
from coterie.swarm.sharding import Listener, covers, fair_sample, random_leaf


class MemoryHub:
    """What the nodes of one process share. ``capacity`` bounds each node's inbox (oldest dropped)."""

    def __init__(self, capacity: int = 256) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()
        self._nodes: dict[int, MemoryExchange] = {}
        self._next = 0

    def join(self, seed: int = 0) -> MemoryExchange:
        with self._lock:
            number, self._next = self._next, self._next + 1
            node = MemoryExchange(self, number, random.Random(f"memory/{seed}/{number}"))
            self._nodes[number] = node
            return node

    def send(self, sender: int, leaf: str, frame: bytes) -> None:
        with self._lock:
            for number, node in self._nodes.items():
                if number != sender and covers(node.listener.prefixes, leaf):
                    node.deliver(str(sender), frame)

    def leave(self, number: int) -> None:
        with self._lock:
            self._nodes.pop(number, None)

    def size(self) -> int:
        return len(self._nodes)


class MemoryExchange:
    """One node's end of a :class:`MemoryHub`."""

    def __init__(self, hub: MemoryHub, number: int, rng: random.Random) -> None:
        self._hub, self._number, self._rng = hub, number, rng
        self._inbox: deque[tuple[str, bytes]] = deque(maxlen=hub.capacity)
        self.listener = Listener(rng)
        self._arrived: int | None = None  # at the last collect
        self._bytes = 0
        self._lost = 0

    def deliver(self, sender: str, frame: bytes) -> None:
        if len(self._inbox) == self._inbox.maxlen:
            self._lost += 1
        self._inbox.append((sender, frame))
        self._bytes += len(frame)

    def publish(self, frames: Sequence[bytes]) -> None:
        for frame in frames:
            self._hub.send(self._number, random_leaf(self._rng), frame)

    def collect(self, request: Request) -> list[bytes]:
        if self._arrived is not None:
            self.listener.update(self._arrived, request.messages, request.wasted)
        out: list[tuple[str, bytes]] = []
        while self._inbox:
            out.append(self._inbox.popleft())
        self._arrived = len(out)
        return fair_sample(out, 4 * request.messages, self._rng)

    def beat(self, info: str) -> None:
        """Nobody outside this process asks."""

    def status(self) -> Status:
        return Status("up", "", self._hub.size())

    def metrics(self) -> dict[str, float]:
        return {"swarm/bytes_received": float(self._bytes), "swarm/dropped_oldest": float(self._lost)}

    def close(self) -> None:
        self._hub.leave(self._number)
