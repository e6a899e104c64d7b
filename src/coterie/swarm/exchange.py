"""The thing that carries groups between nodes. It moves bytes; what they are worth is judged by the receiver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Link = Literal["up", "down"]


Frame = tuple[str, bytes]  # (node that brought it, as the carrier says; "": it does not say, message)


@dataclass(frozen=True)
class Request:
    """What a node asks of its exchange for one step."""

    messages: int  # about so many would be welcome: sets how much of the swarm's traffic is listened to
    byte_cap: int  # longer messages are dropped unread
    wait_s: float = 0.0  # at most so long, and only if nothing has arrived
    useful: float | None = None  # how many of the last collect's messages were worth hearing; None: all of them


@dataclass(frozen=True)
class Status:
    """Whether the carrier works, and why not."""

    link: Link
    cause: str
    nodes: int | None  # estimated size of the swarm, this node included; None: unknown


class Exchange(Protocol):
    """``publish`` and ``collect`` never raise on a broken link and never wait for a peer; ``status`` tells."""

    def publish(self, frames: Sequence[bytes]) -> None: ...

    def collect(self, request: Request) -> list[Frame]:
        """Messages of other nodes since the last call (own ones may be among them), in the order of arrival, at most
        ``4 * messages``, no sender's many at the cost of another's few."""
        ...

    def beat(self, info: str) -> None:
        """Say that this node is alive, with a line of JSON about it for ``coterie swarm status``."""
        ...

    def pending(self) -> int:
        """Messages given to ``publish`` that have not left yet."""
        ...

    def status(self) -> Status: ...

    def metrics(self) -> dict[str, float]: ...

    def close(self) -> None: ...
