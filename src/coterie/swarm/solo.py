"""What the trainer sees of a swarm, and the node that has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from coterie.types import Group

Mode = Literal["sharing", "degraded", "solo"]


@dataclass(frozen=True)
class State:
    """Whether this node shares, and if not, why."""

    mode: Mode
    cause: str = ""


class Node(Protocol):
    """What the trainer sees. ``events``: lines for the console, emptied by who prints them."""

    author: str
    events: list[str]

    def publish(self, groups: Sequence[Group]) -> None: ...

    def collect(self, step: int) -> list[Group]: ...

    def feedback(self, accuracy: float, kl: float) -> None: ...

    @property
    def state(self) -> State: ...

    def metrics(self) -> dict[str, float]: ...

    def summary(self) -> str: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class SoloNode:
    """No swarm: nothing is sent, nothing arrives."""

    author = "self"
    state = State("solo", "sharing is off (swarm.exchange = none)")

    def __init__(self) -> None:
        self.events: list[str] = []

    def publish(self, groups: Sequence[Group]) -> None:
        """Nothing."""

    def collect(self, step: int) -> list[Group]:
        return []

    def feedback(self, accuracy: float, kl: float) -> None:
        """Nothing."""

    def metrics(self) -> dict[str, float]:
        return {}

    def summary(self) -> str:
        """Nothing to say about a swarm that is not there."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
