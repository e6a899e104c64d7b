"""Batches for the loss tests, built through the real collate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coterie.batching import Batch, collate
from coterie.types import Group, Problem, Source, StopReason, Trajectory

LETTER = {"c": Source.CONTEXT, "p": Source.POLICY, "h": Source.HELPER}


@dataclass
class Stats:
    """What a policy reports."""

    logprobs: Tensor
    entropy: Tensor | None = None
    sum_sq: Tensor | None = None


@dataclass
class Row:
    """``text``: one letter a token, c(ontext) p(olicy) h(elper); ``mu``: log-probs, one for all or one a token."""

    text: str
    advantage: float = 1.0
    author: str = "me"
    mu: float | Sequence[float] = -1.0
    truncated: bool = False


def build(rows: Sequence[Row], **options: object) -> Batch:
    """One group per row."""
    groups = []
    for i, row in enumerate(rows):
        n = len(row.text)
        trajectory = Trajectory(
            token_ids=np.arange(1, n + 1, dtype=np.int32),
            source=np.array([LETTER[c] for c in row.text], np.uint8),
            behavior_logprobs=np.broadcast_to(np.asarray(row.mu, np.float32), (n,)).copy(),
            prompt_length=1,
            segments=(),
            stop_reason=StopReason.LENGTH if row.truncated else StopReason.EOS,
        )
        groups.append(Group(f"g{i}", Problem("p", "t", "q"), row.author, 0, "tok", (trajectory,)))
    return collate(groups, [[r.advantage] for r in rows], me="me", **options)  # type: ignore[arg-type]


def full(batch: Batch, value: float, grad: bool = False) -> Tensor:
    """A log-prob of ``value`` at every token."""
    return torch.full(batch.input_ids.shape, value, requires_grad=grad)  # [B, T]
