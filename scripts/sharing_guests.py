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
    seed = trainer.cfg.seed + 100 + number
    length = trainer.cfg.rollout.max_new_tokens
    return Hostile("over_long", hub.join(seed), person(seed), trainer.tasks, trainer.policy.encoder, length)
