"""What the charts of a report say: which runs share a line, and what a swarm's user must see."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
from report_kit import run_of

from coterie.report import write_report
from coterie.report.charts import figures
from coterie.report.curves import curves, reading_note
from coterie.report.data import load_runs


def swarm_of(folder: Path, nodes: int) -> list[Path]:
    """A swarm's folder; node i has a reward of i hundredths at every step."""
    out = [run_of(folder / f"node_{i}", 6) for i in range(nodes)]
    for i, path in enumerate(out):
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        rows = [r | ({"own/reward": i / 100} if r["step"] else {}) for r in rows]
        (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return out


def charts_of(paths: list[Path]) -> dict[str, list[dict]]:
    """Title of each chart, and its traces."""
    return {f.layout.title.text: f.to_plotly_json()["data"] for f, _ in figures(load_runs(paths))}


def lines_of(traces: list[dict]) -> dict[str, dict]:
    return {t["name"]: t for t in traces if t.get("fill") is None}


def test_a_swarm_of_eight_nodes_in_one_folder_is_one_mean_with_a_band_that_says_what_it_is(tmp_path: Path) -> None:
    paths = swarm_of(tmp_path / "swarm", 8)
    charts = charts_of(paths)
    band, line = charts["Own reward"]
    assert line["name"] == "own reward (mean of 8)" and list(line["y"]) == pytest.approx([0.035] * 6)
    assert list(line["x"]) == [1, 2, 3, 4, 5, 6]
    assert list(band["y"]) == pytest.approx([0.07] * 6 + [0.0] * 6) and band["name"] == "lowest to highest run"
    assert band["showlegend"] and "bands go from the lowest" in reading_note(load_runs(paths))
    assert all(len(t) == 2 * len(lines_of(t)) for t in charts.values())  # a band for every line
    assert all(sum(bool(x.get("showlegend")) for x in t) == 1 for t in charts.values())  # explained once


def test_every_key_of_a_chart_is_drawn_however_many_runs_there_are(tmp_path: Path) -> None:
    charts = charts_of(swarm_of(tmp_path / "swarm", 8))
    names = {f"{n} (mean of 8)" for n in ("own", "peers", "peers, asked for")}
    assert lines_of(charts["Groups in the update"]).keys() == names
    both = charts_of(swarm_of(tmp_path / "alone", 3) + swarm_of(tmp_path / "sharing", 4))
    names = {f"{a}: {n} (mean of {m})" for a, m in (("alone", 3), ("sharing", 4)) for n in ("informative", "all right")}
    assert lines_of(both["Informative groups"]).keys() == names


def test_five_runs_are_drawn_one_by_one_with_their_intervals(tmp_path: Path) -> None:
    paths = swarm_of(tmp_path / "swarm", 5)
    charts = charts_of(paths)
    assert lines_of(charts["Own reward"]).keys() == {f"node_{i}" for i in range(5)}
    assert all(t["error_y"]["array"] for t in charts["Held-out: gcd"])
    assert reading_note(load_runs(paths)) == ""


def test_lines_of_many_runs_are_the_deepest_folders_that_are_few_enough(tmp_path: Path) -> None:
    def drawn(*names: str) -> dict[str, int]:
        for n in names:
            if not (tmp_path / n).exists():
                run_of(tmp_path / n, 1)
        return {c.name: len(c.runs) for c in curves(load_runs([tmp_path / n for n in names]))}

    assert drawn(*(f"a/s{i}" for i in range(3)), *(f"b/s{i}" for i in range(3))) == {"a": 3, "b": 3}
    assert drawn("base", *(f"a/s{i}" for i in range(5))) == {"base": 1, "a": 5}
    assert drawn(*(f"{x}/{i}/s" for x in "de" for i in range(5))) == {"d": 5, "e": 5}  # ten folders are too many
    assert drawn(*(f"{x}/s" for x in "fghijklmn")) == {tmp_path.name: 9}


def test_a_swarm_s_state_staleness_and_refusals_are_shown(tmp_path: Path) -> None:
    paths = swarm_of(tmp_path / "swarm", 6)
    charts = {f.layout.title.text: (f, note) for f, note in figures(load_runs(paths))}
    fig, note = charts["Sharing"]
    assert fig.layout.yaxis.ticktext == ("solo", "degraded", "sharing") and "Solo: no link" in note
    assert "Staleness of peers' groups" in charts
    assert "before some are chosen" in charts["Peers' reward"][1]  # not only those used
    rows = [json.loads(line) for line in (paths[0] / "metrics.jsonl").read_text().splitlines()]
    asked_for_none = [{k: 0.0 if k == "swarm/wanted" else v for k, v in r.items()} for r in rows]
    (paths[0] / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in asked_for_none))
    page = write_report(paths, tmp_path / "report.html").read_text()
    start = page.index("<h2>Swarm</h2>")
    table = page[start : page.index("</table>", start)]
    assert "24 of 30" in table and "1.5" in table and "18 signature" in table and "17%" in table
    assert "node_1" in table and "node_0" not in table  # it took and gave nothing


