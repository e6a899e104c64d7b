"""Experiments: arms x seeds as ordinary runs, resumed where they stopped, with tables from raw records."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from swarm_processes import wait_for

from coterie.config import config_from_dict
from coterie.errors import CoterieError, UserError
from coterie.experiment import from_base, load_experiment, run_experiment, table
from coterie.run import Run, train
from coterie.rundir import read_jsonl

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


def test_a_failing_run_is_named_and_what_is_done_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = spec_file(tmp_path, SPEC.replace("lr = 1e-6", "lrr = 1e-6"))
    with pytest.raises(CoterieError, match=r"slow seed 0 failed.*slow-0\.log"):
        run_experiment(path, tmp_path / "out", jobs=1)
    assert "lrr" in (tmp_path / "out" / "slow-0.log").read_text()
    said = capsys.readouterr()
    assert said.out == "" and said.err.splitlines() == ["[1/4] alone seed 0", "[2/4] slow seed 0"]
    records = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [(r["arm"], r["seed"]) for r in records] == [("alone", 0)]
    assert "| alone |" in (tmp_path / "out" / "table.md").read_text()


BASE = """
also = ["eval/pass_2"]
[base]
steps = 1
method = "sft"
[base.tasks.count_bits]
params = { min_n = 1, max_n = 1023 }
"""


def test_arms_start_from_the_base_that_is_made_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = spec_file(tmp_path, SPEC.replace("[config]", BASE.replace("max_n", "max_m") + "[config]"))
    with pytest.raises(CoterieError, match=r"the base failed; see .*base\.log"):
        run_experiment(path, tmp_path / "out", jobs=1)
    assert "max_m" in (tmp_path / "out" / "base.log").read_text()
    said = capsys.readouterr()
    assert (
        said.out == ""
        and said.err == f"making the base, from whose model all arms start (log: {tmp_path}/out/base.log)\n"
    )
    spec = load_experiment(path)
    made = str(tmp_path / "base" / "model")
    assert from_base(spec.settings("alone"), spec, tmp_path)["model"] == {"name": made}
    own = from_base({"model": {"name": "tiny", "lora_rank": 4}}, spec, tmp_path)
    assert own["model"] == {"name": "tiny", "lora_rank": 4}


def test_comparisons_with_the_start_and_of_other_metrics(tmp_path: Path) -> None:
    """Two seeds; alone: 0 to 0.5 and 0.1 to 0.4 in accuracy, pass@2 0.1 to 0.9 and 0.2 to 0.8."""
    compare = '\n[[compare]]\nfirst = "alone"\nsecond = "start"\nmetric = "eval/pass_2"\nfamily = "gain"\n'
    compare += '[[compare]]\nfirst = "slow"\nsecond = "start"\nfamily = "gain"\n'
    spec = load_experiment(spec_file(tmp_path, SPEC.replace("[config]", BASE + "[config]") + compare))
    ends = {"alone": ((0.0, 0.5, 0.1, 0.9), (0.1, 0.4, 0.2, 0.8)), "slow": ((0.0, 0.1, 0.1, 0.1), (0.1, 0.2, 0.2, 0.2))}
    records = [
        {
            "arm": arm,
            "seed": seed,
            "start": {"eval/accuracy": start, "eval/pass_2": pass_start},
            "end": {"eval/accuracy": end, "eval/pass_2": pass_end},
            "own_reward_last_tenth": 0.0,
            "generated_tokens": 100.0,
        }
        for arm, seeds in ends.items()
        for seed, (start, end, pass_start, pass_end) in enumerate(seeds)
    ]
    text = table(spec, records)
    assert "| alone | 0.050 | 0.450 |" in text and "| 0.850 (0.150) |" in text
    assert "| alone - slow | +0.300 |" in text
    assert "| alone - start (eval/pass_2) | +0.700 |" in text
    p = {line.split(" | ")[0]: line.split(" | ")[-2:] for line in text.splitlines() if " - " in line}
    assert p["| alone - slow"] == ["0.205", "0.205 |"], "alone in its family: nothing to correct for"
    assert p["| alone - start (eval/pass_2)"] == ["0.090", "0.181 (gain) |"], "two in the family: the smaller p twice"
    assert p["| slow - start"] == ["0.500", "0.500 (gain) |"]


def test_a_run_stops_at_its_budget_of_tokens_also_after_a_restart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends after the step that reaches the budget, helpers' words counted, is evaluated and marked as finished, and says what
    ended it; with a larger budget it goes on."""
    cfg = config_from_dict(
        {
            "run_dir": str(tmp_path / "run"),
            "steps": 9,
            "tokens": 600,
            "threads": 1,
            "tasks": {"count_bits": {"params": {"min_n": 1, "max_n": 1023}}},
            "rollout": {"problems": 2},
            "eval": {"problems": 2, "samples": 2, "ks": [2]},
        }
    )
    with Run(cfg, quiet=True) as run:
        run.begin()
        run.advance()
        first = run.trainer.tokens
        assert 0 < first < 600 and not run.done
    done = train(cfg)
    said = " ".join(capsys.readouterr().out.split())
    assert f"ended after step {done.steps} of 9: " in said and "of 600; the same command with a larger --tokens" in said
    rows = list(read_jsonl(done.run_dir / "metrics.jsonl"))
    spent = [int(r["tokens/generated"]) for r in rows if r["step"]]
    assert sum(spent[:-1]) < 600 <= sum(spent) and spent[0] == first and done.steps == len(spent) < 9
    assert "eval/pass_2" in rows[-1] and (done.run_dir / "DONE").exists()
    with pytest.raises(UserError, match="its 600 tokens were spent"):
        train(cfg, quiet=True)
    more = train(cfg.model_copy(update={"tokens": 0, "steps": done.steps + 1}), quiet=True)
    assert more.steps == done.steps + 1


