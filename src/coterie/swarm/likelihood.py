"""Own log-probs of what peers wrote and this node would learn from, for :mod:`coterie.swarm.yardstick`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from coterie.config import Config
from coterie.swarm.node import LogprobFn
from coterie.swarm.yardstick import better
from coterie.types import Group, Source

if TYPE_CHECKING:
    from coterie.policy import Policy


def own_logprobs(policy: Policy, cfg: Config) -> LogprobFn:
    """A function from scored groups to the policy's log-probs of the peers' policy tokens, [t] per trajectory.

    Only trajectories that the loss would use: under ``peer_loss = "positive"`` those that teach by example, else all that
    did not fail. Groups are looked at together, in parts of ``rollout.token_budget`` tokens.
    """
    import torch

    from coterie.batching import collate, micro_batches

    by_example = cfg.loss.peer_loss == "positive"

    def score(groups: Sequence[Group]) -> list[list[NDArray[np.float32]]]:
        rows: dict[str, list[NDArray[np.float32]]] = {g.id: [] for g in groups}
        used = [replace(g, trajectories=tuple(better(g))) if by_example else g for g in groups]
        for batch in micro_batches(collate(used, None, me=""), cfg.optim.token_budget):
            with torch.no_grad():
                logprobs = policy.logprobs(batch).logprobs.float().cpu()  # [B, T]
            wrote = (batch.source == int(Source.POLICY)) & batch.loss_mask  # [B, T]
            for index, row, mask in zip(batch.group_index.tolist(), logprobs, wrote, strict=True):
                rows[used[index].id].append(row[mask].numpy())
        return list(rows.values())

    return score
