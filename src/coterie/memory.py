"""Memory of large models: freed parts handed back to the system, and one tensor fewer for the vocabulary's gradient."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

_LARGE = 50_000_000  # parameters; below, what lies about is small and the calls would be felt


def hand_back(model: Any) -> None:
    """Give memory that was freed on the CPU back, if ``model`` is large and lives there.

    The C library keeps it, in holes that tensors of slightly different sizes do not fit into: 0.4 GB after each
    micro-batch and 0.5 GB after each rollout with 135M parameters. Nothing where the library has no such call.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    parameters = list(model.parameters())
    if trim is not None and parameters[0].device.type == "cpu" and sum(p.numel() for p in parameters) >= _LARGE:
        trim(0)


def gradient_there(weight: Tensor) -> Tensor | None:
    """What earlier micro-batches left in ``weight.grad``, if a backward pass may add to it itself, in float32: then no
    second tensor of the vocabulary's size is made, and autograd gets None. Not where a hook waits for the gradient; and
    ``torch.autograd.grad`` sees it only while ``weight.grad`` is None."""
    plain = weight.is_leaf and weight.dtype == torch.float32 and not weight._backward_hooks
    return weight.grad if plain else None
