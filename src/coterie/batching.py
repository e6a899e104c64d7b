"""Groups to tensors. Grouping is by id, masks come from lengths and sources, and never from token values.

A batch carries the normalisers of the *whole* batch with every part cut from it, so the losses of its micro-batches
sum to the loss of the whole, however it is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from coterie.types import Group, Source, Trajectory


@dataclass(frozen=True, slots=True)
class Normalizers:
    """Counts over all trajectories with an advantage, before any row is dropped or the batch is cut."""

    own_policy: int = 0  # trainable tokens that the own policy wrote
    own_helper: int = 0  # ... helpers wrote, in own trajectories
    peer_policy: int = 0  # ... peers' policies wrote
    peer_helper: int = 0  # ... helpers wrote, in peers' trajectories
    own_rows: int = 0  # own trajectories with at least one trainable token
    peer_rows: int = 0
    max_new_tokens: int = 0  # length by which `normalization = "constant"` divides

    @property
    def policy(self) -> int:
        """Tokens written by any policy, own or peer."""
        return self.own_policy + self.peer_policy

    @property
    def helper(self) -> int:
        return self.own_helper + self.peer_helper

    @property
    def rows(self) -> int:
        return self.own_rows + self.peer_rows


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Right-padded trajectories. ``B`` may be 0 (nothing to train on).

    ``loss_mask`` marks every token whose log-prob is wanted: written by a policy or a helper, in a trajectory with an
    advantage, never the first token of a row. Which of them enter the loss, and how, is the loss's business.
    """

    input_ids: Tensor  # [B, T] int64; padding is 0 and never looked at
    source: Tensor  # [B, T] int8, values of types.Source; CONTEXT in the padding
    behavior_logprobs: Tensor  # [B, T] float32; NaN = unknown, and in the padding
    loss_mask: Tensor  # [B, T] bool
    advantages: Tensor | None  # [B, T] float32, 0 outside loss_mask; None for supervised batches
    lengths: Tensor  # [B] int64, tokens of the row
    prompt_lengths: Tensor  # [B] int64
    own: Tensor  # [B] bool: written by this node's policy
    truncated: Tensor  # [B] bool: stopped by the token budget
    helped: Tensor  # [B] bool: sampled in a mode where helpers could be asked
    temperature: Tensor  # [B] float32, at which the row was sampled and is re-scored
    weights: Tensor  # [B] float32, factor on the row's loss
    group_index: Tensor  # [B] int64, position of the row's group in the list given to collate
    normalizers: Normalizers
    returns: Tensor | None = None  # [B, T] float32, what a value head regresses on (GAE), 0 outside the policy's tokens
    role: Tensor | None = None  # [B, T] int8, which of `roles` wrote the token, from 1; 0: no helper. None: no helpers
    roles: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        B, T = self.input_ids.shape
        for f in fields(self):
            value = getattr(self, f.name)
            if not isinstance(value, Tensor):
                continue
            want = (B, T) if f.name in _PER_TOKEN else (B,)
            if tuple(value.shape) != want:
                raise ValueError(f"Batch.{f.name} has shape {tuple(value.shape)}, expected {want}")
            if value.dtype != _DTYPES[f.name]:
                raise ValueError(f"Batch.{f.name} is {value.dtype}, expected {_DTYPES[f.name]}")

    def __len__(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def device(self) -> torch.device:
        return self.input_ids.device

    @property
    def trained(self) -> int:
        """Tokens of this part that need a log-prob."""
        return int(self.loss_mask.sum())

    def to(self, device: torch.device | str) -> Batch:
        return self._map(lambda t: t.to(device))

    def rows(self, index: Sequence[int] | slice) -> Batch:
        """Some rows, trimmed to the longest of them; the normalisers stay those of the whole."""
        pick = index if isinstance(index, slice) else torch.as_tensor(index, dtype=torch.long, device=self.device)
        longest = int(self.lengths[pick].max()) if self.lengths[pick].numel() else 0
        return self._map(lambda t: t[pick] if t.dim() == 1 else t[pick][:, :longest])

    def _map(self, f) -> Batch:  # type: ignore[no-untyped-def]
        changed = {x.name: f(v) for x in fields(self) if isinstance(v := getattr(self, x.name), Tensor)}
        return replace(self, **changed)


_DTYPES = {
    "input_ids": torch.int64,
    "source": torch.int8,
    "behavior_logprobs": torch.float32,
    "loss_mask": torch.bool,
    "advantages": torch.float32,
    "lengths": torch.int64,
    "prompt_lengths": torch.int64,
    "own": torch.bool,
    "truncated": torch.bool,
    "helped": torch.bool,
    "temperature": torch.float32,
    "weights": torch.float32,
    "group_index": torch.int64,
    "returns": torch.float32,
    "role": torch.int8,
}
_PER_TOKEN = {"input_ids", "source", "behavior_logprobs", "loss_mask", "advantages", "returns", "role"}

Advantage = float | Sequence[float] | None  # per trajectory; per token of token_ids (GAE); None = not assigned


def collate(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[Advantage]] | None,
    me: str,
    *,
    max_new_tokens: int = 0,
    weights: Sequence[float] | None = None,
    mask_truncated: bool = False,
    drop_zero_advantages: bool = False,
) -> Batch:
    """Lay out the trajectories of ``groups`` as one batch, rows in the order given.

    Args:
        groups: own and peer groups alike; own means ``group.author == me``.
        advantages: per group, per trajectory: a number, one number per token of ``token_ids``, or None (not assigned:
            the trajectory failed or has no reward; it gets no row). ``None`` for all: supervised, every one gets a row.
        max_new_tokens: response budget, for ``normalization = "constant"``.
        weights: factor on the loss of each group; 1 if not given.
        mask_truncated: leave truncated trajectories out, as if they had no advantage.
        drop_zero_advantages: leave out rows whose advantages are all zero. They still count in the normalisers, so a
            loss in which every term is multiplied by the advantage keeps its value and gradient exactly, and rows
            without signal cost nothing. Wrong with terms that zero advantages do not silence (KL, `ce`).

    Raises:
        ValueError: advantages do not match groups, group ids repeat, or a prompt is empty and so is the response.
    """
    if len({g.id for g in groups}) != len(groups):
        raise ValueError("collate: two groups with the same id; deduplicate before batching")
    if advantages is not None and [len(a) for a in advantages] != [len(g.trajectories) for g in groups]:
        raise ValueError("collate: advantages must hold one entry per trajectory of each group, in the same order")
    rows: list[tuple[int, Trajectory, Advantage]] = []
    counts = dict.fromkeys((f.name for f in fields(Normalizers)), 0) | {"max_new_tokens": max_new_tokens}
    for i, group in enumerate(groups):
        side = "own" if group.author == me else "peer"
        for j, t in enumerate(group.trajectories):
            advantage = advantages[i][j] if advantages is not None else 1.0
            if advantage is None or t.failed is not None or (mask_truncated and t.truncated):
                continue
            by_source = np.bincount(t.source[1:], minlength=len(Source))
            counts[f"{side}_policy"] += int(by_source[Source.POLICY])
            counts[f"{side}_helper"] += int(by_source[Source.HELPER])
            counts[f"{side}_rows"] += bool(by_source[Source.POLICY] + by_source[Source.HELPER])
            if not (drop_zero_advantages and not np.any(np.asarray(advantage, dtype=np.float32))):
                rows.append((i, t, advantage))
    return _fill(rows, groups, me, weights, Normalizers(**counts), supervised=advantages is None)


