"""Reports in a real browser, at the width of a phone and of a desktop. Skipped where there is no Chromium."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from report_kit import run_of

from coterie.report import write_report
from coterie.report.charts import COLOURS, DASHES

SCRIPT = Path(__file__).parents[2] / "scripts" / "screenshots.py"


@pytest.fixture(scope="module")
def shots() -> ModuleType:
    spec = importlib.util.spec_from_file_location("screenshots", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def browser(shots: ModuleType) -> Iterator[object]:
    binary = shots.chromium()
    if binary is None:
        pytest.skip("no Chromium here (Debian: apt install chromium)")
    with shots.Browser(binary) as found:
        yield found


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize(("count", "folders"), [(1, 1), (3, 2), (7, 2), (8, 1)])
def test_report_has_no_errors_fits_and_labels_every_chart(
    width: int, count: int, folders: int, shots: ModuleType, browser: object, tmp_path: Path
) -> None:
    runs = [run_of(tmp_path / f"an-arm-with-a-long-name-{i % folders}" / f"node_{i}") for i in range(count)]
    page = write_report(runs, tmp_path / "report.html")
    assert shots.problems(browser, page, width) == []
    assert browser.run("document.querySelectorAll('.js-plotly-plot').length") == 16


def test_the_check_finds_what_it_looks_for(shots: ModuleType, browser: object, tmp_path: Path) -> None:
    good = write_report([run_of(tmp_path / "run", 5)], tmp_path / "good.html").read_text()
    faults = {
        "console: ReferenceError: no_such_thing": good.replace("</body>", "<script>no_such_thing()</script></body>"),
        "console: broken": good.replace("</body>", "<script>console.error('broken')</script></body>"),
        "unlabelled": good.replace('"text":"step"', '"text":""'),
        "small": good.replace("</body>", "<p style='font-size:7px'>fine print</p></body>"),
        "laid out": good.replace("</body>", "<div style='width:900px'>wide</div></body>"),
    }
    for words, html in faults.items():
        (tmp_path / "bad.html").write_text(html)
        found = shots.problems(browser, tmp_path / "bad.html", 390)
        assert any(words in f or ("laid out" in words and "wider" in f) for f in found), (words, found)


# Linear-RGB matrices of Machado, Oliveira and Fernandes 2009 (IEEE TVCG 15:1291), full severity.
DEFICIENCIES = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


@pytest.mark.parametrize("kind", DEFICIENCIES)
def test_colours_of_a_chart_are_told_apart_by_every_eye(kind: str) -> None:
    """CIE76 distance of 20 between any two of the first five, which is as many as a chart has; runs also differ by dash."""
    seen = [_lab(_simulate(c, DEFICIENCIES[kind])) for c in COLOURS[:5]]
    assert min(math.dist(a, b) for a, b in itertools.combinations(seen, 2)) > 20
    assert len(set(DASHES)) == len(DASHES) >= 5


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
