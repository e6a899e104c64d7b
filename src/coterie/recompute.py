"""Values that are computed again in the backward pass because keeping them costs more than making them.

Activation checkpointing recomputes whole layers, a third of an update. Most of what a layer keeps, though, is a few
elementwise operations away from something it keeps anyway: the input of a projection from the residual stream, the input
of an MLP's last product from its two halves. Computing just those again takes about a hundredth of an update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor


class Again:
    """Values that one function makes again, all at once: at the first use of any of them in the backward pass, under the
    autocast of the forward pass. Each is dropped after its last use.

    ``make`` must hold on only to what is kept anyway, never to one of the values.
    """

    def __init__(self, make: Callable[[], Sequence[Tensor]], device: str) -> None:
        self._make = make
        self._autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        self._uses: list[int] = []  # of each value, by operations of the forward pass
        self._left: list[int] = []  # of them in this backward pass
        self._made: dict[int, Tensor] = {}

    @contextmanager
    def instead_of(self, *values: Tensor) -> Iterator[None]:
        """Operations inside do not keep ``values``, the next ones of those that ``make`` gives, for their backward pass."""
        places = {_place(v): i for i, v in enumerate(values, len(self._uses))}
        self._uses += [0] * len(values)

        def pack(t: Tensor) -> Any:
            at = places.get(_place(t))
            if at is None:
                return t.detach()  # an output kept by its own operation would hold on to itself
            self._uses[at] += 1
            return at

        def unpack(kept: Any) -> Tensor:
            return kept if isinstance(kept, Tensor) else self._get(kept)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _get(self, at: int) -> Tensor:
        if at not in self._made:
            device, dtype, on = self._autocast
            with torch.no_grad(), torch.autocast(device, dtype, enabled=on):
                made = self._make()
            self._left = list(self._uses)
            self._made = {i: v for i, v in enumerate(made) if self._left[i]}
        self._left[at] -= 1
        return self._made[at] if self._left[at] else self._made.pop(at)


def not_kept(value: Tensor, make: Callable[[], Tensor]) -> AbstractContextManager[None]:
    """Operations inside do not keep ``value`` for their backward pass; ``make()`` gives it again, bit for bit."""
    return Again(lambda: [make()], value.device.type).instead_of(value)


def _place(t: Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.dtype, t.shape, t.stride()
