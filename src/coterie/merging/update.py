"""A recipe's formula applied block by block, with what it must know before it sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from coterie.merging import methods
from coterie.merging.deltas import Block, stream
from coterie.merging.inputs import Entry, Inputs
from coterie.merging.lowrank import PASS_MIB, LowRank, truncate
from coterie.merging.recipe import Recipe
from coterie.merging.threshold import KthLargest


class Update:
    """The recipe's formula, with what it must know before the first block (thresholds, low-rank factors of the tensor)."""

    def __init__(self, recipe: Recipe, inputs: Inputs, chunk_mib: int) -> None:
        self.recipe, self.inputs, self.chunk_mib = recipe, inputs, chunk_mib
        weights = [e.weight for e in self.recipe.experts]
        total = sum(weights) if self.recipe.method == "mean" else 1.0
        self.weights = weights
        self.coefficients = [self.recipe.lam * w / total for w in weights]
        self.thresholds: list[float] = []
        self.kept = [0] * len(weights)
        self.seen = [0] * len(weights)
        self.factors: list[LowRank | None] = []
        self.energy = [[0.0, 0.0] for _ in weights]
        self.exact = [0, 0]
        self._entry: Entry | None = None
        if self.recipe.trim == "global":
            self.thresholds = self._cut([e for e in self.inputs.entries if e.merged])

    def __call__(self, block: Block) -> Tensor:
        if block.entry is not self._entry:
            self._entry = block.entry
            self._prepare(block)
        method = self.recipe.method
        deltas = list(block.deltas)  # N times [r, c]
        if method == "ties":
            deltas = [methods.trim(d, t) for d, t in zip(deltas, self.thresholds, strict=True)]
        elif method in ("dare", "dare_ties"):
            deltas = [self._dare(d, e.label, block) for d, e in zip(deltas, self.recipe.experts, strict=True)]
        elif method == "svd":
            deltas = [
                d if f is None else (f.left[block.first : block.last] @ f.right).to(d.dtype)
                for d, f in zip(deltas, self.factors, strict=True)
            ]
        if method in ("ties", "dare", "dare_ties"):
            for i, d in enumerate(deltas):
                self.kept[i] += int(torch.count_nonzero(d))
                self.seen[i] += d.numel() if block.entry.sources[i] is not None else 0
        if method in ("ties", "dare_ties"):
            return methods.elect_and_average(deltas, self.weights, self.recipe.lam)
        return methods.weighted_sum(deltas, self.coefficients)

    def _dare(self, delta: Tensor, label: str, block: Block) -> Tensor:
        assert self.recipe.density is not None and self.recipe.seed is not None
        key = methods.dare_key(self.recipe.seed, label, block.entry.name)
        return methods.dare(delta, key, block.first * block.entry.base.cols, self.recipe.density)

    def _prepare(self, block: Block) -> None:
        entry = block.entry
        if self.recipe.trim == "tensor":
            whole = block.first == 0 and block.last == entry.base.rows
            self.thresholds = self._kth(lambda: [block]) if whole else self._cut([entry])
        if self.recipe.method == "svd":
            self.factors = [self._truncate(entry, i) for i in range(len(self.recipe.experts))]

    def _cut(self, entries: list[Entry]) -> list[float]:
        """Per expert the magnitude at the density, over all values of ``entries`` it can change. Reads them twice."""
        return self._kth(lambda: stream(self.inputs, entries, self.chunk_mib, self.recipe.compute_dtype))

    def _kth(self, blocks: Callable[[], Iterable[Block]]) -> list[float]:
        assert self.recipe.density is not None
        counters = [KthLargest(self.recipe.density) for _ in self.recipe.experts]
        for block in blocks():
            self._count(counters, block)
        for c in counters:
            c.next_pass()
        for block in blocks():
            self._count(counters, block)
        return [c.value for c in counters]

    def _count(self, counters: list[KthLargest], block: Block) -> None:
        for c, d, s in zip(counters, block.deltas, block.entry.sources, strict=True):
            if s is not None:
                c.count(d)

    def _truncate(self, entry: Entry, index: int) -> LowRank | None:
        """Low-rank factors of one expert's delta of a matrix; None: not a matrix, the delta stays whole."""
        source = entry.sources[index]
        if len(entry.base.shape) != 2 or source is None:
            return None
        assert self.recipe.rank is not None

        def blocks() -> Iterator[tuple[int, int, Tensor]]:
            for b in stream(self.inputs, [entry], PASS_MIB, self.recipe.compute_dtype, only=[index]):
                yield b.first, b.last, b.deltas[0]

        name = f"{self.recipe.experts[index].label}\0{entry.name}"
        found = truncate(blocks, entry.base.rows, entry.base.cols, self.recipe.rank, name)
        self.energy[index][0] += found.kept
        self.energy[index][1] += found.energy
        self.exact[0 if found.exact else 1] += 1
        return found

    def report(self) -> dict[str, Any]:
        labels = [e.label for e in self.recipe.experts]
        if self.recipe.method == "svd":
            share = {n: (k / e if e else 1.0) for n, (k, e) in zip(labels, self.energy, strict=True)}
            return {
                "svd": {
                    "energy_kept_in_matrices": share,
                    "relative_error_in_matrices": {n: max(0.0, 1 - s) ** 0.5 for n, s in share.items()},
                    "matrices_exact": self.exact[0],
                    "matrices_randomised": self.exact[1],
                }
            }
        if self.recipe.density is None:
            return {}
        out: dict[str, Any] = {
            "share_kept": {n: k / s if s else 0.0 for n, k, s in zip(labels, self.kept, self.seen, strict=True)}
        }
        if self.recipe.trim == "global":
            out["trim_threshold"] = dict(zip(labels, self.thresholds, strict=True))
        return {"sparsification": out}
