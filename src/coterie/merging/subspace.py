"""Do experts write into the same directions? Top singular vectors of their deltas, matrix by matrix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from coterie.merging.adapters import Adapter
from coterie.merging.checkpoints import Reader, is_embedding, is_head
from coterie.merging.deltas import stream
from coterie.merging.inputs import Entry, Inputs
from coterie.merging.lowrank import PASS_MIB, LowRank, truncate
from coterie.merging.numbers import module_type

_NEGLIGIBLE = 1e-5  # singular values below this share of the first are noise of fp32


def sample_matrices(inputs: Inputs, top_k: int, per_type: int) -> list[Entry]:
    """At most ``per_type`` matrices of each module type, spread evenly over the layers; embeddings and heads are left out."""
    kinds: dict[str, list[Entry]] = {}
    for e in inputs.entries:
        fits = e.merged and len(e.base.shape) == 2 and min(e.base.shape) > 2 * top_k
        if fits and not is_embedding(e.name) and not is_head(e.name) and any(s is not None for s in e.sources):
            kinds.setdefault(module_type(e.name), []).append(e)
    chosen = []
    for group in kinds.values():
        count = min(per_type, len(group))
        chosen += [group[(2 * k + 1) * len(group) // (2 * count)] for k in range(count)]
    return sorted(chosen, key=lambda e: e.name)


def subspace_overlap(inputs: Inputs, top_k: int, per_type: int) -> dict[str, Any]:
    """Overlap of the top-``top_k`` left (output) and right (input) singular subspaces for every pair of experts.

    ``|U_i^T U_j|_F^2 / k`` is the mean squared cosine of the principal angles: 1 for equal subspaces, ``k / dimension`` for
    random ones. Experts whose delta has a lower rank are compared on that rank.
    """
    labels = [e.label for e in inputs.experts]
    out = []
    for entry in sample_matrices(inputs, top_k, per_type):
        found = [_top(inputs, entry, i, top_k) for i in range(len(labels))]
        for i in range(len(labels)):
            for j in range(i + 1, len(labels)):
                a, b = found[i], found[j]
                if a is not None and b is not None:
                    left, right = _compare(a[0], b[0]), _compare(a[1], b[1])
                    out.append({"tensor": entry.name, "experts": [labels[i], labels[j]], "left": left, "right": right})
    return {
        "top_k": top_k,
        "sampled": f"at most {per_type} matrices per module type, spread over the layers; embeddings and heads left out",
        "matrices": out,
    }


def _top(inputs: Inputs, entry: Entry, index: int, top_k: int) -> tuple[Tensor, Tensor] | None:
    """Orthonormal bases ``[rows, k]`` and ``[cols, k]`` of one expert's delta; None if it is zero."""
    if entry.sources[index] is None:
        return None

    def blocks() -> Iterator[tuple[int, int, Tensor]]:
        for b in stream(inputs, [entry], PASS_MIB, only=[index]):
            yield b.first, b.last, b.deltas[0]

    name = f"{inputs.experts[index].label}\0{entry.name}"
    low: LowRank = truncate(blocks, entry.base.rows, entry.base.cols, top_k, name)
    keep = low.values > _NEGLIGIBLE * low.values[:1]  # [k]
    if low.energy == 0 or not bool(keep.any()):
        return None
    return low.left[:, keep], (low.right[keep] / low.values[keep, None]).T


def _compare(a: Tensor, b: Tensor) -> dict[str, float]:
    """``a [n, k]``, ``b [n, l]`` with orthonormal columns."""
    angles = torch.linalg.svdvals(a.double().T @ b.double())  # [min(k, l)] cosines of the principal angles
    small, large = sorted((a.shape[1], b.shape[1]))
    return {
        "overlap": float(angles.square().sum()) / small,
        "chance": large / a.shape[0],
        "largest_cosine": float(angles[0]),
    }


def shared_initialisation(inputs: Inputs, most: int = 8) -> list[dict[str, Any]]:
    """Pairs of adapters whose A matrices are alike: started from one RNG key, their deltas share rows for that reason alone."""
    out = []
    members = [(e.label, m) for e, m in zip(inputs.experts, inputs.members, strict=True) if isinstance(m, Adapter)]
    with Reader() as reader:
        for i, (one, a) in enumerate(members):
            for two, b in members[i + 1 :]:
                shared = [n for n in a.pairs if n in b.pairs and a.pairs[n].a.shape == b.pairs[n].a.shape]
                cosines = []
                for n in shared[:: max(1, len(shared) // most)][:most]:
                    x, y = (reader.rows(m.pairs[n].a, 0, m.pairs[n].a.rows).double().flatten() for m in (a, b))
                    cosines.append(float(x @ y / (x.norm() * y.norm()).clamp_min(1e-300)))
                if cosines:
                    rank, width = a.pairs[shared[0]].a.shape
                    mean = sum(cosines) / len(cosines)
                    chance = (
                        rank * width * len(cosines)
                    ) ** -0.5  # standard deviation of the mean for different starts
                    out.append({"experts": [one, two], "mean_cosine_of_A": mean, "same_start": abs(mean) > max(0.5, 4 * chance),
                                "expected_cosine_of_same_task_with_different_starts": rank / width})  # fmt: skip
    return out
