"""Values that are computed again in the backward pass because keeping them costs more than making them.

Activation checkpointing recomputes whole layers, a third of an update. Most of what a layer keeps, though, is a few
elementwise operations away from something it keeps anyway: the input of a projection from the residual stream, the input
of an MLP's last product from its two halves. Computing just those again takes about a hundredth of an update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class _Again:
    """Stands for a tensor until the backward pass; computed at its first use, dropped after its last."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self.make = make
        self.uses = 0
        self.left = 0
        self.value: Tensor | None = None

    def get(self) -> Tensor:
        if self.value is None:
            with torch.no_grad():
                self.value = self.make()
            self.left = self.uses
        value = self.value
        self.left -= 1
        if self.left == 0:
            self.value = None
        return value


@contextmanager
def not_kept(value: Tensor, make: Callable[[], Tensor]) -> Iterator[None]:
    """Operations inside do not keep ``value`` for their backward pass; ``make()`` gives it again, bit for bit.

    ``make`` must hold on only to what is kept anyway, never to ``value``.
    """
    same, again = _place(value), _Again(make)

    def pack(t: Tensor) -> Any:
        if _place(t) != same:
            return t.detach()  # an output kept by its own operation would hold on to itself
        again.uses += 1
        return again

    def unpack(t: Any) -> Tensor:
        return t.get() if isinstance(t, _Again) else t

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _place(t: Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.dtype, t.shape, t.stride()
