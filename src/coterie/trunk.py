"""The layers of Llama-family models over a packed layout: the same parameters as the Hugging Face module, fewer copies.

Linear layers see each token once. Attention sees rectangles (:mod:`coterie.rectangles`): of prompts, and of responses,
whose keys are their prompt's keys followed by their own. Query heads that share a key head are folded into the query
axis, so keys are never repeated for them. Projections go through :func:`coterie.cpu_linear.linear`, adapters included.
Their inputs are not kept for the backward pass but computed again from what is (:mod:`coterie.recompute`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpointed

from coterie.config import Recompute
from coterie.cpu_linear import even_rows, linear
from coterie.memory import gradient_there, hand_back
from coterie.packing import Packed
from coterie.recompute import Again, not_kept
from coterie.rectangles import Grid, Rectangle

_Keeping = Callable[[Tensor, Callable[[], Tensor]], AbstractContextManager[None]]
Masks = list[list[Tensor]]  # additive, of each block of each rectangle: [S or 1, 1, g w, K]
_Attended = list[Tensor]  # what attention gave for each block of one rectangle: [S, Hk, g, w, d]

_TIDY_EVERY = 10  # layers

FAMILY = frozenset({"LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model"})


def packed_hidden(model: Any, packed: Packed, checkpoint: Recompute = "none") -> Tensor:
    """[n, D] last hidden states of ``model`` (the inner model, without output head) for every packed token."""
    x = _embedded(model.embed_tokens, packed.ids)  # [n, D]
    spare = even_rows(x) - len(x)  # rows of zeros at the end, which nothing attends to
    x = F.pad(x, (0, 0, 0, spare))  # [N, D]
    cos, sin = model.rotary_emb(x, F.pad(packed.positions, (0, spare))[None])  # [1, N, d]
    rope = (cos[0, :, None], sin[0, :, None])  # [N, 1, d]
    masks = _masks(model.config, packed)
    for i, layer in enumerate(model.layers):
        if i % _TIDY_EVERY == 0:
            _tidy(model, x)
        run = getattr(layer, "packed", None) or partial(layer_forward, layer)  # sharded layers bring their own
        x = run(x, rope, packed, masks, checkpoint)
    return _norm(model.norm, x[: packed.tokens])


def _tidy(model: Any, x: Tensor) -> None:
    """Hand freed memory back, now and when the backward pass comes by."""
    hand_back(model)
    if x.requires_grad:
        x.register_hook(lambda _: hand_back(model))  # type: ignore[no-untyped-call]


def layer_forward(
    layer: Any,
    x: Tensor,
    rope: tuple[Tensor, Tensor],
    packed: Packed,
    masks: Masks,
    checkpoint: Recompute = "none",
) -> Tensor:
    """[N, D] one layer's output for every packed token."""
    if checkpoint == "layer":
        return checkpointed(_layer, layer, x, rope, packed, masks, use_reentrant=False)  # type: ignore[no-any-return]
    x = _attend(layer, x, rope, packed, masks, not_kept)
    return _mlp_of_input(layer, x) if checkpoint == "mlp" else _mlp(layer, x, not_kept)


def _layer(layer: Any, x: Tensor, rope: tuple[Tensor, Tensor], packed: Packed, masks: Masks) -> Tensor:
    return _mlp(layer, _attend(layer, x, rope, packed, masks, _kept), _kept)


def _attend(
    layer: Any, x: Tensor, rope: tuple[Tensor, Tensor], packed: Packed, masks: Masks, spare: _Keeping
) -> Tensor:
    attn = layer.self_attn
    h = _norm(layer.input_layernorm, x)  # [N, D]
    with spare(h, partial(_norm, layer.input_layernorm, x.detach())):
        q, k, v = (linear(p, h) for p in (attn.q_proj, attn.k_proj, attn.v_proj))  # [N, Hq d], [N, Hk d], [N, Hk d]
    attended = _attention(attn, q, k, v, rope, packed, masks)
    h = _gathered(attended, packed.rectangles, len(x))  # [N, Hq d]
    kept = [[block.detach() for block in blocks] for blocks in attended]
    with spare(h, partial(_gathered, kept, packed.rectangles, len(x))):
        return x + linear(attn.o_proj, h)


def _mlp(layer: Any, x: Tensor, spare: _Keeping) -> Tensor:
    mlp = layer.mlp
    h = _norm(layer.post_attention_layernorm, x)  # [N, D]
    with spare(h, partial(_norm, layer.post_attention_layernorm, x.detach())):
        gate, up = linear(mlp.gate_proj, h), linear(mlp.up_proj, h)  # [N, F] twice
    inner = _swiglu(gate, up)  # [N, F]
    with spare(inner, partial(_swiglu, gate.detach(), up.detach())):
        return x + linear(mlp.down_proj, inner)


