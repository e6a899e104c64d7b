"""From a batch to log-probs of its trained tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.batching import Batch
from coterie.lmhead import token_logprobs


@dataclass(frozen=True, slots=True, eq=False)
class TokenStats:
    """Position ``t`` is about token ``t`` given all before it, at the row's temperature; 0 outside ``loss_mask``."""

    logprobs: Tensor  # [B, T] float32, differentiable
    entropy: Tensor  # [B, T] nats, of the distribution over token t
    sum_sq: Tensor  # [B, T] sum over the vocabulary of squared probabilities


def batch_logprobs(model: Any, batch: Batch, checkpoint: bool) -> TokenStats:
    row, t = batch.loss_mask.nonzero(as_tuple=True)  # [N]
    if not len(row):
        zero = torch.zeros(batch.input_ids.shape, device=batch.device)  # [B, T]
        return TokenStats(zero, zero, zero)
    hidden = padded_hidden(model, batch)[row, t - 1]  # [N, D]
    head = model.get_output_embeddings()
    stats = token_logprobs(hidden, head.weight, head.bias, batch.input_ids[row, t], batch.temperature[row])

    def spread(values: Tensor) -> Tensor:
        return values.new_zeros(batch.input_ids.shape).index_put((row, t), values)  # [B, T]

    return TokenStats(*map(spread, stats))


def padded_hidden(model: Any, batch: Batch) -> Tensor:
    """[B, T, D] last hidden states of the plain forward pass over right-padded rows."""
    T = batch.input_ids.shape[1]
    positions = torch.arange(T, device=batch.device).expand_as(batch.input_ids)  # [B, T]
    mask = (positions < batch.lengths[:, None]).long()  # [B, T]
    out = model.base_model(input_ids=batch.input_ids, attention_mask=mask, position_ids=positions, use_cache=False)
    hidden: Tensor = out.last_hidden_state
    return hidden
