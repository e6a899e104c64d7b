"""The fast decoder for the Llama family on a GPU, or with products in a smaller type: few and fused operations a step.

Float32 on a CPU has a decoder of its own, :mod:`coterie.engines.compiled`. Prompts are computed and stored once. A row attends
to its prompt, stored once for all samples of it, and to its own tokens: two products of queries and keys, one softmax over
both, two products with the values. The rows of a prompt are multiplied with it together, so its keys and values are read once
a step and never copied (the sharing of Hydragen, Juravsky et al., arXiv 2402.05099). What the rows of a batch sum differs from
what they sum alone by rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.engines.weights import Layer, Linear, Weights

_ROWS = 8  # rows are computed in multiples of this: a new row count costs kernel set-up
_PREFILL_TOKENS = 4096  # tokens of prompts computed at once
_LANES = 16  # prompts are stored in multiples of this


class LlamaDecoder:
    """One wave of rows. Own keys and values lie in a buffer of ``max_new_tokens`` per row, allocated once."""

    shares_prompt = True

    def __init__(self, weights: Weights) -> None:
        self.w = weights

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], owner: Sequence[int], max_new_tokens: int) -> Tensor:
        """Run the prompts; row ``r`` continues ``prompts[owner[r]]``. Returns next-token logits [R, V]."""
        w, device = self.w, self.w.device
        longest = max(map(len, prompts))
        self.angles = w.rotary.angles(longest + max_new_tokens)  # [T, D/2]
        shape = (2, len(prompts), w.kv_heads, _ceil(longest, _LANES), w.head_dim)
        # [2, P, Hkv, Tp, D] a layer; zeros, since what is masked is still multiplied (by 0)
        self.prompt_kv = [torch.zeros(shape, dtype=w.dtype, device=device) for _ in w.layers]
        last = torch.empty(len(prompts), w.embedding.shape[1], dtype=w.embedding.dtype, device=device)  # [P, d]
        for at in _chunks([len(p) for p in prompts]):
            last[at] = self._prompt_pass([prompts[i] for i in at], at)
        self.prompt_length = torch.tensor([len(p) for p in prompts], device=device)  # [P]
        self.owner = list(owner)
        self.rows = len(self.owner)
        self.length = 0  # own tokens of each row so far
        size = (2, _ceil(self.rows, _ROWS), w.kv_heads, max_new_tokens, w.head_dim)
        self.own_kv = [torch.empty(size, dtype=w.dtype, device=device) for _ in w.layers]  # [2, R, Hkv, T, D]
        self._assign_slots()
        logits = _linear(w.head, F.rms_norm(last, last.shape[-1:], w.norm, w.eps))  # [P, V]
        return logits[self.prompt_of_row[: self.rows]]  # [R, V]

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Append ``tokens [R]`` to the rows; returns the logits [R, V] of what follows."""
        w = self.w
        self.token[: self.rows] = tokens
        angles = self.angles[self.position].unsqueeze(1)  # [R, 1, D/2]
        x = F.embedding(self.token, w.embedding)  # [R, d]
        for i, layer in enumerate(w.layers):
            x = x + _linear(layer.out, self._attention(i, layer, self._norm(x, layer.attention_norm), angles))  # [R, d]
            x = x + _mlp(layer, self._norm(x, layer.mlp_norm))  # [R, d]
        self.length += 1
        self.position += 1
        logits = _linear(w.head, self._norm(x, w.norm))  # [R, V]
        return logits[: self.rows]

    @torch.inference_mode()
    def keep(self, order: Sequence[int]) -> None:
        """Row ``i`` becomes what row ``order[i]`` was; the others leave. Only rows that change place are copied."""
        to = [i for i, k in enumerate(order) if i != k]
        source = [order[i] for i in to]
        shrink = _ceil(len(order), _ROWS) * 2 <= self.own_kv[0].shape[1]
        for i, kv in enumerate(self.own_kv):
            if to:
                kv[:, to, :, : self.length] = kv[:, source, :, : self.length]
            if shrink:
                self.own_kv[i] = kv[:, : _ceil(len(order), _ROWS)].clone()
        self.owner = [self.owner[k] for k in order]
        self.rows = len(order)
        live = sorted(set(self.owner))
        if len(live) < len(self.prompt_length):
            self.prompt_length = self.prompt_length[live]
            for i, kv in enumerate(self.prompt_kv):
                self.prompt_kv[i] = kv[:, live, :, : _ceil(int(self.prompt_length.max()), _LANES)].contiguous()
            renumber = {p: i for i, p in enumerate(live)}
            self.owner = [renumber[p] for p in self.owner]
        self._assign_slots()

    def _assign_slots(self) -> None:
        """Give each row a place beside the other rows of its prompt, for attention over the prompt.

        Slots are [P, n], n the most rows any prompt has; spare ones hold row 0 and are never read back.
        """
        device, count = self.w.device, len(self.prompt_length)
        held = [0] * count
        place = []
        for p in self.owner:
            place.append(held[p])
            held[p] += 1
        self.slots = max(held)
        slot = [p * self.slots + j for p, j in zip(self.owner, place, strict=True)]
        rows = _ceil(self.rows, _ROWS)
        row_of_slot = [0] * (count * self.slots)
        for r, s in enumerate(slot):
            row_of_slot[s] = r
        spare = [0] * (rows - self.rows)
        self.in_order = slot == list(range(rows)) and count * self.slots == rows
        self.slot_of_row = torch.tensor(slot + spare, device=device)  # [R]
        self.row_of_slot = torch.tensor(row_of_slot, device=device)  # [P * n]
        self.prompt_of_row = torch.tensor(self.owner + spare, device=device)  # [R]
        self.position = self.prompt_length[self.prompt_of_row] + self.length  # [R]
        self.token = torch.zeros(rows, dtype=torch.long, device=device)  # [R]
        longest = self.prompt_kv[0].shape[-2]  # Tp
        beyond = torch.arange(longest, device=device) >= self.prompt_length[:, None]  # [P, Tp]
        masked = torch.zeros(beyond.shape, dtype=self.w.dtype, device=device).masked_fill(beyond, -torch.inf)  # [P, Tp]
        self.mask = masked.repeat_interleave(self.w.kv_heads, 0)[:, None]  # [P Hkv, 1, Tp]
        self.views = [_views(own[:, :rows], prompt) for own, prompt in zip(self.own_kv, self.prompt_kv, strict=True)]

    def _attention(self, i: int, layer: Layer, x: Tensor, angles: Tensor) -> Tensor:
        """``x [R, d]`` -> [R, H D]. Writes the new key and value, then attends over prompt and own tokens."""
        w, t, n, longest = self.w, self.length, self.slots, self.prompt_kv[i].shape[-2]
        rows, group = x.shape[0], w.heads // w.kv_heads
        own, own_keys, own_values, prompt_keys, prompt_values = self.views[i]
        q, k, v = _project(w, layer, x, angles)  # [R, H, D], [R, Hkv, D], [R, Hkv, D]
        own[0, :, :, t] = k
        own[1, :, :, t] = v
        by_prompt = (-1, w.kv_heads, n, group)  # P, Hkv, n, g
        by_row = (-1, w.kv_heads, group)  # R, Hkv, g

        q_slots = self._to_slots(q).view(-1, n, w.kv_heads, group, w.head_dim).transpose(1, 2)  # [P, Hkv, n, g, D]
        prompt_scores = torch.bmm(q_slots.reshape(-1, n * group, w.head_dim), prompt_keys)  # [P Hkv, n g, Tp]
        prompt_scores += self.mask  # [P Hkv, n g, Tp]
        prompt_scores = prompt_scores.view(*by_prompt, longest).transpose(1, 2)  # [P, n, Hkv, g, Tp]
        prompt_scores = self._to_rows(prompt_scores.reshape(*by_row, longest))  # [R, Hkv, g, Tp]
        own_scores = torch.bmm(q.reshape(-1, group, w.head_dim), own_keys[..., : t + 1])  # [R Hkv, g, t+1]
        scores = torch.cat([own_scores.view(*by_row, t + 1), prompt_scores], dim=-1)  # [R, Hkv, g, t+1 + Tp]
        p = scores.softmax(-1, dtype=torch.float32).to(w.dtype)  # [R, Hkv, g, t+1 + Tp]
        out = torch.bmm(p[..., : t + 1].flatten(0, 1), own_values[:, : t + 1])  # [R Hkv, g, D]
        p_slots = self._to_slots(p[..., t + 1 :]).view(-1, n, w.kv_heads, group, longest).transpose(1, 2)
        prompt_out = torch.bmm(p_slots.reshape(-1, n * group, longest), prompt_values)  # [P Hkv, n g, D]
        prompt_out = prompt_out.view(*by_prompt, w.head_dim).transpose(1, 2)  # [P, n, Hkv, g, D]
        prompt_out = self._to_rows(prompt_out.reshape(*by_row, w.head_dim))  # [R, Hkv, g, D]
        return out.view_as(prompt_out).add_(prompt_out).view(rows, -1)  # [R, H D]

    def _to_slots(self, x: Tensor) -> Tensor:
        """[R, ..] -> [P n, ..]: rows beside the other rows of their prompt."""
        return x if self.in_order else x[self.row_of_slot]

    def _to_rows(self, x: Tensor) -> Tensor:
        """[P n, ..] -> [R, ..]: the way back."""
        return x if self.in_order else x[self.slot_of_row]

    def _prompt_pass(self, prompts: Sequence[Sequence[int]], at: Sequence[int]) -> Tensor:
        """Compute prompts, laid end to end without padding; store their keys and values at ``at``.

        Returns the last hidden state of each [P, d]. Products run over all tokens N together, attention prompt by prompt.
        """
        w, device = self.w, self.w.device
        lengths = [len(p) for p in prompts]
        ids = torch.tensor([i for p in prompts for i in p], device=device)  # [N]
        x = F.embedding(ids, w.embedding)  # [N, d]
        angles = torch.cat([self.angles[:t] for t in lengths])[:, None]  # [N, 1, D/2]
        for layer, stored in zip(w.layers, self.prompt_kv, strict=True):
            q, k, v = _project(w, layer, self._norm(x, layer.attention_norm), angles)  # [N, H, D], [N, Hkv, D] twice
            out = torch.empty(q.shape, dtype=q.dtype, device=device)  # [N, H, D]
            ones = zip(at, *(y.transpose(0, 1).split_with_sizes(lengths, 1) for y in (q, k, v, out)), strict=True)
            for i, q1, k1, v1, out1 in ones:  # [H, T, D], [Hkv, T, D] twice, [H, T, D]
                stored[0, i, :, : k1.shape[1]] = k1
                stored[1, i, :, : k1.shape[1]] = v1
                out1[:] = F.scaled_dot_product_attention(
                    q1[None], k1[None], v1[None], is_causal=True, scale=1.0, enable_gqa=True
                )[0]
            x = x + _linear(layer.out, out.flatten(1))  # [N, d]
            x = x + _mlp(layer, self._norm(x, layer.mlp_norm))  # [N, d]
        return x[torch.tensor(lengths, device=device).cumsum(0) - 1]  # [P, d]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, self.w.eps)  # [N, d]