def _mlp_of_input(layer: Any, x: Tensor) -> Tensor:
    """The same, keeping only ``x``; but for the last product, the backward pass computes all of it again."""

    def insides(x: Tensor) -> tuple[Tensor, ...]:
        h = _norm(layer.post_attention_layernorm, x)  # [N, D]
        gate, up = linear(mlp.gate_proj, h), linear(mlp.up_proj, h)  # [N, F] twice
        return h, gate, up, _swiglu(gate, up)

    mlp = layer.mlp
    again = Again(partial(insides, x.detach()), x.device.type)
    h = _norm(layer.post_attention_layernorm, x)  # [N, D]
    with again.instead_of(h):
        gate, up = linear(mlp.gate_proj, h), linear(mlp.up_proj, h)  # [N, F] twice
    with again.instead_of(gate, up):
        inner = _swiglu(gate, up)  # [N, F]
    with again.instead_of(inner):
        return x + linear(mlp.down_proj, inner)


def _kept(value: Tensor, make: Callable[[], Tensor]) -> AbstractContextManager[None]:
    """Instead of ``not_kept`` where all of it is made again anyway."""
    return nullcontext()


def _attention(
    attn: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rope: tuple[Tensor, Tensor],
    packed: Packed,
    masks: Masks,
) -> list[_Attended]:
    d, N = attn.head_dim, len(q)
    q, k, v = q.view(N, -1, d), k.view(N, -1, d), v.view(N, -1, d)  # [N, H, d]
    if hasattr(attn, "q_norm"):
        q, k = _norm(attn.q_norm, q), _norm(attn.k_norm, k)
    q, k = _Rope.apply(q, *rope), _Rope.apply(k, *rope)  # type: ignore[no-untyped-call]
    heads = [q.shape[1], k.shape[1] + v.shape[1]]
    qkv = torch.cat([q, k.to(q.dtype), v.to(q.dtype)], 1).flatten(1)  # [N, (Hq + 2 Hk) d]
    sizes = [len(r.queries.cells) for r in packed.rectangles]
    parts = torch.split(qkv, [*sizes, N - packed.tokens])
    cut = zip(packed.rectangles, parts, strict=False)
    shared = torch.cat([part[:, heads[0] * d :] for r, part in cut if r.prompts is None] or [qkv[:0]])  # [Np, 2 Hk d]
    attended = []
    for rectangle, part, mask in zip(packed.rectangles, parts, masks, strict=False):
        queries, pairs = torch.split(_cells(part, rectangle.queries, d), heads, 2)  # [S, L, Hq, d], [S, L, 2 Hk, d]
        if rectangle.prompts is not None and rectangle.before:
            before = _cells(shared, rectangle.prompts, d).index_select(0, rectangle.prompt_of)  # [S, Lp, 2 Hk, d]
            pairs = torch.cat([before, pairs], 1)  # [S, Lp + L, 2 Hk, d]
        attended.append(_blocks(queries, pairs, rectangle, mask, attn.scaling))
    return attended


def _blocks(queries: Tensor, pairs: Tensor, rectangle: Rectangle, masks: list[Tensor], scale: float) -> _Attended:
    """Grouped-query attention of one rectangle: queries [S, L, Hq, d], keys and values [S, Lp + L, 2 Hk, d]."""
    S, L, _, d = queries.shape
    Hk = pairs.shape[2] // 2
    folded = queries.view(S, L, Hk, -1, d).permute(0, 2, 3, 1, 4)  # [S, Hk, g, L, d]
    keys, values = torch.split(pairs.transpose(1, 2), Hk, 1)  # [S, Hk, Lp + L, d]
    out = []
    for (at, end), mask in zip(rectangle.blocks, masks, strict=True):
        q = folded[:, :, :, at:end].flatten(2, 3)  # [S, Hk, g w, d]
        seen = slice(0, rectangle.before + end)
        got = F.scaled_dot_product_attention(q, keys[:, :, seen], values[:, :, seen], attn_mask=mask, scale=scale)
        out.append(got.view(S, Hk, -1, end - at, d))
    return out


def _gathered(attended: Sequence[_Attended], rectangles: Sequence[Rectangle], N: int) -> Tensor:
    """[N, Hq d] what every packed token attended to; 0 in spare rows."""
    rows = []
    for blocks, rectangle in zip(attended, rectangles, strict=True):
        cells = torch.cat([b.permute(0, 3, 1, 2, 4) for b in blocks], 1).flatten(0, 1).flatten(1)  # [S L, Hq d]
        rows.append(_Uncells.apply(cells, rectangle.queries))  # type: ignore[no-untyped-call]
    return F.pad(torch.cat(rows), (0, 0, 0, N - sum(map(len, rows))))


def _masks(config: Any, packed: Packed) -> Masks:
    """Views of one mask a rectangle, but where prompts of several lengths share one: then rows have their own."""
    groups = config.num_attention_heads // config.num_key_value_heads
    return [_rectangle_masks(rectangle, groups, packed.ids.device) for rectangle in packed.rectangles]