def _fill(
    rows: Sequence[tuple[int, Trajectory, Advantage]],
    groups: Sequence[Group],
    me: str,
    weights: Sequence[float] | None,
    normalizers: Normalizers,
    supervised: bool,
) -> Batch:
    B = len(rows)
    T = max((len(t.token_ids) for _, t, _ in rows), default=0)
    ids = np.zeros((B, T), np.int64)
    source = np.full((B, T), Source.CONTEXT, np.int8)
    behavior = np.full((B, T), np.nan, np.float32)
    advantages = np.zeros((B, T), np.float32)
    for b, (_, t, advantage) in enumerate(rows):
        n = len(t.token_ids)
        ids[b, :n] = t.token_ids
        source[b, :n] = t.source
        behavior[b, :n] = t.behavior_logprobs
        advantages[b, :n] = np.asarray(advantage, np.float32)
    mask = source != Source.CONTEXT
    mask[:, :1] = False  # nothing precedes the first token
    advantages[~mask] = 0.0
    index = [i for i, _, _ in rows]
    roles = tuple(sorted({c.role for _, t, _ in rows for c in t.consults if c.outcome == "ok"}))

    def per_row(values: Sequence[object], dtype: torch.dtype) -> Tensor:
        return torch.tensor(list(values), dtype=dtype)  # [B]

    return Batch(
        input_ids=torch.from_numpy(ids),
        source=torch.from_numpy(source),
        behavior_logprobs=torch.from_numpy(behavior),
        loss_mask=torch.from_numpy(mask),
        advantages=None if supervised else torch.from_numpy(advantages),
        lengths=per_row([len(t.token_ids) for _, t, _ in rows], torch.int64),
        prompt_lengths=per_row([t.prompt_length for _, t, _ in rows], torch.int64),
        own=per_row([groups[i].author == me for i in index], torch.bool),
        truncated=per_row([t.truncated for _, t, _ in rows], torch.bool),
        helped=per_row([t.mode == "helped" for _, t, _ in rows], torch.bool),
        temperature=per_row([t.temperature for _, t, _ in rows], torch.float32),
        weights=per_row([1.0 if weights is None else weights[i] for i in index], torch.float32),
        group_index=per_row(index, torch.int64),
        normalizers=normalizers,
        role=_roles([t for _, t, _ in rows], roles, T) if roles else None,
        roles=roles,
    )


