"""Draw held-out accuracy against what it cost, from the results of an experiment with curves.

python scripts/plot_sharing.py docs/results/sharing/medium.jsonl docs/results/sharing/medium.svg tokens ARM ...

Thin lines are seeds, thick ones their mean; the axis is `tokens`, `step` or `cpu_s`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coterie.curves import value_at

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 400, 56, 190, 28, 48
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#e69f00", "#56b4e9")  # Okabe and Ito
TITLES = {"tokens": "tokens generated per node", "step": "updates", "cpu_s": "CPU seconds per node"}
POINTS = 41  # places at which the mean over seeds is read


def draw(records: Sequence[dict[str, Any]], axis: str, arms: Sequence[str]) -> str:
    """SVG: mean over nodes of the held-out accuracy, one colour per arm."""
    curves = {a: [r["curve"] for r in records if r["arm"] == a] for a in arms}
    right = max(c[-1][axis] for some in curves.values() for c in some)
    values = [p["metric"] for some in curves.values() for c in some for p in c]
    low, high = min(values) - 0.01, max(values) + 0.01

    def x(v: float) -> float:
        return LEFT + v / right * (WIDTH - LEFT - RIGHT)

    def y(v: float) -> float:
        return TOP + (high - v) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def line(points: Sequence[tuple[float, float]], colour: str, width: float, opacity: float) -> str:
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
        return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" opacity="{opacity}"/>'

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="16" font-size="13">Held-out pass@1, mean over nodes; thin: one seed, thick: mean</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{TITLES[axis]}</text>',
    ]
    for i in range(6):
        level, place = low + i / 5 * (high - low), i / 5 * right
        shown = f"{place / 1000:.0f}k" if axis == "tokens" else f"{place:.0f}"
        out += [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(level):.1f}" y2="{y(level):.1f}" stroke="#e4e7eb"/>',
            f'<text x="{LEFT - 6}" y="{y(level) + 4:.1f}" text-anchor="end">{level:.2f}</text>',
            f'<text x="{x(place):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{shown}</text>',
        ]
    for k, (arm, some) in enumerate(curves.items()):
        colour = COLOURS[k % len(COLOURS)]
        out += [line([(p[axis], p["metric"]) for p in c], colour, 1, 0.35) for c in some]
        end = min(c[-1][axis] for c in some)
        grid = [i / (POINTS - 1) * end for i in range(POINTS)]
        mean = [(g, sum(value_at(c, axis, g) for c in some) / len(some)) for g in grid]
        out += [
            line(mean, colour, 3, 1),
            f'<rect x="{WIDTH - RIGHT + 14}" y="{TOP + 20 * k}" width="14" height="4" fill="{colour}"/>',
            f'<text x="{WIDTH - RIGHT + 34}" y="{TOP + 20 * k + 6}">{arm} ({len(some)})</text>',
        ]
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> None:
    source, target, axis, *arms = sys.argv[1:]
    records = [json.loads(text) for text in Path(source).read_text(encoding="utf-8").splitlines()]
    Path(target).write_text(draw(records, axis, arms), encoding="utf-8")


if __name__ == "__main__":
    main()