def _rectangle_masks(rectangle: Rectangle, groups: int, device: torch.device) -> list[Tensor]:
    Lp, W, last = rectangle.before, rectangle.blocks[0][1], rectangle.blocks[-1][0]
    reach = torch.arange(-Lp - last, W, device=device)  # [Lp + last + W] place of a key after a block's first query
    causal = _additive(reach <= torch.arange(W, device=device)[:, None]).repeat(groups, 1, 1)  # [g, W, ..]
    absent = None
    if rectangle.prompts is not None and bool((rectangle.prompts.lengths < Lp).any()):
        keys = torch.arange(Lp + rectangle.queries.shape[1], device=device)  # [Lp + L]
        lengths = rectangle.prompts.lengths[rectangle.prompt_of]  # [S]
        absent = _additive((keys < lengths[:, None]) | (keys >= Lp))[:, None, None]  # [S, 1, 1, Lp + L]
    out = []
    for at, end in rectangle.blocks:
        mask = causal[:, : end - at, last - at : Lp + last - at + end].flatten(0, 1)[
            None, None
        ]  # [1, 1, g w, Lp + end]
        out.append(mask if absent is None else mask + absent[..., : Lp + end])
    return out


def _additive(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, float("-inf"))


def _embedded(module: Any, ids: Tensor) -> Tensor:
    """``module(ids)`` [n, D]; gradients of a plain table go straight to its rows."""
    plain = type(module) is nn.Embedding and module.max_norm is None and not module.scale_grad_by_freq
    if not plain or module.sparse or module._forward_hooks:
        return module(ids)  # type: ignore[no-any-return]
    out: Tensor = _Embedding.apply(module.weight, ids, module.padding_idx)  # type: ignore[no-untyped-call]
    return out


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    out: Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


def _norm(norm: Any, x: Tensor) -> Tensor:
    out: Tensor = _RMSNorm.apply(x, norm.weight, norm.variance_epsilon)  # type: ignore[no-untyped-call]
    return out


def _cells(x: Tensor, grid: Grid, d: int) -> Tensor:
    out: Tensor = _Cells.apply(x, grid)  # type: ignore[no-untyped-call]
    return out.view(*grid.shape, x.shape[1] // d, d)


class _Embedding(torch.autograd.Function):
    """Rows ``ids [n]`` of a table; no gradient for ``padding``, as in the library's."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(table, ids)
        ctx.padding = padding
        return table.index_select(0, ids)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        table, ids = ctx.saved_tensors
        if ctx.padding is not None:
            grad = grad.masked_fill((ids == ctx.padding)[:, None], 0.0)  # [n, D]
        if (there := gradient_there(table)) is not None:
            there.index_add_(0, ids, grad)
            return None, None, None
        return torch.zeros_like(table).index_add_(0, ids, grad), None, None


class _Cells(torch.autograd.Function):
    """Tokens [n, C] to cells [S * L, C]. Padding cells copy token 0 and send nothing back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Grid) -> Tensor:
        ctx.grid, ctx.tokens = grid, len(x)
        return x.index_select(0, grid.index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        cells = ctx.grid.cells
        there = grad.index_select(0, cells)  # [n', C]
        if len(there) == ctx.tokens:  # all of them, in order
            return there, None
        out = grad.new_zeros(ctx.tokens, grad.shape[1])
        return out.index_copy_(0, ctx.grid.index[cells], there), None


class _Uncells(torch.autograd.Function):
    """Cells [S * L, C] to packed tokens [n, C]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Grid) -> Tensor:
        ctx.grid = grid
        return x.index_select(0, grid.cells)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = grad.new_zeros(len(ctx.grid.index), grad.shape[1])
        return out.index_copy_(0, ctx.grid.cells, grad), None


class _Rope(torch.autograd.Function):
    """Rotary embedding ``x cos + rotate_half(x) sin``; x [N, H, d], cos and sin [N, 1, d]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        h = x.shape[-1] // 2
        out = x * cos
        out[..., :h].addcmul_(x[..., h:], sin[..., :h], value=-1)
        out[..., h:].addcmul_(x[..., :h], sin[..., h:])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        h = grad.shape[-1] // 2
        out = grad * cos
        out[..., :h].addcmul_(grad[..., h:], sin[..., h:])
        out[..., h:].addcmul_(grad[..., :h], sin[..., :h], value=-1)
        return out, None, None


class _SwiGLU(torch.autograd.Function):
    """``silu(gate) * up``, keeping only its inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        d_up = F.silu(gate).mul_(grad)
        d_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return d_gate, d_up


class _RMSNorm(torch.autograd.Function):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, in float32, keeping only ``x`` and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        full = x.float()  # [..., D]
        scale = torch.linalg.vecdot(full, full).div_(x.shape[-1]).add_(eps).rsqrt_()[..., None]  # [..., 1]
        ctx.save_for_backward(x, weight, scale)
        out: Tensor = (full * scale).mul_(weight).to(x.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        unit, grad = x.float() * scale, grad.float()  # [..., D]
        d_weight = (grad * unit).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, d_weight, None
        d = grad * weight
        along = torch.linalg.vecdot(d, unit).div_(x.shape[-1])[..., None]
        return d.addcmul_(unit, along, value=-1).mul_(scale).to(x.dtype), d_weight, None