def _roles(rows: Sequence[Trajectory], roles: Sequence[str], T: int) -> Tensor:
    """Whose reply each token belongs to."""
    out = np.zeros((len(rows), T), np.int8)  # [B, T]
    for b, t in enumerate(rows):
        for c in t.consults:
            if c.outcome == "ok":
                out[b, c.start : c.end] = 1 + roles.index(c.role)
    return torch.from_numpy(out)


def micro_batches(batch: Batch, token_budget: int) -> list[Batch]:
    """Cut a batch into parts of at most ``token_budget`` tokens each, a prompt counted once per part that holds it.

    Groups stay whole where they fit; a larger group is cut between its rows; a row is never cut (one longer than the
    budget is a part of its own). Row order is kept. Losses of the parts sum to the loss of the whole.
    """
    parts: list[list[int]] = []
    room = 0
    for rows in _group_rows(batch):
        cost = _tokens(batch, rows)
        if parts and cost <= room:
            parts[-1].extend(rows)
            room -= cost
        elif cost <= token_budget:
            parts.append(list(rows))
            room = token_budget - cost
        else:
            pieces = _cut(batch, rows, token_budget)
            parts.extend(pieces)
            room = token_budget - _tokens(batch, pieces[-1])
    return [batch.rows(p) for p in parts]


def _group_rows(batch: Batch) -> list[list[int]]:
    runs: list[list[int]] = []
    index = batch.group_index.tolist()
    for b, g in enumerate(index):
        if b and index[b - 1] == g:
            runs[-1].append(b)
        else:
            runs.append([b])
    return runs


def _tokens(batch: Batch, rows: Sequence[int]) -> int:
    """Tokens that ``rows`` of one group hold when equal prompts are computed once."""
    total = 0
    prompts: set[tuple[int, ...]] = set()
    for b in rows:
        n, p = int(batch.lengths[b]), int(batch.prompt_lengths[b])
        prompt = tuple(batch.input_ids[b, :p].tolist())
        total += n - p if prompt in prompts else n
        prompts.add(prompt)
    return total


def _cut(batch: Batch, rows: Sequence[int], token_budget: int) -> list[list[int]]:
    pieces: list[list[int]] = []
    for b in rows:
        if pieces and _tokens(batch, [*pieces[-1], b]) <= token_budget:
            pieces[-1].append(b)
        else:
            pieces.append([b])
    return pieces
