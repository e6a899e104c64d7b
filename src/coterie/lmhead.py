"""Log-probs of given tokens from hidden states, without ever holding ``[tokens, vocabulary]``.

Logits exist for one block at a time (some positions, some of the vocabulary) and are computed again in the backward pass.
A first pass keeps running sums over the vocabulary, rescaled as the maximum grows (the online softmax of Milakov and
Gimelshein, arXiv 1805.02867). With ``p`` the softmax of the temperature-scaled logits,
``d logp(y) / d logits = (onehot(y) - p) / temperature``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.cpu_linear import even_rows, product
from coterie.memory import gradient_there

CHUNK_ELEMENTS = 1 << 21  # logits held at once (8 MiB in float32)
CPU_BLOCK = 2048  # of the vocabulary, so that a block stays in the processor's cache; a GPU takes all of it


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
    N = len(hidden)
    if spare := even_rows(hidden) - N:
        hidden, targets = F.pad(hidden, (0, 0, 0, spare)), F.pad(targets, (0, spare))  # [N + spare, D], [N + spare]
        temperature = F.pad(temperature, (0, spare), value=1.0)  # [N + spare]
    logprobs, entropy, sum_sq = _TokenLogprobs.apply(hidden, weight, bias, targets, temperature)  # type: ignore[no-untyped-call]
    return logprobs[:N], entropy[:N], sum_sq[:N]


def _slices(n: int, size: int) -> Iterator[slice]:
    return (slice(i, min(i + size, n)) for i in range(0, n, size))


def _blocks(n: int, vocabulary: int, device: torch.device) -> Iterator[tuple[slice, Iterator[slice]]]:
    """Chunks of positions, and for each the blocks of the vocabulary."""
    block = min(vocabulary, CPU_BLOCK) if device.type == "cpu" else vocabulary
    return ((c, _slices(vocabulary, block)) for c in _slices(n, max(1, CHUNK_ELEMENTS // block)))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, cold: Tensor | None) -> Tensor:
    """[C, B] float32, of C positions and B entries of the vocabulary, divided by the temperature."""
    logits = product(hidden, weight.to(hidden.dtype)).float()  # [C, B]
    if bias is not None:
        logits += bias
    return logits if cold is None else logits.mul_(cold)


def _colder(temperature: Tensor) -> Tensor | None:
    """[N, 1] what logits are multiplied with; None where nothing changes."""
    return None if bool((temperature == 1).all()) else temperature.reciprocal()[:, None]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        N, V = len(hidden), len(weight)
        logprobs = hidden.new_empty(N, dtype=torch.float32)  # [N]
        entropy, sum_sq, total = (torch.empty_like(logprobs) for _ in range(3))  # [N]
        cold = _colder(temperature)  # [N, 1]
        with torch.autocast(hidden.device.type, enabled=False):
            for c, blocks in _blocks(N, V, hidden.device):
                sums = _Sums(targets[c])
                for b in blocks:
                    part = _logits(hidden[c], weight[b], _of(bias, b), _of(cold, c))
                    sums.add(part, b)
                logprobs[c], entropy[c], sum_sq[c], total[c] = sums.result()
        ctx.save_for_backward(hidden, weight, bias, targets, cold, total)
        ctx.mark_non_differentiable(entropy, sum_sq)
        ctx.set_materialize_grads(False)
        return logprobs, entropy, sum_sq

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None, None
        hidden, weight, bias, targets, cold, total = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        scale = grad[:, None] if cold is None else grad[:, None] * cold  # [N, 1]
        # d = scale (onehot(y) - p): the first part row by row here, the second block by block below.
        d_hidden = torch.zeros(hidden.shape, device=hidden.device) if need_hidden else None  # [N, D]
        there = gradient_there(weight)  # [V, D]
        d_weight = (torch.zeros_like(weight, dtype=torch.float32) if there is None else there) if need_weight else None
        d_bias = torch.zeros_like(bias) if need_bias else None  # [V]
        with torch.autocast(hidden.device.type, enabled=False):
            scaled = (scale * hidden).to(hidden.dtype)  # [N, D]
            for c, blocks in _blocks(len(hidden), len(weight), hidden.device):
                for b in blocks:
                    p = _logits(hidden[c], weight[b], _of(bias, b), _of(cold, c)).sub_(total[c, None]).exp_()  # [C, B]
                    if d_bias is not None:
                        d_bias[b] -= (p * scale[c]).sum(0)
                    p = p.to(hidden.dtype)
                    if d_hidden is not None:
                        d_hidden[c] -= product(p, weight[b].to(hidden.dtype).T)
                    if d_weight is not None:
                        d_weight[b] -= product(p.T, scaled[c].T)
            if d_hidden is not None:
                d_hidden = (d_hidden + weight[targets]).mul_(scale).to(hidden.dtype)
            if d_weight is not None:
                d_weight.index_add_(0, targets, scale * hidden)
            if d_bias is not None:
                d_bias.index_add_(0, targets, scale.squeeze(1))
        return d_hidden, d_weight if there is None else None, d_bias, None, None


def _of(x: Tensor | None, part: slice) -> Tensor | None:
    return None if x is None else x[part]


class _Sums:
    """What a row's log-prob, entropy and sum of squares need, over the blocks of the vocabulary seen so far."""

    def __init__(self, targets: Tensor) -> None:
        self.targets = targets  # [C]
        start = torch.zeros(len(targets), device=targets.device)  # [C]
        self.top = start - 1e30  # largest logit m
        self.z, self.zx, self.zz = start, start, start  # sums of e, of (logit - m) e, of e^2, with e = exp(logit - m)
        self.at_target = start  # logit of the target

    def add(self, logits: Tensor, block: slice) -> None:
        """``logits [C, B]`` of the vocabulary's ``block``; overwritten."""
        inside = self.targets - block.start  # [C]
        mine = (inside >= 0) & (inside < logits.shape[1])  # [C]
        picked = logits.gather(1, inside.clamp(0, logits.shape[1] - 1)[:, None]).squeeze(1)  # [C]
        self.at_target = torch.where(mine, picked, self.at_target)
        top = torch.maximum(self.top, logits.amax(1))  # [C]
        logits -= top[:, None]
        e = logits.exp()  # [C, B]
        fall = self.top - top  # [C]
        shrink = fall.exp()  # [C]
        self.zx = shrink * (self.zx + fall * self.z) + torch.linalg.vecdot(logits, e)
        self.z = shrink * self.z + e.sum(1)
        self.zz = shrink.square() * self.zz + torch.linalg.vecdot(e, e)
        self.top = top

    def result(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Log-prob of the target, entropy, sum of p^2, log of the sum of exponentials; all [C]."""
        log_z = self.z.log()
        total = self.top + log_z
        return self.at_target - total, log_z - self.zx / self.z, self.zz / self.z.square(), total
