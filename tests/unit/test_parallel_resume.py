"""What a kill leaves must not stop the next call: reports count as made only when complete, and remains are no one's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coterie.bench.verdict import _logged
from coterie.config import Config, config_from_dict
from coterie.errors import UserError
from coterie.merging import page, probe_page
from coterie.parallel.run import _claim
from coterie.parallel.stages import compare_weights
from coterie.rundir import write_atomic


class Killed(BaseException):
    pass


def killed(*_: Any, **__: Any) -> None:
    raise Killed


def config(run_dir: Path) -> Config:
    experts = {"a": ["gcd"], "b": ["count_bits"]}
    tasks: dict[str, Any] = {"gcd": {}, "count_bits": {}}
    return config_from_dict({"tasks": tasks, "run_dir": str(run_dir), "parallel": {"experts": experts}})


def test_an_interference_report_that_was_cut_off_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def report(_: Any) -> dict[str, Any]:
        made.append(1)
        return {"figures": "all of them"}

    monkeypatch.setattr("coterie.merging.diagnostics.interference", report)
    cfg, experts = config(tmp_path), {n: tmp_path / n for n in "ab"}
    with monkeypatch.context() as m:
        m.setattr(page, "html", killed)  # while the page is drawn
        with pytest.raises(Killed):
            compare_weights(cfg, tmp_path, experts)
    monkeypatch.setattr(page, "html", lambda _: "<html>")
    with monkeypatch.context() as m:
        m.setattr(page.json, "dumps", killed)  # between the page and the figures
        with pytest.raises(Killed):
            compare_weights(cfg, tmp_path, experts)
    assert compare_weights(cfg, tmp_path, experts) == {"figures": "all of them"} and len(made) == 3
    assert (tmp_path / "interference" / "interference.html").read_text() == "<html>"
    assert compare_weights(cfg, tmp_path, experts) == {"figures": "all of them"} and len(made) == 3


@pytest.mark.parametrize("module", [page, probe_page])
def test_the_figures_appear_whole_and_after_their_page(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def write(path: Path, text: str) -> None:
        order.append(path.name)
        write_atomic(path, text)

    monkeypatch.setattr(module, "write_atomic", write)
    if module is page:
        monkeypatch.setattr(page, "html", lambda _: "<html>")
        page.write_report({"x": 1}, tmp_path / "out")
    else:
        probe_page.write_probe({"model": "tiny", "temperatures": []}, tmp_path / "out")
    stem = "interference" if module is page else "probe"
    assert order == [f"{stem}.html", f"{stem}.json"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == order


def test_a_folder_whose_config_was_being_written_is_taken_and_a_foreign_one_is_not(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    (root / ".lock").touch()
    (root / ".config.toml.part").write_text("steps =")  # what a kill leaves of the first write
    _claim(config(root), root)
    assert (root / "config.toml").is_file()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(UserError, match="not empty and not of `coterie parallel`"):
        _claim(config(tmp_path / "other"), tmp_path / "other")


def test_calibration_goes_on_from_whole_pairs_only(tmp_path: Path) -> None:
    rows = [{"pair": n, "kind": k} for n in (0, 1) for k in ("conflict", "helpful", "unrelated")]
    log = tmp_path / "verdict.jsonl"
    log.write_text("".join(json.dumps(r) + "\n" for r in rows[:5]) + json.dumps(rows[5])[:9])
    assert _logged(log) == rows[:3]


def test_what_runs_were_given_may_not_change_and_what_is_made_of_them_may(tmp_path: Path) -> None:
    cfg = config(tmp_path)

    def other(**parallel: Any) -> Config:
        return cfg.model_copy(update={"parallel": cfg.parallel.model_copy(update=parallel)})

    _claim(cfg, tmp_path)
    _claim(other(lam=0.3, method="ties", baselines=("mixed",), jobs=1, probe=8), tmp_path)
    with pytest.raises(UserError, match=r"differs in parallel\.log_updates"):
        _claim(other(log_updates=1024), tmp_path)
    with pytest.raises(UserError, match=r"differs in parallel\.experts"):
        _claim(other(experts={"a": ("count_bits",), "b": ("gcd",)}), tmp_path)
