"""Own log-probs of what peers wrote, for the likelihood band of :mod:`coterie.swarm.selection`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from coterie.swarm.node import LogprobFn
from coterie.types import Group, Source

if TYPE_CHECKING:
    from coterie.policy import Policy


def own_logprobs(policy: Policy) -> LogprobFn:
    """A function from groups to the policy's log-probs of the peers' policy tokens, [t] per trajectory, one group at a
    time so that memory does not grow with their number. Trajectories that failed are left out."""
    import torch

    from coterie.batching import collate

    def score(groups: Sequence[Group]) -> list[list[NDArray[np.float32]]]:
        out = []
        for group in groups:
            batch = collate([group], None, me="")
            with torch.no_grad():
                logprobs = policy.logprobs(batch).logprobs.float().cpu()  # [B, T]
            wrote = (batch.source == int(Source.POLICY)) & batch.loss_mask  # [B, T]
            out.append([row[mask].numpy() for row, mask in zip(logprobs, wrote, strict=True)])
        return out

    return score
