"""Draw what a node receives per step against the size of the swarm.

python -m coterie.bench.swarm traffic > docs/results/swarm_traffic.json
python scripts/plot_traffic.py docs/results/swarm_traffic.json docs/results/swarm_traffic.svg
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 360, 64, 140, 28, 48
LINES = (("payload_bytes_per_node_step", "#1f6feb", "payload"), ("wire_bytes_per_node_step", "#d1570a", "on the wire"))
BAR = 0.25  # what may change from the smallest to the largest swarm


def draw(rows: Sequence[dict[str, Any]]) -> str:
    """SVG of kilobytes per node and step; the band is the first payload +- 25%; whiskers are the least and most served node."""
    top = 1.25 * max(r["most_groups"] * r["group_bytes"] for r in rows) / 1000
    low, high = math.log2(rows[0]["nodes"]) - 0.5, math.log2(rows[-1]["nodes"]) + 0.5

    def x(nodes: float) -> float:
        return LEFT + (math.log2(nodes) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(kilobytes: float) -> float:
        return HEIGHT - BOTTOM - kilobytes / top * (HEIGHT - TOP - BOTTOM)

    first = rows[0][LINES[0][0]] / 1000
    edge, right = LEFT, WIDTH - RIGHT
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="16" font-size="13">Received per node and step (kB), J = 4</text>',
        f'<rect x="{edge}" y="{y(first * (1 + BAR)):.1f}" width="{right - edge}" '
        f'height="{y(first * (1 - BAR)) - y(first * (1 + BAR)):.1f}" fill="#eef2f6"/>',
        f'<text x="{right + 6}" y="{y(first * (1 + BAR)) + 12:.1f}" fill="#667">±25% of N = {rows[0]["nodes"]}</text>',
    ]
    for tick in range(0, int(top) + 1, 50):
        out += [
            f'<line x1="{edge}" x2="{right}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#dde"/>',
            f'<text x="{edge - 8}" y="{y(tick) + 4:.1f}" text-anchor="end" fill="#445">{tick}</text>',
        ]
    for r in rows:
        at = x(r["nodes"])
        ends = [y(r[k] * r["group_bytes"] / 1000) for k in ("fewest_groups", "most_groups")]
        out += [
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{ends[0]:.1f}" y2="{ends[1]:.1f}" stroke="{LINES[0][1]}" opacity="0.4"/>',
            f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" fill="#445">{r["nodes"]}</text>',
        ]
    for i, (key, color, name) in enumerate(LINES):
        points = [(x(r["nodes"]), y(r[key] / 1000)) for r in rows]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        out += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{color}"/>' for a, b in points]
        out.append(f'<text x="{right + 6}" y="{HEIGHT - BOTTOM - 8 - 16 * i}" fill="{color}">{name}</text>')
    middle = (edge + right) / 2
    out.append(
        f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle" fill="#445">nodes in the swarm (log scale)</text>'
    )
    return "\n".join([*out, "</svg>", ""])


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    Path(sys.argv[2]).write_text(draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), encoding="utf-8")
