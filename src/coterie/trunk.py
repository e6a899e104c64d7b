"""The layers of Llama-family models over a packed layout: the same parameters as the Hugging Face module, fewer copies.

Linear layers see each token once. Attention is :mod:`coterie.attention`'s. Projections go through
:func:`coterie.cpu_linear.linear`, adapters included. Their inputs are not kept for the backward pass but computed again
from what is (:mod:`coterie.recompute`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpointed

from coterie.attention import Attention, attention_over
from coterie.config import Recompute
from coterie.cpu_linear import linear
from coterie.memory import gradient_there, hand_back
from coterie.packing import Packed
from coterie.recompute import Again, not_kept

_Keeping = Callable[[Tensor, Callable[[], Tensor]], AbstractContextManager[None]]

_TIDY_EVERY = 10  # layers

FAMILY = frozenset({"LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model"})


def packed_hidden(model: Any, packed: Packed, checkpoint: Recompute = "none") -> Tensor:
    """[n, D] last hidden states of ``model`` (the inner model, without output head) for every packed token."""
    x = _embedded(model.embed_tokens, packed.ids)  # [n, D]
    attention = attention_over(packed, model.config, x)
    spare = attention.rows - len(x)
    x = F.pad(x, (0, 0, 0, spare))  # [N, D]
    cos, sin = model.rotary_emb(x, F.pad(packed.positions, (0, spare))[None])  # [1, N, d]
    rope = (cos[0, :, None], sin[0, :, None])  # [N, 1, d]
    for i, layer in enumerate(model.layers, 1):
        run = getattr(layer, "packed", None) or partial(layer_forward, layer)  # sharded layers bring their own
        x = run(x, rope, attention, checkpoint)
        if i % _TIDY_EVERY == 0:
            _tidy(model, x)
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
    attention: Attention,
    checkpoint: Recompute = "none",
) -> Tensor:
    """[N, D] one layer's output for every packed token."""
    if checkpoint == "layer":
        return checkpointed(_layer, layer, x, rope, attention, use_reentrant=False)  # type: ignore[no-any-return]
    pieces = _attend(layer, x, rope, attention, not_kept)
    if checkpoint == "mlp":
        return _rest_of_pieces(layer, x, pieces, attention)
    return _rest(layer, x, pieces, attention, not_kept)


def _layer(layer: Any, x: Tensor, rope: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
    return _rest(layer, x, _attend(layer, x, rope, attention, _kept), attention, _kept)


def _attend(layer: Any, x: Tensor, rope: tuple[Tensor, Tensor], attention: Attention, spare: _Keeping) -> list[Tensor]:
    """The pieces that ``attention.gathered`` makes [N, Hq d] of."""
    attn = layer.self_attn
    h = _norm(layer.input_layernorm, x)  # [N, D]
    with spare(h, partial(_norm, layer.input_layernorm, x.detach())):
        q, k, v = (linear(p, h) for p in (attn.q_proj, attn.k_proj, attn.v_proj))  # [N, Hq d], [N, Hk d], [N, Hk d]
    q, k, v = (t.view(len(x), -1, attn.head_dim) for t in (q, k, v))  # [N, H, d]
    if hasattr(attn, "q_norm"):
        q, k = _norm(attn.q_norm, q), _norm(attn.k_norm, k)
    q, k = _Rope.apply(q, *rope), _Rope.apply(k, *rope)  # type: ignore[no-untyped-call]
    return attention(q, k, v, attn.scaling)


def _rest(layer: Any, x: Tensor, pieces: list[Tensor], attention: Attention, spare: _Keeping) -> Tensor:
    mlp = layer.mlp
    attended = attention.gathered(pieces)  # [N, Hq d]
    with spare(attended, partial(attention.gathered, _detached(pieces))):
        x = x + linear(layer.self_attn.o_proj, attended)  # [N, D]
    h = _norm(layer.post_attention_layernorm, x)  # [N, D]
    with spare(h, partial(_norm, layer.post_attention_layernorm, x.detach())):
        gate, up = linear(mlp.gate_proj, h), linear(mlp.up_proj, h)  # [N, F] twice
    inner = _swiglu(gate, up)  # [N, F]
    with spare(inner, partial(_swiglu, gate.detach(), up.detach())):
        return x + linear(mlp.down_proj, inner)


def _rest_of_pieces(layer: Any, x: Tensor, pieces: list[Tensor], attention: Attention) -> Tensor:
    """The same, keeping only ``x`` and ``pieces``: the backward pass computes all but the last product again."""

    def insides(x: Tensor, pieces: list[Tensor]) -> tuple[Tensor, ...]:
        attended = attention.gathered(pieces)  # [N, Hq d]
        x = x + linear(layer.self_attn.o_proj, attended)  # [N, D]
        h = _norm(layer.post_attention_layernorm, x)  # [N, D]
        gate, up = linear(mlp.gate_proj, h), linear(mlp.up_proj, h)  # [N, F] twice
        return attended, x, h, gate, up, _swiglu(gate, up)

    mlp = layer.mlp
    again = Again(partial(insides, x.detach(), _detached(pieces)), x.device.type)
    attended = attention.gathered(pieces)  # [N, Hq d]
    with again.instead_of(attended):
        x = x + linear(layer.self_attn.o_proj, attended)  # [N, D]
    with again.instead_of(x):
        h = _norm(layer.post_attention_layernorm, x)  # [N, D]
    with again.instead_of(h):
        gate, up = linear(mlp.gate_proj, h), linear(mlp.up_proj, h)  # [N, F] twice
    with again.instead_of(gate, up):
        inner = _swiglu(gate, up)  # [N, F]
    with again.instead_of(inner):
        return x + linear(mlp.down_proj, inner)


def _detached(pieces: list[Tensor]) -> list[Tensor]:
    return [piece.detach() for piece in pieces]


def _kept(value: Tensor, make: Callable[[], Tensor]) -> AbstractContextManager[None]:
    """Instead of ``not_kept`` where all of it is made again anyway."""
    return nullcontext()


def _embedded(module: Any, ids: Tensor) -> Tensor:
    """``module(ids)`` [n, D]; gradients of a plain table go straight to its rows."""
    plain = type(module) is nn.Embedding and module.max_norm is None and not module.scale_grad_by_freq
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    if not plain or module.sparse or any(hooks):
        return module(ids)  # type: ignore[no-any-return]
    out: Tensor = _Embedding.apply(module.weight, ids, module.padding_idx)  # type: ignore[no-untyped-call]
    return out


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    out: Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


def _norm(norm: Any, x: Tensor) -> Tensor:
    out: Tensor = _RMSNorm.apply(x, norm.weight, norm.variance_epsilon)  # type: ignore[no-untyped-call]
    return out


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
