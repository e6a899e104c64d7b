"""Groups made by hand, and the plainest possible log-probs, for tests of batches and updates."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.batching import Batch
from coterie.types import Group, Problem, Source, StopReason, Trajectory

C, P, H = Source.CONTEXT, Source.POLICY, Source.HELPER


def trajectory(
    prompt: Sequence[int], response: Sequence[int], sources: Sequence[int] | None = None, **kw: Any
) -> Trajectory:
    sources = [P] * len(response) if sources is None else sources
    ids = np.array([*prompt, *response], np.int32)
    defaults = {"segments": (), "stop_reason": StopReason.EOS, "reward": 0.0}
    return Trajectory(
        token_ids=ids,
        source=np.array([C] * len(prompt) + list(sources), np.uint8),
        behavior_logprobs=np.full(len(ids), -1.5, np.float32),
        prompt_length=len(prompt),
        **(defaults | kw),
    )


def group(name: str, *trajectories: Trajectory, author: str = "me") -> Group:
    return Group(name, Problem(name, "t", name), author, 0, "tok", trajectories)


def random_groups(seed: int, groups: int = 3, size: int = 4, vocabulary: int = 61, longest: int = 9) -> list[Group]:
    rng = np.random.default_rng(seed)

    def ids(n: int) -> list[int]:
        return [int(i) for i in rng.integers(0, vocabulary, n)]

    out = []
    for g in range(groups):
        prompt = ids(3 + 2 * g)
        rows = [trajectory(prompt, ids(int(rng.integers(1, longest + 1)))) for _ in range(size)]
        out.append(group(f"g{g}", *rows))
    return out


def advantages_for(groups: Sequence[Group], seed: int = 0) -> list[list[float]]:
    rng = np.random.default_rng(seed)
    return [[float(a) for a in rng.normal(size=len(g.trajectories))] for g in groups]


def naive_stats(model: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Row by row, alone and unpadded, all logits, in the model's own precision: log-probs, entropy, sum of p^2."""
    shape = batch.input_ids.shape
    out = [torch.zeros(shape, dtype=next(model.parameters()).dtype) for _ in range(3)]
    for b in range(shape[0]):
        n = int(batch.lengths[b])
        logits = model(input_ids=batch.input_ids[b : b + 1, :n], use_cache=False).logits[0] / batch.temperature[b]
        logp = torch.log_softmax(logits, -1)
        for t in batch.loss_mask[b].nonzero().flatten().tolist():
            row = logp[t - 1]
            out[0][b, t] = row[batch.input_ids[b, t]]
            out[1][b, t] = -(row.exp() * row).sum().detach()
            out[2][b, t] = (row.exp() ** 2).sum().detach()
    return out[0], out[1], out[2]


def double(model: Any) -> Any:
    return copy.deepcopy(model).double().eval()


def gradients(model: Any) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def relative_error(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    assert got.keys() == want.keys() and got
    num = sum(float((got[n].double() - want[n].double()).square().sum()) for n in want)
    return (num / sum(float(want[n].double().square().sum()) for n in want)) ** 0.5
