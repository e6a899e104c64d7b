"""Reports in a real browser, at the width of a phone and of a desktop. Skipped where there is no Chromium."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from merge_kit import save, weights
from report_kit import run_of
from typer.testing import CliRunner

from coterie.cli import app
from coterie.report import write_report

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "screenshots.py"
RESULTS = ROOT / "docs" / "results"


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


@pytest.fixture(scope="module")
def other_pages(browser: object, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of the other commands, with names as long as those of tasks; needs a browser to look at them."""
    from coterie.parallel.report import write_page

    folder = tmp_path_factory.mktemp("pages")
    names = ("arithmetic", "number_theory", "family_relationships", "intermediate_integration")
    base = weights(0)
    start = save(folder / "base", base)
    experts = [save(folder / n, weights(i, base)) for i, n in enumerate(names, 1)]
    typed("interference", start, *experts, "--top-k", 2, "--out", folder / "weights")
    settings = ("--problems", 4, "--group-size", 3, "--sketch", 4096)
    typed("probe", "tiny", "--tasks", "gcd,family_relationships,simple_equations", *settings, "--out", folder / "probe")
    result = json.loads((RESULTS / "parallel" / "seed0.json").read_text())
    for model in result["models"].values():
        model.setdefault("leak", 0.01)  # measured by later versions
    write_page(result, folder / "parallel.html")
    return {
        "interference": folder / "weights" / "interference.html",
        "probe": folder / "probe" / "probe.html",
        "parallel": folder / "parallel.html",
    }


def typed(*words: object) -> None:
    done = CliRunner().invoke(app, [str(w) for w in words])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("command", ["interference", "probe", "parallel"])
def test_pages_of_other_commands_have_no_errors_and_fit(
    width: int, command: str, shots: ModuleType, browser: object, other_pages: dict[str, Path]
) -> None:
    assert shots.problems(browser, other_pages[command], width) == []
    assert browser.run("document.querySelectorAll('svg text').length") > 8  # a page with its drawings, not an empty one


def test_the_check_finds_what_it_looks_for(shots: ModuleType, browser: object, tmp_path: Path) -> None:
    good = write_report([run_of(tmp_path / "run", 5)], tmp_path / "good.html").read_text()
    faults = {
        "console: ReferenceError: no_such_thing": good.replace("</body>", "<script>no_such_thing()</script></body>"),
        "console: broken": good.replace("</body>", "<script>console.error('broken')</script></body>"),
        "unlabelled": good.replace('"text":"step"', '"text":""'),
        "clipped": good.replace("</body>", "<svg width='50'><text y='9'>wider than its box</text></svg></body>"),
        "covered": good.replace('"y":-0.32', '"y":-0.1'),
        "small": good.replace("</body>", "<p style='font-size:7px'>fine print</p></body>"),
        "laid out": good.replace("</body>", "<div style='width:900px'>wide</div></body>"),
    }
    for words, html in faults.items():
        (tmp_path / "bad.html").write_text(html)
        found = shots.problems(browser, tmp_path / "bad.html", 390)
        assert any(words in f or ("laid out" in words and "wider" in f) for f in found), (words, found)
