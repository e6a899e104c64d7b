"""The round bench: its arithmetic, its refusal to compare different computations, and a real run where TRL is installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coterie.bench import round as bench
from coterie.cli import app
from coterie.errors import CoterieError, UserError

TRL = Path(".venv-bench/bin/python")


def repetition(update: float, theirs: float) -> dict:
    mine = {"seconds": update, "cpu_s": 1.0, "rollout_s": 1.0, "rollout_cpu_s": 1.0, "tokens": 100, "peak_mb": 50.0}
    other = {"seconds": theirs, "cpu_s": 6.0, "rollout_s": 4.0, "rollout_cpu_s": 5.0, "tokens": 200, "peak_mb": 75.0}
    return {
        "gemm": {"mkl": 100.0, "onednn": 200.0},
        "coterie": {"update": mine, "round": mine | {"seconds": 2.0}, "half": mine | {"seconds": 1.6}},
        "trl": {"update": other, "round": other | {"seconds": 8.0}},
    }


def test_ratios_are_medians_of_ratios_within_a_repetition() -> None:
    # Ratios 2, 10, 3: median 3. The ratio of medians would be 6 / 2 = 3 only by chance; here it is 20 / 2.
    reps = [repetition(10.0, 20.0), repetition(2.0, 20.0), repetition(1.0, 3.0)]
    s = bench.summary({"repetitions": reps, "cost": {"tflop": 0.2}})
    assert s["ratio_update"] == 3.0
    assert s["ratio_rollout"] == 4.0
    assert s["ratio_rollout_per_token"] == 2.0
    assert s["ratio_round"] == 4.0
    assert s["ratio_round_half"] == 5.0
    assert s["ratio_cpu_update"] == 6.0 and s["ratio_cpu_rollout"] == 5.0
    assert s["ratio_peak"] == 1.5
    assert s["update_gflops"] == 100.0  # 200 GFLOP in the median of 10, 2 and 1 seconds
    assert s["update_fraction_of_onednn"] == 0.5


def test_disagreeing_losses_void_the_comparison() -> None:
    same = {"loss": -0.25, "grad_norm": 1.0}
    assert bench.agreement(same, {"loss": -0.250001, "grad_norm": 1.0})["loss_difference"] < 1e-5
    with pytest.raises(CoterieError, match=r"grad_norm is 1\.0 here and 1\.01 in TRL"):
        bench.agreement(same, {"loss": -0.25, "grad_norm": 1.01})
    with pytest.raises(CoterieError, match="loss"):
        bench.agreement(same | {"loss": float("nan")}, same)


def test_unknown_settings_are_named() -> None:
    with pytest.raises(UserError, match="make bench-env"):
        bench.run(trl="/nowhere/python")
    with pytest.raises(UserError, match="unknown case 'huge'"):
        bench.run(cases="huge")
    result = CliRunner().invoke(app, ["bench", "round", "--repeat", "3"])
    assert isinstance(result.exception, UserError) and "known: cases, repeats" in str(result.exception)


@pytest.mark.slow
@pytest.mark.skipif(not TRL.exists(), reason="make bench-env has not been run")
def test_both_trainers_agree_on_tiny(tmp_path: Path) -> None:
    data = bench.run("tiny", repeats=1, folder=str(tmp_path))["tiny"]
    assert data["check"]["loss_difference"] < 1e-5 and data["check"]["grad_norm_difference"] < 1e-4
    assert json.loads((tmp_path / "tiny.json").read_text())["summary"] == data["summary"]
