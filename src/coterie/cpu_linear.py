"""Matrix products and linear layers of the update, on a CPU in float32 by oneDNN instead of the default BLAS.

PyTorch sends float32 products on a CPU to MKL, which on AMD processors leaves half of AVX-512 unused: 100 GFLOP/s on one
core where oneDNN reaches 220-250 with the same weights, in any memory order, without packing (docs/results/speed.md).
Everywhere else, products are PyTorch's own. Results of the two differ by rounding only (tested).
"""

from __future__ import annotations

import os
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

# oneDNN keeps a compiled kernel for each shape, 1024 by default. Shapes of packed batches hardly ever repeat, so those
# kernels only fill memory (a run of `tiny` grew by 0.6 GB). Read when oneDNN is first used.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")

_onednn: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def available(x: Tensor) -> bool:
    """Whether products with ``x`` go to oneDNN: float32 on an x86 CPU, and no autocast to a smaller type."""
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and _AVAILABLE
        and not torch.is_autocast_enabled("cpu")
        and x.numel() > 0
    )


def even_rows(x: Tensor) -> int:
    """Rows to compute ``x [N, ..]`` with: N here rounded up to one of sixteen sizes an octave, 3% more on average.

    oneDNN makes kernels for each size and never gives them back: about 4 MB for each with SmolLM2, without end where
    every batch has a size of its own.
    """
    n = len(x)
    step = max(4, 1 << max(0, n.bit_length() - 5))
    return -(-n // step) * step if available(x) else n


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b.T``: [N, K], [M, K] -> [N, M]. Both may be transposed views; no copy is made of them. Not differentiable."""
    if available(a) and b.dtype == torch.float32:
        return _onednn(a, b, None, "none", [], "")  # type: ignore[no-any-return]
    return a @ b.T


def linear(module: nn.Module, x: Tensor) -> Tensor:
    """``module(x)`` for x [N, in], differentiable; ``module`` is a linear layer, with or without LoRA adapters."""
    if available(x):
        if type(module) is nn.Linear and module.weight.dtype == torch.float32:
            return _affine(x, module)
        if isinstance(module, LoraLinear) and _one_plain_adapter(module):
            (name,) = module.active_adapters
            low = _affine(x, module.lora_A[name])  # [N, r]
            return _affine(x, module.base_layer).add_(_affine(low, module.lora_B[name]), alpha=module.scaling[name])
    out: Tensor = module(x)
    return out


def _affine(x: Tensor, layer: Any) -> Tensor:
    out: Tensor = _Linear.apply(x, layer.weight, layer.bias)  # type: ignore[no-untyped-call]
    return out


def _one_plain_adapter(module: LoraLinear) -> bool:
    """One adapter, switched on, without dropout, merging, DoRA or another variant."""
    if module.disable_adapters or module.merged or len(module.active_adapters) != 1 or module.lora_variant:
        return False
    (name,) = module.active_adapters
    return (
        name in module.lora_A
        and type(module.base_layer) is nn.Linear
        and module.base_layer.weight.dtype == torch.float32
        and type(module.lora_A[name]) is nn.Linear
        and type(module.lora_B[name]) is nn.Linear
        and isinstance(module.lora_dropout[name], nn.Identity)
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        out: Tensor = _onednn(x, weight, bias, "none", [], "")
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        return (
            product(grad, weight.T) if need_x else None,  # [N, in]
            product(grad.T, x.T) if need_weight else None,  # [out, in]
            grad.sum(0) if need_bias else None,  # [out]
        )


def _probe() -> bool:
    """Whether this build has the kernel and it multiplies transposed views right."""
    if _onednn is None or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    a, b = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(3, 4)
    forward, back = _onednn(a, b.T, None, "none", [], ""), _onednn(b.T, a, None, "none", [], "")
    return torch.equal(forward, a @ b) and torch.equal(back, b.T @ a.T)


_AVAILABLE = _probe()
