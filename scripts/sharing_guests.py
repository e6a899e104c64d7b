"""Attackers as guests of a simulated swarm (``guests`` of coterie.simulate), for ``experiments/sharing_poisoned.toml``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from hostile_nodes import Hostile, person

from coterie.swarm.memory import MemoryHub
from coterie.trainer import Trainer


def over_long(hub: MemoryHub, trainer: Trainer, number: int) -> Hostile:
    """Right answers whose working is said again and again, up to the token budget."""
    return _hostile("over_long", hub, trainer, trainer.cfg.seed + 100 + number)


def injected(hub: MemoryHub, trainer: Trainer, number: int) -> Hostile:
    """Right answers that begin with a text of the attacker's choice."""
    return _hostile("injected", hub, trainer, trainer.cfg.seed + 200 + number)


def _hostile(attack: str, hub: MemoryHub, trainer: Trainer, seed: int) -> Hostile:
    me, length = person(seed), trainer.cfg.rollout.max_new_tokens
    return Hostile(attack, hub.join(seed), me, trainer.tasks, trainer.policy.encoder, length)
