"""Do tasks move in one small subspace, although their mean gradients look unrelated? From group gradients' inner products.

The main directions of task i come from the first half of its problems, the energy is measured on the second half of task j's
(for j = i as well: that is what the directions of a task say about itself). Without the split the figure would be inflated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
DIRECTIONS = 4


def energy_in(k: Array, among: Sequence[int], of: Sequence[int], directions: int) -> float | None:
    """Share of the energy of the vectors ``of`` in the main ``directions`` of the vectors ``among``; ``k`` holds all inner
    products. None where either set is zero or spans fewer directions."""
    values, vectors = np.linalg.eigh(k[np.ix_(among, among)])
    order = np.argsort(values)[::-1][:directions]
    total = float(np.trace(k[np.ix_(of, of)]))
    if len(order) < directions or values[order[-1]] <= 1e-12 * max(values[order[0]], 0) or total <= 0:
        return None
    parts = k[np.ix_(of, among)] @ vectors[:, order] / np.sqrt(values[order])  # [n, q] coordinates along the directions
    return float(np.square(parts).sum()) / total


def shared_subspaces(k: Array, task: NDArray[np.int64], names: Sequence[str], dimension: int) -> dict[str, Any]:
    """For every ordered pair of tasks the share of the second's group gradients in the first's main directions.

    ``own`` is the most one can expect (the same task, other problems); ``chance`` is what random directions would hold.
    """
    halves = [
        (np.flatnonzero(task == i)[::2].tolist(), np.flatnonzero(task == i)[1::2].tolist()) for i in range(len(names))
    ]
    share = [[energy_in(k, a, b, DIRECTIONS) for _, b in halves] for a, _ in halves]
    pairs = [
        {"directions_of": names[i], "energy_of": names[j], "share": share[i][j], "own": share[j][j]}
        for i in range(len(names))
        for j in range(len(names))
        if i != j
    ]
    return {"directions": DIRECTIONS, "chance": DIRECTIONS / dimension, "pairs": pairs}