def test_a_run_that_shares_nothing_has_no_swarm_in_its_report(tmp_path: Path) -> None:
    path = run_of(tmp_path / "run", 6)
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in r.items() if not k.startswith(("swarm/", "peer/"))} for r in lines]
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in kept))
    page = write_report([path], tmp_path / "report.html").read_text()
    assert "<h2>Swarm</h2>" not in page and "Staleness" not in page and "Peers' reward" not in charts_of([path])


# Linear-RGB matrices of Machado, Oliveira and Fernandes 2009 (IEEE TVCG 15:1291), full severity.
DEFICIENCIES = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


@pytest.mark.parametrize("folders", [[1], [3], [5], [8], [5, 4], [2] * 8], ids=str)
def test_lines_of_a_chart_are_told_apart_by_every_eye(folders: list[int], tmp_path: Path) -> None:
    """Any two lines differ by their dash, or by a CIE76 distance of 20 between their colours, whatever the number of runs."""
    paths = [run_of(tmp_path / f"arm_{a}" / f"node_{i}", 1) for a, n in enumerate(folders) for i in range(n)]
    charts = charts_of(paths)
    assert len(charts) == 19  # all of them, with up to three keys
    for title, traces in charts.items():
        styles = [(t["line"]["color"], t["line"]["dash"]) for t in traces if t.get("fill") is None]
        for (a, dash_a), (b, dash_b) in itertools.combinations(styles, 2):
            assert dash_a != dash_b or min(_distances(a, b)) > 20, (title, a, b)


def test_a_run_looks_the_same_in_every_chart_whatever_it_has_logged(tmp_path: Path) -> None:
    alone, sharing = swarm_of(tmp_path / "alone", 1)[0], swarm_of(tmp_path / "sharing", 1)[0]
    rows = [json.loads(line) for line in (alone / "metrics.jsonl").read_text().splitlines()]
    rows = [{k: v for k, v in r.items() if k != "peer/reward"} for r in rows]
    (alone / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    charts = charts_of([alone, sharing])
    (only,) = lines_of(charts["Peers' reward"]).values()
    assert only["line"] == lines_of(charts["Own reward"])["sharing/node_0"]["line"]


def _distances(a: str, b: str) -> list[float]:
    return [math.dist(_lab(_simulate(a, m)), _lab(_simulate(b, m))) for m in DEFICIENCIES.values()]


def _simulate(colour: str, matrix: tuple[tuple[float, ...], ...]) -> list[float]:
    rgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    return [min(1.0, max(0.0, sum(m * c for m, c in zip(row, linear, strict=True)))) for row in matrix]


def _lab(rgb: list[float]) -> tuple[float, float, float]:
    r, g, b = rgb
    xyz = (
        0.4124 * r + 0.3576 * g + 0.1805 * b,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        0.0193 * r + 0.1192 * g + 0.9505 * b,
    )
    x, y, z = (c / w for c, w in zip(xyz, (0.9505, 1.0, 1.089), strict=True))
    f = [v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z)]
    return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])
