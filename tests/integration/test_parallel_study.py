"""The experiment on parallel training: a small one end to end, and its tables from numbers made by hand."""

from __future__ import annotations

import fcntl
import json
from itertools import pairwise
from pathlib import Path

import pytest

from coterie.errors import CoterieError, UserError
from coterie.experiment import load_experiment, run_experiment
from coterie.parallel.study import orders, work
from coterie.parallel.study_models import crossing
from coterie.parallel.study_table import Records, signs, tables, verdict

SPEC = """
question = "Do they add up?"
kind = "parallel"
seeds = [7]
match = ["rl", "sft"]
[config]
steps = 1
threads = 1
[config.parallel]
lam = 0.6
sweep = [0.6, 1.0]
adapt_steps = 1
baselines = ["mixed", "multi_stage"]
[config.parallel.experts]
bits = ["count_bits"]
divisors = ["gcd"]
[config.tasks.count_bits]
params = { min_n = 1, max_n = 1023 }
[config.tasks.gcd]
params = { min_numbers = 2, max_numbers = 2, min_value = 2, max_value = 99 }
[config.rollout]
problems = 2
group_size = 4
max_new_tokens = 40
[config.sft]
rows = 4
answers = "coterie.models.worked:worked_answer"
[config.eval]
problems = 2
samples = 1
[arms.rl]
[arms.sft]
method = "sft"
[arms.lora]
model.lora_rank = 2
parallel.baselines = []
"""


@pytest.mark.slow
def test_a_small_study_trains_every_run_once_scores_every_merge_and_goes_on_where_it_was(tmp_path: Path) -> None:
    file, out = tmp_path / "e.toml", tmp_path / "out"
    file.write_text(SPEC)
    text = run_experiment(file, out, jobs=1).read_text()
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    names = {(r["arm"], r["model"]) for r in rows if "model" in r}
    assert {m for a, m in names if a == "rl"} == {
        "base", "expert/bits", "expert/divisors", "sum_0.6", "sum_1", "mean", "ties_0.6", "ties_1", "dare_0.6", "dare_1",
        "svd1_0.6", "svd1_1", "shrink_0.5/bits", "shrink_0.5/divisors", "shrink_0.6/bits", "shrink_0.6/divisors",
        "mixed", "adapted", "adapted_base", "stages/order_0", "stages/order_1",
    }  # fmt: skip
    assert ("sft", "base") not in names and ("lora", "concat_1") in names and ("lora", "concat_1_r2") in names
    assert {m for a, m in names if a == "matched"} >= {"norm/sft/sum_1", "gain/rl/expert/bits", "gain/sft/sum_0.6"}
    runs = {(r["arm"], r["run"]): r for r in rows if "run" in r}
    assert set(runs) == {
        *((a, f"experts/{n}") for a in ("rl", "sft", "lora") for n in ("bits", "divisors")),
        *((a, n) for a in ("rl", "sft") for n in ("mixed", "adapted", "adapted_base")),
        *((a, n) for a in ("rl", "sft") for n in ("multi_stage/order_0/2_divisors", "multi_stage/order_1/2_bits")),
    }
    assert {r["seed"] for r in rows} == {7} and {r["run_seed"] for r in runs.values()} == {7, 8, 9, 10}
    assert runs["rl", "mixed"]["steps"] == 2 and runs["rl", "adapted"]["steps"] == 1
    assert "| RL: the sum, lambda 1, is above the base |" in text and "one seed" in text
    stamp = (out / "records" / "rl-7.jsonl").stat().st_mtime_ns
    (out / "records" / "matched-7.jsonl").unlink()
    assert run_experiment(file, out, jobs=1).read_text() == text, "the same study gave other figures"
    assert (out / "records" / "rl-7.jsonl").stat().st_mtime_ns == stamp
    with pytest.raises(UserError, match="--arms"):
        run_experiment(file, out, jobs=1, only=["rl"])
    file.write_text(SPEC.replace('["rl", "sft"]', '["rl", "nobody"]'))
    with pytest.raises(UserError, match="'nobody'"):
        load_experiment(file)


def test_a_folder_of_other_settings_is_refused_and_more_seeds_are_not(tmp_path: Path, monkeypatch, capsys) -> None:
    started = []
    monkeypatch.setattr(
        "coterie.parallel.study.Processes.run", lambda self, command, *_, **__: started.append(command[-1]) or 1
    )
    file, out = tmp_path / "e.toml", tmp_path / "out"
    for text in (SPEC, SPEC.replace("seeds = [7]", "seeds = [7, 17]")):
        file.write_text(text)
        with pytest.raises(CoterieError, match="seed 7 failed"):
            run_experiment(file, out, jobs=1)
    assert started == ["7", "7", "17"]
    said = capsys.readouterr()
    assert said.out == "" and [line.partition(":")[0] for line in said.err.splitlines()] == [
        f"seed {s}" for s in started
    ]
    file.write_text(SPEC.replace("steps = 1", "steps = 2"))
    with pytest.raises(UserError, match="other settings; choose another --out"):
        run_experiment(file, out, jobs=1)
    (tmp_path / "old/runs").mkdir(parents=True)
    with pytest.raises(UserError, match="other settings"):
        run_experiment(file, tmp_path / "old", jobs=1)


