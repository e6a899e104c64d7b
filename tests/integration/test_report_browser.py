"""Reports in a real browser, at the width of a phone and of a desktop. Skipped where there is no Chromium."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from report_kit import run_of

from coterie.report import write_report

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
    assert browser.run("document.querySelectorAll('.js-plotly-plot').length") == 19


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