def _linear(layer: Linear, x: Tensor) -> Tensor:
    """[N, in] -> [N, out] in the type of the weight"""
    weight, bias = layer
    return F.linear(x.to(weight.dtype), weight, bias)


def _mlp(layer: Layer, x: Tensor) -> Tensor:
    """down(silu(gate(x)) * up(x)), [N, d]"""
    return _linear(layer.down, F.silu(_linear(layer.gate, x)) * _linear(layer.up, x))


def _views(own: Tensor, prompt: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``own [2, R, Hkv, T, D]`` itself, then both caches as operands of products: keys [.., D, T], values [.., T, D]."""
    own_keys, own_values = own.flatten(1, 2)  # [R Hkv, T, D] twice
    prompt_keys, prompt_values = prompt.flatten(1, 2)  # [P Hkv, Tp, D] twice
    return own, own_keys.transpose(1, 2), own_values, prompt_keys.transpose(1, 2), prompt_values


def _project(w: Weights, layer: Layer, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``x [N, d]`` -> q [N, H, D] and k [N, Hkv, D] with Qwen3's norms and rotary embedding applied, v [N, Hkv, D]."""
    qkv = _linear(layer.qkv, x).view(x.shape[0], -1, w.head_dim)  # [N, H + 2 Hkv, D]
    qk = qkv[:, : w.heads + w.kv_heads]  # [N, H + Hkv, D]
    if layer.query_norm is not None and layer.key_norm is not None:
        q = F.rms_norm(qk[:, : w.heads].float(), (w.head_dim,), layer.query_norm, w.eps)  # [N, H, D]
        k = F.rms_norm(qk[:, w.heads :].float(), (w.head_dim,), layer.key_norm, w.eps)  # [N, Hkv, D]
        qk = torch.cat([q, k], dim=1).to(w.dtype)  # [N, H + Hkv, D]
    qk = _turn(qk, angles)  # [N, H + Hkv, D]
    return qk[:, : w.heads], qk[:, w.heads :], qkv[:, w.heads + w.kv_heads :]


def _turn(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding of ``x [N, heads, D]``, each dimension with the one D/2 on, by ``angles [N, 1, D/2]``."""
    halves = x.float().view(*x.shape[:-1], 2, -1).transpose(-1, -2)  # [N, heads, D/2, 2]
    turned = torch.view_as_complex(halves.contiguous()) * angles  # [N, heads, D/2]
    return torch.view_as_real(turned).transpose(-1, -2).flatten(-2).to(x.dtype)  # [N, heads, D]


def _ceil(count: int, step: int) -> int:
    """The next multiple of ``step``."""
    return -(-count // step) * step


def _chunks(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Prompts to prefill together, bounded in tokens."""
    chunk: list[int] = []
    used = 0
    for i, length in enumerate(lengths):
        if chunk and used + length > _PREFILL_TOKENS:
            yield chunk
            chunk, used = [], 0
        chunk.append(i)
        used += length
    yield chunk
