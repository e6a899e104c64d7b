"""The probe's report as JSON and as one self-contained HTML page (inline SVG, no scripts)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape

from coterie.errors import UserError
from coterie.merging.page import COLOURS, drawing, heat_map
from coterie.merging.tables import number
from coterie.rundir import write_atomic

_SIZE = 360


def write_probe(report: dict[str, Any], out: Path) -> None:
    """Write ``probe.html``, then ``probe.json``, into the folder ``out``. Raises UserError if it is a file."""
    if out.exists() and not out.is_dir():
        raise UserError(f"output {out}: is a file; name a folder")
    out.mkdir(parents=True, exist_ok=True)
    env = Environment(loader=PackageLoader("coterie.merging", "."), autoescape=True)
    parts = [
        {
            "r": found,
            "cosines": Markup(_pairs(found, "cosine", "+.2f")),
            "raw": Markup(_pairs(found, "raw_cosine", "+.2f")),
            "map": Markup(_scatter(found["map"], list(found["tasks"]))),
            "scores": Markup(_scatter(found["score_map"], list(found["tasks"]))),
        }
        for found in report["temperatures"]
    ]
    page = env.get_template("probe.html.j2").render(model=report["model"], parts=parts, num=number)
    write_atomic(out / "probe.html", page)
    write_atomic(out / "probe.json", json.dumps(report, indent=2) + "\n")


def _pairs(found: dict[str, Any], key: str, form: str) -> str:
    names = list(found["tasks"])
    at = {tuple(p["tasks"]): p[key] for p in found["pairs"]}
    return heat_map(names, names, [[at.get((a, b), at.get((b, a))) for b in names] for a in names], form, 0.3)


def _scatter(found: dict[str, Any], names: list[str]) -> str:
    """Points in the plane of their two main directions, coloured by task."""
    points = found["points"]
    most = max((abs(c) for p in points for c in p), default=0.0) or 1.0
    parts = []
    for task, point in zip(found["task"], points, strict=True):
        x, y = (_SIZE / 2 * (1 + 0.95 * c / most) for c in (*point, 0.0)[:2])
        parts.append(f'<circle cx="{x:.1f}" cy="{_SIZE - y:.1f}" r="4" fill="{COLOURS[task % 8]}" fill-opacity=".7"/>')
    for i, name in enumerate(names):
        colour = COLOURS[i % 8]
        parts.append(f'<circle cx="{_SIZE + 10}" cy="{20 + 18 * i}" r="5" fill="{colour}"/>')
        parts.append(f'<text x="{_SIZE + 20}" y="{24 + 18 * i}">{escape(name)}</text>')
    return drawing(_SIZE + 160, _SIZE, parts)
