"""Sums over blocks in fp64: exact enough that a model of any size gives the same figures however it is cut."""

from __future__ import annotations

import re

import torch
from torch import Tensor

_PIECE = 4096  # values whose products are summed in fp32 before the sum goes on in fp64


def dot(a: Tensor, b: Tensor) -> float:
    """``sum a b``. fp32 within pieces of 4096 values (vectorised, pairwise), fp64 across them."""
    x, y = a.reshape(-1), b.reshape(-1)  # [n]
    if x.dtype == torch.float64:
        return float(x @ y)
    cut = len(x) // _PIECE * _PIECE
    pieces = torch.linalg.vecdot(x[:cut].view(-1, _PIECE), y[:cut].view(-1, _PIECE))  # [k]
    return float(pieces.double().sum()) + float(x[cut:].double() @ y[cut:].double())


def layer_of(name: str) -> int | None:
    """The first number in a tensor's name: its layer."""
    m = re.search(r"\.(\d+)\.", name)
    return int(m.group(1)) if m else None


def module_type(name: str) -> str:
    """``model.layers.3.self_attn.q_proj.weight`` -> ``self_attn.q_proj``; the same for every layer (and every MoE expert)."""
    bare = name.removesuffix(".weight")
    parts = re.split(r"\.\d+\.", bare, maxsplit=1)
    tail = re.sub(r"\.\d+(?=\.|$)", "", parts[-1])
    return tail.removeprefix("model.").removeprefix("transformer.").removeprefix("gpt_neox.")
