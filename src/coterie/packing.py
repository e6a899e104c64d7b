"""Packed layout: every distinct prompt once, then every response, and which token sees which.

A response sees its prompt and itself, so tokens form a forest: prompts are roots, responses are branches. Positions
restart at each prompt and go on in each response, so a token has the position it had when it was sampled.

    ids        p p p p | q q | a a a | b b | c c c c       prompts, then responses (a, b answer p; c answers q)
    positions  0 1 2 3 | 0 1 | 4 5 6 | 4 5 | 2 3 4 5

The last token of a row predicts nothing, and neither does anything after the last trained one: they are left out.
Prompts and responses stand in the order in which attention takes them (:mod:`coterie.rectangles`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from coterie.batching import Batch
from coterie.rectangles import Rectangle, rectangles, similar, starts_of


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    ids: Tensor  # [N] prompts, then responses
    positions: Tensor  # [N]
    prompts: Tensor  # [P] length of each prompt ...
    responses: Tensor  # [R] ... and of each response
    prompt_of: Tensor  # [R] which prompt each response follows
    row: Tensor  # [M] trained tokens, as indices into the batch ...
    column: Tensor  # [M]
    predictor: Tensor  # [M] ... and the packed token whose hidden state predicts each
    rectangles: tuple[Rectangle, ...]  # of prompts, then of responses; their tokens, in order, are the packed ones

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def cells(self) -> int:
        """Pairs of query and key that attention computes for each head of each layer."""
        return sum(r.cells for r in self.rectangles)


def pack(batch: Batch) -> Packed:
    """Rows without a trained token take no place."""
    row, column = batch.loss_mask.nonzero(as_tuple=True)  # [M]
    columns = torch.arange(batch.input_ids.shape[1], device=batch.device)  # [T]
    last = (columns * batch.loss_mask).amax(1)  # [B] last trained token; 0: none
    used = (last > 0).nonzero().squeeze(1)  # [R]
    split = torch.minimum(batch.prompt_lengths, last)  # [B] tokens shared with the prompt
    response_sets = similar(split[used].tolist(), (last - split)[used].tolist())
    used = used[list(chain(*response_sets))]  # [R]
    index, first = _distinct_prompts(batch, used.tolist(), split[used].tolist())
    sources = used[first]  # [P] a row of the batch that has each prompt
    prompt_sets = similar([0] * len(first), split[sources].tolist())
    order = torch.tensor(list(chain(*prompt_sets)), dtype=torch.int64, device=batch.device)  # [P]
    sources = sources[order]
    prompt_of = order.argsort()[torch.tensor(index, dtype=torch.int64, device=batch.device)]  # [R]
    prompts, responses = split[sources], (last - split)[used]  # [P], [R]

    starts = starts_of(prompts)  # [P]
    response_starts = prompts.sum() + starts_of(responses)  # [R]
    where = torch.full((len(batch),), -1, dtype=torch.int64, device=batch.device)  # [B] -> R
    where[used] = torch.arange(len(used), device=batch.device)
    r = where[row]  # [M]
    inside = column - 1 - split[row]  # [M] >= 0: predicted from within the response
    predictor = torch.where(inside >= 0, response_starts[r] + inside, starts[prompt_of[r]] + column - 1)

    p, p_col = _places(prompts)  # [Np]
    r, r_col = _places(responses)  # [Nr]
    r_col = r_col + split[used[r]]
    ids = torch.cat([batch.input_ids[sources[p], p_col], batch.input_ids[used[r], r_col]])  # [N]
    cut = rectangles(_by_set(prompts, prompt_sets), _by_set(responses, response_sets), prompt_of)
    return Packed(ids, torch.cat([p_col, r_col]), prompts, responses, prompt_of, row, column, predictor, cut)


def _distinct_prompts(batch: Batch, rows: list[int], split: list[int]) -> tuple[list[int], list[int]]:
    """For each used row its prompt's number, and for each prompt the first used row that has it."""
    numbers: dict[bytes, int] = {}
    first: list[int] = []
    index: list[int] = []
    ids = batch.input_ids.cpu().numpy()
    for i, (b, n) in enumerate(zip(rows, split, strict=True)):
        key = ids[b, :n].tobytes()
        if key not in numbers:
            numbers[key] = len(first)
            first.append(i)
        index.append(numbers[key])
    return index, first


def _by_set(lengths: Tensor, sets: list[list[int]]) -> tuple[Tensor, ...]:
    return torch.split(lengths, [len(s) for s in sets])


def _places(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Segment and place in it of each token [n], segments one after the other."""
    segment = torch.repeat_interleave(lengths)  # [n]
    return segment, torch.arange(len(segment), device=lengths.device) - starts_of(lengths)[segment]


def branches(packed: Packed) -> tuple[Tensor, Tensor]:
    """[N] the prompt that each token belongs to, and [N] its response (-1: the prompt itself)."""
    p, _ = _places(packed.prompts)
    r, _ = _places(packed.responses)
    return torch.cat([p, packed.prompt_of[r]]), torch.cat([torch.full_like(p, -1), r])