def test_two_processes_do_not_work_on_one_seed(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(SPEC)
    with open(tmp_path / "seed-7.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CoterieError, match="another process is at work on seed 7"):
            work(tmp_path / "e.toml", tmp_path, 7)


@pytest.mark.parametrize(
    ("values", "sign", "margin", "said"),
    [
        ([-0.0011, -0.0010, -0.0012], -1, 0.1, "not reproduced"),  # the right sign, in the fourth decimal
        ([0.0011, 0.0010, 0.0012], -1, 0.1, "not reproduced"),
        ([-0.80, -0.78, -0.81], -1, 0.1, "reproduced"),
        ([-0.09, -0.11, -0.13], -1, 0.1, "not resolved"),  # -0.16 to -0.06
        ([0.80, 0.78, 0.81], -1, 0.1, "opposite"),
        ([-0.0011, -0.0010, -0.0012], -1, 0.0, "reproduced"),
        ([-0.0011, -0.0010, -0.0012], 1, 0.0, "opposite"),
        ([-0.1, 0.1, 0.2], 1, 0.0, "not resolved"),
        ([-0.8], -1, 0.1, "one seed"),
        ([], -1, 0.1, "not measured"),
    ],
)
def test_a_claim_is_reproduced_only_beyond_its_margin(values: list[float], sign: int, margin: float, said: str) -> None:
    assert verdict(values, sign, margin) == said


def test_a_difference_in_the_fourth_decimal_is_no_sparsity(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(SPEC.replace("[7]", "[0, 1]"))

    def weights(seed: int, arm: str, share: float) -> dict[str, object]:
        of_one = {"l2_norm": 1.0, "share_above": {"1e-05": share}}
        return {"arm": arm, "seed": seed, "weights": {"experts": {"bits": of_one}, "pairs": [{"cosine": 0.1}]}}

    for shares, said in (((0.996, 0.997), "-0.0010 (-0.0010 to -0.0010) | not"), ((0.2, 0.997), "-0.7970 (-0.7970 to")):
        rows = [weights(seed, arm, x) for seed in (0, 1) for arm, x in zip(("rl", "sft"), shares, strict=True)]
        (line,) = [x for x in signs(Records(load_experiment(tmp_path / "e.toml"), rows)) if "1e-5" in x]
        assert "at least 10 points" in line and said in line and line.endswith("reproduced |")


@pytest.mark.parametrize("n", [2, 4, 6])
def test_orders_are_balanced_for_place_and_predecessor(n: int) -> None:
    square = orders(n)
    assert all(sorted(row) == list(range(n)) for row in [*square, *zip(*square, strict=True)])
    after = [pair for row in square for pair in pairwise(row)]
    assert len(set(after)) == n * (n - 1)


def test_equal_gain_is_found_on_the_line_between_two_scales() -> None:
    assert crossing((0.0, 0.5, 1.0), (0.0, 0.2, 0.3), 0.1) == pytest.approx(0.25)
    assert crossing((0.0, 0.5, 1.0), (0.0, 0.2, 0.3), 0.25) == pytest.approx(0.75)
    assert crossing((0.0, 0.5, 1.0), (0.0, 0.2, 0.3), -0.1) == 0.01


def hand_made(seed: int, own: float, merged: float) -> list[dict[str, object]]:
    """Base .2 on both tasks; experts gain ``own`` on their task and lose .1 on the other; the merge scores ``merged``."""

    def row(model: str, a: float, b: float) -> dict[str, object]:
        rest = {"length": 9.0, "truncated": 0.0, "leak": 0.0}
        return {
            "arm": "rl",
            "seed": seed,
            "model": model,
            "tasks": {"count_bits": {"score": a, **rest}, "gcd": {"score": b, **rest}},
        }

    return [
        row("base", 0.2, 0.2),
        row("expert/bits", 0.2 + own, 0.1),
        row("expert/divisors", 0.1, 0.2 + own),
        row("sum_1", merged, merged),
        row("mixed", 0.3, 0.5),
    ]


def test_tables_pool_gains_within_a_seed_and_take_intervals_over_seeds(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(SPEC.replace("[7]", "[0, 1]"))
    spec = load_experiment(tmp_path / "e.toml")
    rows = hand_made(0, 0.4, 0.4) + hand_made(1, 0.2, 0.5)
    r = Records(spec, rows)
    assert r.target(0, "rl") == pytest.approx(0.4) and r.others(0, "rl") == pytest.approx(-0.1)
    assert r.gain_kept(0, "rl", "sum_1") == pytest.approx(0.5) and r.gain_kept(1, "rl", "sum_1") == pytest.approx(1.5)
    assert r.score_kept(1, "rl", "sum_1") == pytest.approx(1.25)
    assert r.worst(0, "rl", "mixed") == pytest.approx(0.1)
    text = tables(spec, rows)
    # two seeds: half width 12.706 * sd / sqrt 2; gains .2 and .3 -> .25 +- .635
    assert "| RL: the sum, lambda 1, is above the base | +0.250 (-0.385 to +0.885) | not resolved |" in text
    assert "| an RL expert raises other domains | -0.100 (-0.100 to -0.100) | opposite |" in text
    assert "| mixed RL rises above the base | +0.200 (+0.200 to +0.200) | reproduced |" in text
