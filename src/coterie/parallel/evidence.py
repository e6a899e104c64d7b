"""What is known of two experts before they are merged, as evidence for the verdict: scores problem by problem, and the probe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from coterie.merging.compatibility import Evidence, Scored, overlap_of
from coterie.parallel.scores import Rates, difference

if TYPE_CHECKING:
    from coterie.merging.probe import Scores


class Side(NamedTuple):
    """One expert's tasks, as the base, the expert itself and the other expert answer them."""

    base: Rates
    own: Rates
    other: Rates
    tasks: Sequence[str]


def evidence(names: tuple[str, str], sides: tuple[Side, Side], probe: Mapping[str, Any] | None) -> Evidence:
    """``probe``: figures of a probe in which the two are called by ``names``, or None where there was none."""
    gain = [difference(s.own, s.base, s.tasks) for s in sides]
    transfer = [difference(s.other, s.base, s.tasks) for s in sides]
    pairs = probe["pairs"] if probe else ()
    pair = next((p for p in pairs if set(p["tasks"]) == set(names)), None)
    return Evidence(
        names,
        Scored(
            (gain[0]["difference"], gain[1]["difference"]),
            (tuple(gain[0]["interval"]), tuple(gain[1]["interval"])),
            (transfer[0]["difference"], transfer[1]["difference"]),
            (tuple(transfer[0]["interval"]), tuple(transfer[1]["interval"])),
        ),
        overlap_of(pair, probe["controls"]) if probe and pair else None,
    )


def sole_owners(experts: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Task -> expert, for the tasks that one expert alone is trained on: a shared task says nothing about two experts."""
    every = [t for tasks in experts.values() for t in tasks]
    return {t: name for name, tasks in experts.items() for t in tasks if every.count(t) == 1}


def by_expert(scores: Scores, owner: Mapping[str, str]) -> Scores:
    """A probe of tasks as a probe of the experts they belong to."""
    names = tuple(dict.fromkeys(owner[t] for t in scores.tasks))
    of = np.array([names.index(owner[t]) for t in scores.tasks])  # [tasks]
    norms: list[float | None] = []
    for i in range(len(names)):
        known = [n for n, o in zip(scores.reference_norm, of, strict=True) if o == i and n is not None]
        norms.append(float(np.sqrt(np.mean(np.square(known)))) if len(known) == int((of == i).sum()) else None)
    return replace(
        scores,
        tasks=names,
        task=of[scores.task],
        distinct=np.array([scores.distinct[of == i].mean() for i in range(len(names))]),
        reference_norm=tuple(norms),
    )
