"""Which segments of a packed batch attention takes together.

Attention computes rectangles: rows of queries times keys, each row as long as the longest. Segments of similar length
share a rectangle, so that a short response never takes the room of a long one; long segments attend in blocks of queries
that get no key after their last, which halves their work and keeps the mask small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

QUERIES = 256  # of each row in one call of attention
CALL_CELLS = 512  # pairs of query and key that take as long as one more rectangle, on a CPU
MASK_CELLS = 1 << 21  # in a rectangle with prompts of several lengths: its mask differs from row to row


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Segments of a stretch of tokens as a right-padded rectangle ``[S, L]``, and back."""

    lengths: Tensor  # [S]
    index: Tensor  # [S * L] token of each cell (0 in the padding)
    cells: Tensor  # [n] cell of each token

    @property
    def shape(self) -> tuple[int, int]:
        s = len(self.lengths)
        return s, (len(self.index) // s if s else 0)

    @staticmethod
    def of(lengths: Tensor, starts: Tensor | None = None) -> Grid:
        """``starts [S]``: the first token of each segment; without it, they follow each other."""
        L = int(lengths.max()) if len(lengths) else 0
        column = torch.arange(L, device=lengths.device)  # [L]
        valid = column < lengths[:, None]  # [S, L]
        first = starts_of(lengths) if starts is None else starts  # [S]
        index = torch.where(valid, first[:, None] + column, 0).flatten()
        return Grid(lengths, index, valid.flatten().nonzero().squeeze(1))


@dataclass(frozen=True, slots=True, eq=False)
class Rectangle:
    """A query sees its own segment up to itself and, before that, the prompt that its segment follows."""

    queries: Grid  # over this rectangle's tokens, which follow those of the rectangle before it
    prompts: Grid | None  # over the tokens of all prompts, the distinct ones seen from here; None: segments are prompts
    prompt_of: Tensor  # [S] which of ``prompts`` each segment follows

    @property
    def before(self) -> int:
        """Keys before those of the segments themselves."""
        return self.prompts.shape[1] if self.prompts else 0

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """First and last query (exclusive) of each call of attention; its keys end with its last query."""
        return blocks(self.queries.shape[1])

    @property
    def cells(self) -> int:
        """Pairs of query and key computed for each head, padding included."""
        S, L = self.queries.shape
        return S * _pairs(self.before, L)


def similar(before: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Segments by rectangle, given how many keys stand before each and how long it is; those without a token come last.

    From the longest on, each joins the rectangle that grows least by it, or starts one if that is less work.
    """
    sets: list[_Set] = []
    for i in sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i]):
        grown = [(s.grown(before[i]), k) for k, s in enumerate(sets)]
        work, k = min(grown, default=(float("inf"), 0))
        if work <= _pairs(before[i], lengths[i]) + CALL_CELLS:
            sets[k].add(i, before[i])
        else:
            sets.append(_Set([i], before[i], lengths[i]))
    return [*(s.members for s in sets), [i for i, n in enumerate(lengths) if not n]]


@dataclass(slots=True)
class _Set:
    members: list[int]
    before: int  # of the member with most
    length: int  # of the first, longest one
    mixed: bool = False  # whether members have different numbers of keys before them

    def grown(self, before: int) -> float:
        """Cells that a shorter member would add; infinite where the mask would be too large."""
        size, count = _pairs(max(before, self.before), self.length), len(self.members)
        if (self.mixed or before != self.before) and (count + 1) * size > MASK_CELLS:
            return float("inf")
        return (count + 1) * size - count * _pairs(self.before, self.length)

    def add(self, member: int, before: int) -> None:
        self.members.append(member)
        self.mixed |= before != self.before
        self.before = max(before, self.before)


def rectangles(prompts: Sequence[Tensor], responses: Sequence[Tensor], prompt_of: Tensor) -> tuple[Rectangle, ...]:
    """Of the lengths of prompts, set by set, and of responses; ``prompt_of [R]`` numbers prompts in that order."""
    found = [Rectangle(Grid.of(lengths), None, prompt_of[:0]) for lengths in prompts]
    every = torch.cat([*prompts, prompt_of[:0]])  # [P]
    starts = starts_of(every)  # [P]
    for lengths, after in zip(responses, torch.split(prompt_of, [len(x) for x in responses]), strict=True):
        seen, which = torch.unique(after, return_inverse=True)  # [P'], [S]
        found.append(Rectangle(Grid.of(lengths), Grid.of(every[seen], starts[seen]), which))
    return tuple(r for r in found if len(r.queries.cells))


def blocks(length: int) -> list[tuple[int, int]]:
    """Cut the queries of a segment into equal blocks of at most ``QUERIES``; the last may be shorter."""
    step = -(-length // -(-length // QUERIES)) if length else 1
    return [(at, min(at + step, length)) for at in range(0, length, step)]


def _pairs(before: int, length: int) -> int:
    """Cells of one row: those of each block reach to its last query."""
    return sum((end - at) * (before + end) for at, end in blocks(length))


def starts_of(lengths: Tensor) -> Tensor:
    return lengths.cumsum(0) - lengths
