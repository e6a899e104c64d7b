"""The interference report as one self-contained HTML page (inline SVG, no scripts) and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from coterie.errors import UserError
from coterie.merging.compatibility import spoken
from coterie.merging.tables import number
from coterie.rundir import write_atomic

COLOURS = ("#3366cc", "#dc3912", "#109618", "#ff9900", "#990099", "#0099c6", "#dd4477", "#66aa00")
_Z_SCALE = 6.0  # z at which a cell has its full colour


def write_report(report: dict[str, Any], out: Path) -> None:
    """Write ``interference.html`` and ``interference.json`` into the folder ``out``. The JSON comes last: where it lies, the
    report is complete.

    Raises:
        UserError: see :func:`check_place`.
    """
    check_place(out)
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "interference.html", html(report))
    write_atomic(out / "interference.json", json.dumps(report, indent=2) + "\n")


def check_place(out: Path) -> None:
    """Raises UserError if ``out`` is a file or holds a report already."""
    if out.exists() and not out.is_dir():
        raise UserError(f"output {out}: is a file; name a folder")
    if (out / "interference.json").exists():
        raise UserError(f"output {out}: holds a report already; name another folder")


def html(report: dict[str, Any]) -> str:
    from markupsafe import Markup

    labels = list(report["all"]["experts"])
    env = Environment(loader=PackageLoader("coterie.merging", "."), autoescape=True)
    values = {
        "cosines": _pair_map(report["all"], labels, "cosine", ".1e", 0.1),
        "zs": _pair_map(report["all"], labels, "z_row_flip", ".1f", _Z_SCALE),
        "kinds": _scope_map(report["per_module_type"]),
        "layers": _scope_map(report["per_layer"]),
        "density": _density_map(report, labels),
        "curves": sparsity_curves(report["all"]["experts"]),
    }
    thresholds = list(next(iter(report["all"]["experts"].values()))["share_above"])
    marked = {k: Markup(v) for k, v in values.items()}
    return env.get_template("interference.html.j2").render(
        r=report, num=number, spoken=spoken, thresholds=thresholds, **marked
    )


def _pair_map(figures: dict[str, Any], labels: list[str], key: str, form: str, least: float) -> str:
    found = {tuple(p["experts"]): p[key] for p in figures["pairs"]}
    cells = [[found.get((a, b), found.get((b, a))) for b in labels] for a in labels]
    return heat_map(labels, labels, cells, form, least)


def _scope_map(scopes: dict[str, Any]) -> str:
    first = next(iter(scopes.values()), None)
    if first is None:
        return ""
    columns = [" · ".join(p["experts"]) for p in first["pairs"]]
    return heat_map(
        list(scopes), columns, [[p["z_row_flip"] for p in f["pairs"]] for f in scopes.values()], ".1f", _Z_SCALE
    )


def _density_map(report: dict[str, Any], labels: list[str]) -> str:
    """log2 of a module type's share of a delta's energy over its share of the values: 0 for an update spread evenly."""
    whole, kinds = report["all"], report["per_module_type"]

    def cell(kind: dict[str, Any], label: str) -> float | None:
        energy = kind["experts"][label]["l2_norm"] ** 2 / (whole["experts"][label]["l2_norm"] ** 2 or 1.0)
        return math.log2(energy / (kind["values"] / whole["values"])) if energy else None

    return heat_map(list(kinds), labels, [[cell(k, n) for n in labels] for k in kinds.values()], "+.1f", 2.0)


def sparsity_curves(experts: dict[str, Any]) -> str:
    """SVG: share of weights changed by more than a threshold, stored in bf16 (lines), and for dense drift (dashed)."""
    from markupsafe import escape

    thresholds = list(next(iter(experts.values()))["share_above_in_bf16"])
    wide, high, left = 90, 180, 40
    right, bottom = left + wide * (len(thresholds) - 1), high + 10
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = bottom - high * share
        parts.append(f'<line x1="{left}" x2="{right}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{share:.0%}</text>')
    for k, t in enumerate(thresholds):
        parts.append(f'<text x="{left + wide * k}" y="{bottom + 18}" text-anchor="middle">{t}</text>')
    for i, (name, e) in enumerate(experts.items()):
        colour = COLOURS[i % len(COLOURS)]
        for key, dash in (("share_above_in_bf16", ""), ("share_above_in_bf16_null", ' stroke-dasharray="5 4"')):
            places = " ".join(f"{left + wide * k},{bottom - high * e[key][t]:.1f}" for k, t in enumerate(thresholds))
            parts.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        parts.append(f'<text x="{right + 10}" y="{20 + 16 * i}" fill="{colour}">{escape(name)}</text>')
    return drawing(right + 160, high + 40, parts)


def heat_map(rows: list[str], columns: list[str], cells: list[list[float | None]], form: str, least: float) -> str:
    """An SVG table of coloured cells: blue negative, red positive, full colour at the largest magnitude, or ``least``."""
    from markupsafe import escape

    most = max((abs(c) for line in cells for c in line if c is not None and math.isfinite(c)), default=0.0)
    most = max(most, least)  # so that noise does not look like a finding
    left, top = 8 + 7 * max(map(len, rows), default=0), 20 + 5 * max(map(len, columns), default=0)
    wide, high = 62, 22
    parts = []
    for x, text in enumerate(columns):
        at = left + wide * x + wide / 2
        parts.append(f'<text transform="translate({at},{top - 6}) rotate(-35)">{escape(text)}</text>')
    for y, (text, line) in enumerate(zip(rows, cells, strict=True)):
        parts.append(f'<text x="{left - 6}" y="{top + high * y + 15}" text-anchor="end">{escape(text)}</text>')
        for x, c in enumerate(line):
            place = f'x="{left + wide * x}" y="{top + high * y}" width="{wide - 2}" height="{high - 2}"'
            parts.append(f'<rect {place} fill="{_colour(c, most)}"/>')
            middle = f'x="{left + wide * x + wide / 2 - 1}" y="{top + high * y + 14}" text-anchor="middle"'
            parts.append(f"<text {middle}>{number(c, form)}</text>")
    ends = [
        wide * (x + 0.5) + 12 + 6 * len(text) for x, text in enumerate(columns)
    ]  # slanted names reach beyond the cells
    return drawing(left + max([*ends, wide * len(columns)]), top + high * len(rows) + 8, parts)


def drawing(width: float, height: float, parts: Sequence[str]) -> str:
    """An SVG of its full size, in a box that scrolls where the screen is narrower."""
    svg = f'<svg width="{width:.0f}" height="{height:.0f}" role="img">{"".join(parts)}</svg>'
    return f'<div style="overflow-x:auto">{svg}</div>'


def _colour(value: float | None, most: float) -> str:
    if value is None:
        return "#eee"
    fade = round(255 - 150 * min(1.0, abs(value) / most))
    return f"rgb(255,{fade},{fade})" if value > 0 else f"rgb({fade},{fade},255)"
