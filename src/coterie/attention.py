"""Attention of the packed layout, where a response sees its prompt and itself. Two ways that give the same numbers:

- :class:`ByRectangles`, on a CPU: a few dense products over similar segments (:mod:`coterie.rectangles`).
- :class:`BlockSparse`, on a GPU: PyTorch's FlexAttention, one call that leaves out blocks of 128 by 128 that nobody sees.

Both return pieces that the backward pass keeps anyway, so that what is made of them need not be kept.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from coterie.cpu_linear import even_rows
from coterie.models_io import head_dim
from coterie.packing import Packed, branches
from coterie.rectangles import Grid, Rectangle

_TILE = 128  # queries and keys that FlexAttention takes or leaves together
_NARROWEST = 16  # values of a head that its kernels can do


class Attention(Protocol):
    """Grouped-query attention over one packed batch, the same for every layer."""

    rows: int  # N: the packed tokens, and rows of zeros after them that nothing else sees

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> list[Tensor]:
        """Pieces of what queries [N, Hq, d] attend to, given keys and values [N, Hk, d]; differentiable."""
        ...

    def gathered(self, pieces: Sequence[Tensor]) -> Tensor:
        """[N, Hq d] made of them."""
        ...


def attention_over(packed: Packed, config: Any, x: Tensor) -> Attention:
    """The kind that suits the model's heads and the device of its first hidden states ``x [n, D]``."""
    if x.device.type == "cuda" and head_dim(config) >= _NARROWEST and flex_runs("cuda"):
        return BlockSparse(packed)
    return ByRectangles(packed, config.num_attention_heads // config.num_key_value_heads, even_rows(x))


class BlockSparse:
    """FlexAttention over all packed tokens. Not run on a GPU yet; the mask and what surrounds the kernel are tested."""

    def __init__(self, packed: Packed) -> None:
        self.rows = -(-packed.tokens // _TILE) * _TILE  # few sizes: each may be compiled once
        tree, branch = (F.pad(t, (0, self.rows - packed.tokens), value=-1) for t in branches(packed))  # [N]

        def seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            mine = (branch[key] == -1) | (branch[key] == branch[query])
            return (query >= key) & (tree[query] == tree[key]) & mine

        self.mask = _tiles(seen, self.rows, tree.device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> list[Tensor]:
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k.to(q.dtype), v.to(q.dtype)))  # [1, H, N, d]
        return [_flex()(q, k, v, block_mask=self.mask, scale=scale, enable_gqa=True)]  # [1, Hq, N, d]

    def gathered(self, pieces: Sequence[Tensor]) -> Tensor:
        return pieces[0][0].transpose(0, 1).flatten(1)


def _tiles(seen: Callable[..., Tensor], n: int, device: torch.device) -> BlockMask:
    """What the library's ``create_block_mask`` gives for ``n`` tokens, without ever holding [n, n]."""
    every = torch.arange(n, device=device)  # [n]
    some, all_of = [], []
    for queries in torch.split(every, _TILE):
        pairs = seen(None, None, queries[:, None], every).view(_TILE, -1, _TILE)  # [tile, n / tile, tile]
        some.append(pairs.any(2).any(0))
        all_of.append(pairs.all(2).all(0))
    whole = torch.stack(all_of)  # [n / tile, n / tile] tiles that need no mask
    partly = torch.stack(some) & ~whole

    def listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
        """How many tiles each row of them has, and which, those first: [1, 1, T] and [1, 1, T, T]"""
        order = tiles.int().argsort(dim=1, descending=True, stable=True)
        return tiles.sum(1, dtype=torch.int32)[None, None], order.int()[None, None]

    return BlockMask.from_kv_blocks(*listed(partly), *listed(whole), BLOCK_SIZE=_TILE, mask_mod=seen)


@functools.cache
def _flex() -> Callable[..., Tensor]:
    # Each kind of heads, with and without autocast or gradients, takes two compilations.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    # With fullgraph, too many sizes are an error; without, they end in the version that holds every score, unasked.
    return torch.compile(flex_attention, fullgraph=True)


@functools.cache
@torch.enable_grad()
def flex_runs(device: str) -> bool:
    """Whether FlexAttention compiles here and has a backward pass; says so, once, if not."""
    q = torch.zeros(1, 1, _TILE, _NARROWEST, device=device, requires_grad=True)
    try:
        torch.autograd.grad(_flex()(q, q, q).sum(), q)
    except Exception as e:  # whatever the compiler, its own compiler, or the driver raises
        cause = e.__context__ or e
        why = (str(cause) or type(cause).__name__).strip().splitlines()[0]
        warnings.warn(f"attention: FlexAttention does not run here ({why}); dense rectangles are used", stacklevel=2)
        return False
    return True


class ByRectangles:
    """Query heads that share a key head are folded into the query axis, so keys are never repeated for them."""

    def __init__(self, packed: Packed, groups: int, rows: int) -> None:
        self.rectangles, self._tokens, self.rows = packed.rectangles, packed.tokens, rows
        self.masks = [_masks(r, groups, packed.ids.device) for r in packed.rectangles]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> list[Tensor]:
        """A piece [S, Hk, g, w, d] for each block of each rectangle."""
        d, N = q.shape[2], len(q)
        heads = [q.shape[1], k.shape[1] + v.shape[1]]
        qkv = torch.cat([q, k.to(q.dtype), v.to(q.dtype)], 1).flatten(1)  # [N, (Hq + 2 Hk) d]
        sizes = [len(r.queries.cells) for r in self.rectangles]
        parts = torch.split(qkv, [*sizes, N - self._tokens])
        cut = zip(self.rectangles, parts, strict=False)
        shared = torch.cat([part[:, heads[0] * d :] for r, part in cut if r.prompts is None] or [qkv[:0]])  # [Np, ..]
        pieces: list[Tensor] = []
        for rectangle, part, masks in zip(self.rectangles, parts, self.masks, strict=False):
            queries, pairs = torch.split(_cells(part, rectangle.queries, d), heads, 2)  # [S, L, Hq, d], [S, L, 2 Hk, d]
            if rectangle.prompts is not None and rectangle.before:
                before = _cells(shared, rectangle.prompts, d).index_select(0, rectangle.prompt_of)  # [S, Lp, 2 Hk, d]
                pairs = torch.cat([before, pairs], 1)  # [S, Lp + L, 2 Hk, d]
            pieces += _blocks(queries, pairs, rectangle, masks, scale)
        return pieces

    def gathered(self, pieces: Sequence[Tensor]) -> Tensor:
        rows, left = [], iter(pieces)
        for rectangle in self.rectangles:
            blocks = [next(left).permute(0, 3, 1, 2, 4) for _ in rectangle.blocks]  # [S, w, Hk, g, d]
            cells = torch.cat(blocks, 1).flatten(0, 1).flatten(1)  # [S L, Hq d]
            rows.append(_Uncells.apply(cells, rectangle.queries))  # type: ignore[no-untyped-call]
        return F.pad(torch.cat(rows), (0, 0, 0, self.rows - self._tokens))


def _blocks(queries: Tensor, pairs: Tensor, rectangle: Rectangle, masks: list[Tensor], scale: float) -> list[Tensor]:
    """One rectangle: queries [S, L, Hq, d], keys and values [S, Lp + L, 2 Hk, d]."""
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


def _masks(rectangle: Rectangle, groups: int, device: torch.device) -> list[Tensor]:
    """Additive, of each block [S or 1, 1, g w, K]: views of one mask, but where prompts of several lengths share the
    rectangle; then rows have their own."""
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
        mask = causal[:, : end - at, last - at : Lp + last - at + end].flatten(0, 1)  # [g w, Lp + end]
        out.append(mask[None, None] if absent is None else mask + absent[..., : Lp + end])
    return out


def _additive(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, float("-inf"))


def _cells(x: Tensor, grid: Grid, d: int) -> Tensor:
    out: Tensor = _Cells.apply(x, grid)  # type: ignore[no-untyped-call]
    return out.view(*grid.shape, x.shape[1] // d, d)


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
