"""What the figures say in words, and no more. Thresholds are named where they are used."""

from __future__ import annotations

from typing import Any

from coterie.merging.compatibility import Evidence, Z, decide

NEAR = (0.8, 1.25)  # a measured share within these multiples of its null is "what chance gives"
UNEVEN = 3.0  # ratio of norms from which one delta dominates a plain sum
DENSE = 0.9  # visible share above which nobody would call the update sparse

CAVEAT = (
    "Weights alone never show that a merge is safe: near-orthogonal experts have kept anything from about half to all of their "
    "gain (arXiv 2608.27409). Score the merge, and each expert shrunk by the same lambda, on every task"
)


def reading(report: dict[str, Any]) -> list[str]:
    """One sentence per finding, the caveat first."""
    out = [CAVEAT]
    experts, pairs = report["all"]["experts"], report["all"]["pairs"]
    for pair in pairs:
        out += _pair(pair, report)
    for label, e in experts.items():
        out += _sparsity(label, e)
    norms = {n: e["l2_norm"] for n, e in experts.items() if e["l2_norm"] > 0}
    if len(norms) > 1 and max(norms.values()) > UNEVEN * min(norms.values()):
        big, small = max(norms, key=norms.__getitem__), min(norms, key=norms.__getitem__)
        out.append(
            f"{big}'s delta is {norms[big] / norms[small]:.1f} times as long as {small}'s: a plain sum follows {big}"
        )
    for a in report["adapters"]:
        if a["same_start"]:
            out.append(
                f"{' and '.join(a['experts'])}: their A matrices have cosine {a['mean_cosine_of_A']:.2f}: they started from "
                "the same random numbers, and overlap of their input subspaces is due to that, at least in part"
            )
    return out


def verdicts(report: dict[str, Any]) -> list[dict[str, Any]]:
    """May two experts be merged? What weights alone can say, and which evidence is missing, pair by pair."""
    out = []
    for pair in report["all"]["pairs"]:
        names = (pair["experts"][0], pair["experts"][1])
        known = pair["cosine"] is not None and pair["z_row_flip"] is not None
        weights = (pair["cosine"], pair["z_row_flip"]) if known else None
        out.append(decide(Evidence(names, weights=weights)).to_json(names))
    return out


def _pair(pair: dict[str, Any], report: dict[str, Any]) -> list[str]:
    names, cosine, z = " and ".join(pair["experts"]), pair["cosine"], pair["z_row_flip"]
    if cosine is None or z is None:
        return [f"{names}: at least one delta is zero, nothing to compare"]
    head = f"{names}: cosine {cosine:+.2e} over the whole model (row-flip z {z:+.1f})"
    if abs(z) < Z:
        out = [f"{head}: within chance. This shows independence of directions, not compatibility"]
    elif cosine > 0:
        out = [f"{head}: aligned beyond chance"]
    else:
        out = [f"{head}: opposed beyond chance; their sum cancels part of both"]
    split: dict[bool, list[str]] = {True: [], False: []}
    for kind, f in report["per_module_type"].items():
        other = next(p for p in f["pairs"] if p["experts"] == pair["experts"])
        if other["z_row_flip"] is not None and abs(other["z_row_flip"]) >= Z:
            split[other["cosine"] > 0].append(kind)
    if split[True] and split[False]:
        out.append(
            f"{names}: aligned in {', '.join(split[True])} but opposed in {', '.join(split[False])}: the total hides a conflict"
        )
    ratio = pair["support_overlap_over_null"]
    if ratio is not None:
        text = f"{names}: weights visibly changed in bf16 by both are {ratio:.2f} times as many as independent updates share"
        out.append(text + (", which is chance" if NEAR[0] <= ratio <= NEAR[1] else ""))
    return out


def _sparsity(label: str, e: dict[str, Any]) -> list[str]:
    seen, null = e["share_visible_in_bf16"], e["share_above_in_bf16_null"]["1e-05"]
    measured = e["share_above_in_bf16"]["1e-05"]
    if not null or seen > DENSE:
        return []
    ratio = measured / null
    text = f"{label}: {seen:.1%} of its weights visibly changed in bf16; above 1e-5: {measured:.1%}, dense drift gives {null:.1%}"
    if NEAR[0] <= ratio <= NEAR[1]:
        return [f"{text}: its sparsity is what rounding makes of dense drift, no sign of a sparse update"]
    return [f"{text}: {'fewer' if ratio < 1 else 'more'} than dense drift of this size"]
