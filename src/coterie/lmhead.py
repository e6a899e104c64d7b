"""Log-probs of given tokens from hidden states, without ever holding ``[tokens, vocabulary]``.

Logits exist for one chunk of positions at a time and are computed again in the backward pass. With ``p`` the softmax of
the temperature-scaled logits, ``d logp(y) / d logits = (onehot(y) - p) / temperature``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 23  # logits held at once (32 MiB in float32)


def token_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of each target, entropy and ``sum_v p_v^2`` under ``p = softmax((hidden W^T + b) / temperature)``.

    Args:
        hidden: [N, D], the last hidden states, in the compute type (the matrix product runs in it).
        weight: [V, D]. bias: [V] or None. targets: [N] int64. temperature: [N] float32.

    Returns:
        logprobs [N] float32, differentiable; entropy [N] in nats and sum_sq [N], both constants.
    """
    logprobs, entropy, sum_sq = _TokenLogprobs.apply(hidden, weight, bias, targets, temperature)  # type: ignore[no-untyped-call]
    return logprobs, entropy, sum_sq


def _chunks(n: int, vocabulary: int) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // vocabulary)
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


def _log_softmax(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight.to(hidden.dtype)).float()  # [C, V]
    if bias is not None:
        logits += bias
    logits /= temperature[:, None]
    return torch.log_softmax(logits, dim=-1)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs = hidden.new_empty(len(hidden), dtype=torch.float32)  # [N]
        entropy, sum_sq = torch.empty_like(logprobs), torch.empty_like(logprobs)  # [N]
        with torch.autocast(hidden.device.type, enabled=False):
            for c in _chunks(len(hidden), len(weight)):
                logp = _log_softmax(hidden[c], weight, bias, temperature[c])  # [C, V]
                logprobs[c] = logp.gather(1, targets[c, None]).squeeze(1)
                p = logp.exp()  # [C, V]
                entropy[c] = -torch.linalg.vecdot(p, logp)
                sum_sq[c] = torch.linalg.vecdot(p, p)
        ctx.save_for_backward(hidden, weight, bias, targets, temperature)
        ctx.mark_non_differentiable(entropy, sum_sq)
        ctx.set_materialize_grads(False)
        return logprobs, entropy, sum_sq

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None, None
        hidden, weight, bias, targets, temperature = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if need_hidden else None  # [N, D]
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None  # [V, D]
        d_bias = torch.zeros_like(bias) if need_bias else None  # [V]
        with torch.autocast(hidden.device.type, enabled=False):
            for c in _chunks(len(hidden), len(weight)):
                scale = (grad[c] / temperature[c])[:, None]  # [C, 1]
                d = _log_softmax(hidden[c], weight, bias, temperature[c]).exp_().mul_(-scale)  # [C, V]
                d.scatter_add_(1, targets[c, None], scale)
                if d_bias is not None:
                    d_bias += d.sum(0)
                d = d.to(hidden.dtype)
                if d_hidden is not None:
                    torch.mm(d, weight.to(hidden.dtype), out=d_hidden[c])
                if d_weight is not None:
                    _accumulate(d_weight, d, hidden[c])
        return d_hidden, d_weight, d_bias, None, None


def _accumulate(d_weight: Tensor, d: Tensor, hidden: Tensor) -> None:
    """``d_weight += d^T hidden``, in float32 also when the factors are not."""
    if d.dtype == d_weight.dtype:
        d_weight.addmm_(d.T, hidden)
    else:
        d_weight += d.T @ hidden
