"""The interference report as one self-contained HTML page (inline SVG, no scripts) and as JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from jinja2 import Environment

from coterie.errors import UserError
from coterie.merging.tables import number

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Interference</title>
<style>
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:.5rem 0 1.5rem}td,th{padding:.2rem .7rem;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}figure{display:inline-block;margin:0 2rem 1rem 0;vertical-align:top}
figcaption{font-size:13px;color:#555}svg text{font:11px system-ui,sans-serif}code{font-size:13px}
</style>
<h1>Interference of {{ r.experts|length }} experts</h1>
<p>Base <code>{{ r.base }}</code>. Norms, cosines and shares are over {{ r["all"]["values"] }} merged values unless a scope is named.</p>
<h2>What the figures say</h2><ul>{% for line in r.reading %}<li>{{ line }}</li>{% endfor %}</ul>
<h2>Experts</h2>
<table><tr><th>expert<th>L2 norm, all values<th>relative to base<th>visible in bf16<th>null</tr>
{% for n, e in r["all"].experts.items() %}<tr><td>{{ n }}<td>{{ num(e.l2_norm, ".4g") }}<td>{{ num(e.relative_to_base, ".2e") }}
<td>{{ num(e.share_visible_in_bf16, ".2%") }}<td>{{ num(e.share_visible_in_bf16_null, ".2%") }}</tr>{% endfor %}</table>
<h3>Share of weights changed by more than a threshold, stored in bf16: measured / null of dense drift</h3>
<table><tr><th>expert{% for t in thresholds %}<th>{{ t }}{% endfor %}</tr>
{% for n, e in r["all"].experts.items() %}<tr><td>{{ n }}{% for t in thresholds %}
<td>{{ num(e.share_above_in_bf16[t], ".1%") }} / {{ num(e.share_above_in_bf16_null[t], ".1%") }}{% endfor %}</tr>{% endfor %}</table>
{% if r["all"].pairs %}<h2>Pairs</h2>
<p>Colours: cosine (left) and its z when whole rows of one delta are flipped at random (right); white is zero.</p>
<figure>{{ cosines }}<figcaption>cosine, all values</figcaption></figure>
<figure>{{ zs }}<figcaption>z, rows flipped</figcaption></figure>
<h3>By module type</h3><figure>{{ kinds }}<figcaption>z, rows flipped, per module type</figcaption></figure>
{% if r.per_layer %}<h3>By layer</h3><figure>{{ layers }}<figcaption>z, rows flipped, per layer</figcaption></figure>{% endif %}
<table><tr><th>pair<th>cosine<th>chance ±<th>z, signs flipped<th>z, rows flipped<th>opposed energy<th>support Jaccard<th>its null</tr>
{% for p in r["all"].pairs %}<tr><td>{{ p.experts|join(" · ") }}<td>{{ num(p.cosine, "+.2e") }}<td>{{ num(p.chance_cosine, ".1e") }}
<td>{{ num(p.z_sign_flip, "+.1f") }}<td>{{ num(p.z_row_flip, "+.1f") }}<td>{{ num(p.sign_conflict_energy, ".1%") }}
<td>{{ num(p.support_jaccard, ".3f") }}<td>{{ num(p.support_jaccard_null, ".3f") }}</tr>{% endfor %}</table>{% endif %}
{% if r.subspaces and r.subspaces.matrices %}<h2>Subspaces</h2><p>Top {{ r.subspaces.top_k }} singular vectors; {{ r.subspaces.sampled }}.</p>
<table><tr><th>matrix<th>pair<th>output overlap<th>chance<th>input overlap<th>chance</tr>
{% for m in r.subspaces.matrices %}<tr><td>{{ m.tensor }}<td>{{ m.experts|join(" · ") }}<td>{{ num(m.left.overlap, ".3f") }}
<td>{{ num(m.left.chance, ".3f") }}<td>{{ num(m.right.overlap, ".3f") }}<td>{{ num(m.right.chance, ".3f") }}</tr>{% endfor %}</table>{% endif %}
{% if r.notes %}<h2>Notes</h2><ul>{% for line in r.notes %}<li>{{ line }}</li>{% endfor %}</ul>{% endif %}
</html>
"""


def write_report(report: dict[str, Any], out: Path) -> None:
    """Write ``interference.json`` and ``interference.html`` into the folder ``out``.

    Raises:
        UserError: ``out`` is a file, or a report is there already.
    """
    if out.exists() and not out.is_dir():
        raise UserError(f"output {out}: is a file; name a folder")
    if (out / "interference.json").exists():
        raise UserError(f"output {out}: holds a report already; name another folder")
    out.mkdir(parents=True, exist_ok=True)
    (out / "interference.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (out / "interference.html").write_text(html(report), encoding="utf-8")


def html(report: dict[str, Any]) -> str:
    from markupsafe import Markup

    labels = list(report["all"]["experts"])
    env = Environment(autoescape=True)
    values = {
        "cosines": _pair_map(report["all"], labels, "cosine", ".1e"),
        "zs": _pair_map(report["all"], labels, "z_row_flip", ".1f"),
        "kinds": _scope_map(report["per_module_type"]),
        "layers": _scope_map(report["per_layer"]),
    }
    thresholds = list(next(iter(report["all"]["experts"].values()))["share_above"])
    marked = {k: Markup(v) for k, v in values.items()}
    return env.from_string(_PAGE).render(r=report, num=number, thresholds=thresholds, **marked)


def _pair_map(figures: dict[str, Any], labels: list[str], key: str, form: str) -> str:
    found = {tuple(p["experts"]): p[key] for p in figures["pairs"]}
    cells = [[found.get((a, b), found.get((b, a))) for b in labels] for a in labels]
    return heat_map(labels, labels, cells, form)


def _scope_map(scopes: dict[str, Any]) -> str:
    first = next(iter(scopes.values()), None)
    if first is None:
        return ""
    columns = [" · ".join(p["experts"]) for p in first["pairs"]]
    return heat_map(list(scopes), columns, [[p["z_row_flip"] for p in f["pairs"]] for f in scopes.values()], ".1f")


def heat_map(rows: list[str], columns: list[str], cells: list[list[float | None]], form: str) -> str:
    """An SVG table of coloured cells: blue negative, red positive, scaled to the largest magnitude shown."""
    from markupsafe import escape

    most = max((abs(c) for line in cells for c in line if c is not None and math.isfinite(c)), default=0.0) or 1.0
    left, top = 8 + 7 * max(map(len, rows), default=0), 8 + 5 * max(map(len, columns), default=0)
    wide, high = 62, 22
    parts = [f'<svg width="{left + wide * len(columns) + 60}" height="{top + high * len(rows) + 8}" role="img">']
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
    return "".join(parts) + "</svg>"


def _colour(value: float | None, most: float) -> str:
    if value is None:
        return "#eee"
    fade = round(255 - 150 * min(1.0, abs(value) / most))
    return f"rgb(255,{fade},{fade})" if value > 0 else f"rgb({fade},{fade},255)"