@pytest.mark.parametrize(
    "change, words",
    [(("seeds", "seedz"), "seedz"), (('second = "slow"', 'second = "fast"'), "'fast'"), (("[0, 1]", "[0,"), "e.toml")],
)
def test_wrong_files_are_refused(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_experiment(spec_file(tmp_path, SPEC.replace(*change)))


def test_an_experiment_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name in ./experiments; a name that is not there is refused with those that are."""
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "mine.toml").write_text('question = "?"\nseeds = []\n')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"experiment experiments/mine\.toml"):  # found, read, and refused: no seeds
        run_experiment(Path("mine"), tmp_path / "out", 1)
    with pytest.raises(UserError, match=r"experiment yours: no such file, and none of \./experiments: mine"):
        run_experiment(Path("yours"), tmp_path / "out", 1)


def _small(tmp_path: Path, **changes: Any) -> Path:
    spec = {
        "question": "?",
        "seeds": [0],
        "config": {
            "steps": 1,
            "threads": 1,
            "tasks": {"count_bits": {"params": {"max_n": 1023}}},
            "rollout": {"problems": 2, "group_size": 4, "max_new_tokens": 16},
            "eval": {"every": 0, "problems": 2, "samples": 1},
        },
        "arms": {"a": {}},
    } | changes
    path = tmp_path / "e.toml"
    path.write_text(tomli_w.dumps(spec))
    return path


def test_a_folder_with_runs_of_other_settings_is_refused(tmp_path: Path) -> None:
    """Their results would pass for those of this file; and a metric that no run has is named before anything is lost."""
    out = tmp_path / "out"
    run_experiment(_small(tmp_path), out, 1)
    before = (out / "table.md").read_text()
    with pytest.raises(UserError, match=r"holds runs of 'a' with other settings .*give another --out"):
        run_experiment(_small(tmp_path, arms={"a": {"steps": 2}}), out, 1)
    with pytest.raises(UserError, match=r"of a has no metric 'eval/acuracy'; it has eval/accuracy"):
        run_experiment(_small(tmp_path, metric="eval/acuracy"), out, 1)
    assert (out / "table.md").read_text() == before
    with pytest.raises(UserError, match="is a file; name a directory"):
        run_experiment(_small(tmp_path), out / "table.md", 1)


@pytest.mark.parametrize("kind", ["runs", "parallel"])
def test_a_terminated_experiment_leaves_no_run_behind(tmp_path: Path, kind: str) -> None:
    tasks = {"count_bits": {"params": {"max_n": 1023}}, "gcd": {}}
    config = {"steps": 10_000, "threads": 1, "tasks": tasks}
    if kind == "parallel":
        config["parallel"] = {"experts": {"bits": ["count_bits"], "divisors": ["gcd"]}}
    path, out = _small(tmp_path, kind=kind, config=config), tmp_path / "out"
    command = [sys.executable, "-m", "coterie", "experiment", str(path), "--out", str(out), "--jobs", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        wait_for(lambda: bool(children(process.pid)), 60)
        (run,) = children(process.pid)
        process.terminate()
        assert process.wait(30) != 0
        wait_for(lambda: not Path(f"/proc/{run}").exists(), 20)
    finally:
        process.kill()
        process.communicate()


def children(pid: int) -> list[int]:
    """Started by any of its threads."""
    return [int(p) for t in Path(f"/proc/{pid}/task").iterdir() for p in (t / "children").read_text().split()]
