"""From logits to a token and its log-prob, with randomness that is a function of (seed, sample, step) alone."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.types import Sampling

_BLOCK = 128  # vocabularies larger than a few of these are searched in two levels
_BELOW_ONE = 1.0 - 2.0**-52  # a uniform is capped here, so that u * total < total after rounding


def uniforms(seed: int, sample: int, count: int) -> NDArray[np.float64]:
    """The first ``count`` uniforms in [0, 1) of stream ``(seed, sample)``, one per sampled token.

    Philox is counter-based: the stream is a function of its key, and a longer draw starts with the shorter one.
    """
    key = np.array([seed, sample], dtype=np.uint64)
    return np.minimum(np.random.Generator(np.random.Philox(key=key)).random(count), _BELOW_ONE)


class Sampler:
    """Draws from softmax(logits / temperature), cut to top-k and top-p and renormalised, by inverting its CDF.

    The log-probs returned are those of exactly this distribution, in float32. At temperature 0 the most likely token is
    taken (the lowest id on ties) and the log-prob is that of the uncut distribution at temperature 1.

    Inverting the CDF takes one uniform per token whatever the vocabulary, and leaves a tie-free mapping from uniform to
    token: the same logits and uniform give the same token in any batch.
    """

    def __init__(self, sampling: Sampling) -> None:
        self.greedy = sampling.temperature == 0
        self.inverse_temperature = 1.0 if self.greedy else 1.0 / sampling.temperature
        self.top_p = 1.0 if self.greedy else sampling.top_p
        self.top_k = 0 if self.greedy else sampling.top_k

    def draw(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """``logits [R, V]`` (any float), ``uniform [R]`` float64 in [0, 1) -> ids [R] int64, log-probs [R] float32."""
        scores = logits.float()  # [R, V]
        if self.inverse_temperature != 1.0:
            scores = scores * self.inverse_temperature  # [R, V]
        if self.top_k or self.top_p < 1.0:
            scores = cut(scores, self.top_k, self.top_p)  # [R, V]
        probs = scores.softmax(-1)  # [R, V]
        if self.greedy:
            token = scores.argmax(-1, keepdim=True)  # [R, 1]
            total = probs.sum(-1, keepdim=True)  # [R, 1]
        else:
            token, total = invert_cdf(probs, uniform.unsqueeze(-1))  # [R, 1], [R, 1]
            token.clamp_(max=scores.shape[-1] - 1)  # only a NaN is found nowhere, and its log-prob says so
        # A sampled token's probability is far above the smallest float32 (uniforms have 52 bits), so its log is exact.
        logprob = (probs.gather(-1, token) / total).log()  # [R, 1]
        return token.squeeze(-1), logprob.squeeze(-1).float()


def invert_cdf(weight: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest token whose cumulative weight exceeds ``uniform * total``, and the total. Weight 0 is never taken.

    Args:
        weight: [R, V] float32, non-negative, at least one positive per row.
        uniform: [R, 1] float64, at most 1 - 2**-52.

    Returns:
        token [R, 1] int64, total [R, 1] float64.
    """
    rows, vocabulary = weight.shape
    if vocabulary <= 4 * _BLOCK:
        cumulative = weight.cumsum(-1, dtype=torch.float64)  # [R, V]
        total = cumulative[:, -1:].contiguous()  # [R, 1]
        return torch.searchsorted(cumulative, uniform * total, right=True), total
    # Two levels: sums of blocks, then inside the block that holds the target. Same result, a fraction of the cumsum.
    spare = -vocabulary % _BLOCK
    if spare:
        weight = torch.nn.functional.pad(weight, (0, spare))  # [R, K * block]
    blocks = weight.view(rows, -1, _BLOCK)  # [R, K, block]
    cumulative = blocks.sum(-1).cumsum(-1, dtype=torch.float64)  # [R, K]
    total = cumulative[:, -1:].contiguous()  # [R, 1]
    target = uniform * total  # [R, 1]
    block = torch.searchsorted(cumulative, target, right=True)  # [R, 1]
    index = block.unsqueeze(-1).expand(rows, 1, _BLOCK)  # [R, 1, block]
    inside = blocks.gather(1, index).squeeze(1).cumsum(-1, dtype=torch.float64)  # [R, block]
    before = torch.where(block > 0, cumulative.gather(-1, (block - 1).clamp_min(0)), 0.0)  # [R, 1]
    # The block's float32 sum and its float64 cumsum differ by rounding: keep the rest strictly inside the block.
    rest = torch.minimum(target - before, inside[:, -1:] * _BELOW_ONE)  # [R, 1]
    return block * _BLOCK + torch.searchsorted(inside, rest, right=True), total


def cut(scores: Tensor, top_k: int, top_p: float) -> Tensor:
    """``scores [R, V]`` with everything outside the top-k, then outside the nucleus of mass ``top_p``, at -inf.

    The nucleus is the smallest set of most likely tokens whose mass reaches ``top_p`` (Holtzman et al., arXiv
    1904.09751); it always holds the most likely one. Tokens tied with the k-th are kept.
    """
    if 0 < top_k < scores.shape[-1]:
        least = scores.topk(top_k, dim=-1).values[:, -1:]  # [R, 1]
        scores = scores.masked_fill(scores < least, -torch.inf)  # [R, V]
    if top_p < 1.0:
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)  # [R, V]
        probs = ordered.softmax(-1, dtype=torch.float64)  # [R, V]
        outside = probs.cumsum(-1) - probs >= top_p  # [R, V] mass before this token already reaches top_p
        outside[:, 0] = False
        scores = scores.masked_fill(outside.scatter(-1, order, outside), -torch.inf)  # [R, V]
    return scores
