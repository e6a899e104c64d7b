"""The interference report on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from coterie.merging.compatibility import spoken


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def print_report(report: dict[str, Any], console: Console) -> None:
    """Experts, pairs, pairs by module type, subspaces, the reading, and the verdicts."""
    whole = report["all"]
    experts = Table(
        "expert",
        "L2 norm, all values",
        "relative to base",
        "visible in bf16",
        ">1e-5 in bf16",
        "dense-drift null",
        box=None,
    )
    for label, e in whole["experts"].items():
        experts.add_row(label, f"{e['l2_norm']:.4g}", number(e["relative_to_base"], ".2e"), f"{e['share_visible_in_bf16']:.2%}",
                        f"{e['share_above_in_bf16']['1e-05']:.2%}", f"{e['share_above_in_bf16_null']['1e-05']:.2%}")  # fmt: skip
    console.print(experts)
    pairs = Table(
        "scope", "pair", "cosine", "chance ±", "z (rows flipped)", "opposed energy", "support / null", box=None
    )
    for scope, f in [("all", whole), *report["per_module_type"].items()]:
        for p in f["pairs"]:
            pairs.add_row(scope, " · ".join(p["experts"]), number(p["cosine"], "+.2e"), number(p["chance_cosine"], ".1e"),
                          number(p["z_row_flip"], "+.1f"), number(p["sign_conflict_energy"], ".1%"),
                          number(p["support_overlap_over_null"], ".2f"))  # fmt: skip
    if whole["pairs"]:
        console.print(pairs)
    if report["subspaces"] and report["subspaces"]["matrices"]:
        console.print(_subspaces(report["subspaces"]))
    for line in (*report["notes"], *report["reading"]):
        console.print(f"- {line}", soft_wrap=True)
    for v in report["verdicts"]:
        console.print(f"verdict: {spoken(v)}", soft_wrap=True)


def _subspaces(found: dict[str, Any]) -> Table:
    table = Table(
        "matrix", "pair", f"output overlap (top {found['top_k']})", "chance", "input overlap", "chance", box=None
    )
    for m in found["matrices"]:
        left, right = m["left"], m["right"]
        table.add_row(m["tensor"], " · ".join(m["experts"]), f"{left['overlap']:.3f}", f"{left['chance']:.3f}",
                      f"{right['overlap']:.3f}", f"{right['chance']:.3f}")  # fmt: skip
    return table
