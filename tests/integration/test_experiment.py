"""Experiments: arms x seeds as ordinary runs, resumed where they stopped, with tables from raw records."""

import json
from pathlib import Path

import pytest

from coterie.errors import CoterieError, UserError
from coterie.experiment import load_experiment, run_experiment, table

SPEC = """
question = "Does a step change anything?"
seeds = [0, 1]
[config]
steps = 1
threads = 1
[config.tasks.count_bits]
params = { min_n = 1, max_n = 1023 }
[config.rollout]
problems = 2
[config.eval]
problems = 4
samples = 2
[arms.alone]
[arms.slow.optim]
lr = 1e-6
[[compare]]
first = "alone"
second = "slow"
"""


def spec_file(tmp_path: Path, text: str = SPEC) -> Path:
    path = tmp_path / "e.toml"
    path.write_text(text)
    return path


def test_grid_runs_resumes_and_tables(tmp_path: Path) -> None:
    path, out = spec_file(tmp_path), tmp_path / "out"
    run_experiment(path, out, jobs=2, only=["alone"])
    stamp = (out / "runs" / "alone" / "seed_0" / "DONE").stat().st_mtime_ns
    text = run_experiment(path, out, jobs=2).read_text()
    assert (out / "runs" / "alone" / "seed_0" / "DONE").stat().st_mtime_ns == stamp, "a finished run was repeated"
    records = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [(r["arm"], r["seed"]) for r in records] == [("alone", 0), ("slow", 0), ("alone", 1), ("slow", 1)]
    assert all(r["generated_tokens"] > 0 and r["start"].keys() == r["end"].keys() for r in records)
    assert "| alone - slow |" in text and "p (Holm)" in text
    assert text == table(load_experiment(path), records)
    config = (out / "runs" / "slow" / "seed_1" / "config.toml").read_text()
    assert "lr = 1e-06" in config and "seed = 1" in config


def test_a_failing_run_is_named(tmp_path: Path) -> None:
    path = spec_file(tmp_path, SPEC.replace("min_n = 1, max_n", "min_n = 1, max_m"))
    with pytest.raises(CoterieError, match=r"alone seed 0 failed.*alone-0\.log"):
        run_experiment(path, tmp_path / "out", jobs=1)
    assert "max_m" in (tmp_path / "out" / "alone-0.log").read_text()


@pytest.mark.parametrize(
    "change, words",
    [(("seeds", "seedz"), "seedz"), (('second = "slow"', 'second = "fast"'), "'fast'"), (("[0, 1]", "[0,"), "e.toml")],
)
def test_wrong_files_are_refused(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_experiment(spec_file(tmp_path, SPEC.replace(*change)))
