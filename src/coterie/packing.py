"""Packed layout: every distinct prompt once, then every response, and which token sees which.

A response sees its prompt and itself, so tokens form a forest: prompts are roots, responses are branches. Positions
restart at each prompt and go on in each response, so a token has the position it had when it was sampled.

    ids        p p p p | q q | a a a | b b | c c c c       prompts, then responses (a, b answer p; c answers q)
    positions  0 1 2 3 | 0 1 | 4 5 6 | 4 5 | 2 3 4 5

The last token of a row predicts nothing, and neither does anything after the last trained one: they are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.batching import Batch


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Segments of a packed stretch as a right-padded rectangle ``[S, L]``, and back."""

    lengths: Tensor  # [S]
    index: Tensor  # [S * L] token of each cell (0 in the padding)
    cells: Tensor  # [n] cell of each token

    @property
    def shape(self) -> tuple[int, int]:
        s = len(self.lengths)
        return s, (len(self.index) // s if s else 0)

    @staticmethod
    def of(lengths: Tensor) -> Grid:
        L = int(lengths.max()) if len(lengths) else 0
        valid = torch.arange(L, device=lengths.device) < lengths[:, None]  # [S, L]
        cells = valid.flatten().nonzero().squeeze(1)  # [n]
        index = torch.zeros(valid.numel(), dtype=torch.int64, device=lengths.device)  # [S * L]
        index[cells] = torch.arange(len(cells), device=lengths.device)
        return Grid(lengths, index, cells)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    ids: Tensor  # [N] prompts, then responses
    positions: Tensor  # [N]
    prompts: Grid  # over the first tokens
    responses: Grid  # over the rest
    prompt_of: Tensor  # [R] which prompt each response follows
    row: Tensor  # [M] trained tokens, as indices into the batch ...
    column: Tensor  # [M]
    predictor: Tensor  # [M] ... and the packed token whose hidden state predicts each

    @property
    def tokens(self) -> int:
        return len(self.ids)


def pack(batch: Batch) -> Packed:
    """Rows without a trained token take no place."""
    row, column = batch.loss_mask.nonzero(as_tuple=True)  # [M]
    columns = torch.arange(batch.input_ids.shape[1], device=batch.device)  # [T]
    last = (columns * batch.loss_mask).amax(1)  # [B] last trained token; 0: none
    used = (last > 0).nonzero().squeeze(1)  # [R]
    split = torch.minimum(batch.prompt_lengths, last)[used]  # [R] tokens shared with the prompt
    prompt_index, prompt_rows = _distinct_prompts(batch, used.tolist(), split.tolist())
    prompt_of = torch.tensor(prompt_index, dtype=torch.int64, device=batch.device)  # [R]
    prompts = Grid.of(split[prompt_rows])
    responses = Grid.of(last[used] - split)
    starts = _starts(prompts.lengths)  # [P]
    response_starts = prompts.lengths.sum() + _starts(responses.lengths)  # [R]

    where = torch.full((len(batch),), -1, dtype=torch.int64, device=batch.device)  # [B] -> R
    where[used] = torch.arange(len(used), device=batch.device)
    r = where[row]  # [M]
    inside = column - 1 - split[r]  # [M] >= 0: predicted from within the response
    predictor = torch.where(inside >= 0, response_starts[r] + inside, starts[prompt_of[r]] + column - 1)

    p_row, p_col = _cells(prompts)  # [Np]
    r_row, r_col = _cells(responses)  # [Nr]
    r_col = r_col + split[r_row]
    ids = torch.cat([batch.input_ids[used[prompt_rows][p_row], p_col], batch.input_ids[used[r_row], r_col]])  # [N]
    return Packed(ids, torch.cat([p_col, r_col]), prompts, responses, prompt_of, row, column, predictor)


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


def _starts(lengths: Tensor) -> Tensor:
    return lengths.cumsum(0) - lengths


def _cells(grid: Grid) -> tuple[Tensor, Tensor]:
    L = max(1, grid.shape[1])
    return grid.cells // L, grid.cells % L


def branches(packed: Packed) -> tuple[Tensor, Tensor]:
    """[N] the prompt that each token belongs to, and [N] its response (-1: the prompt itself)."""
    p_row, _ = _cells(packed.prompts)
    r_row, _ = _cells(packed.responses)
    return torch.cat([p_row, packed.prompt_of[r_row]]), torch.cat([torch.full_like(p_row, -1), r_row])
