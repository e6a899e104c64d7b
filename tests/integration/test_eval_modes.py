"""coterie eval in several modes: one table each, and how far each is from plain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coterie.cli import app
from coterie.errors import UserError
from coterie.evalcmd import EvalRequest, gap
from coterie.evaluation import Evaluation, TaskResult


def run(folder: Path, mode: str, *more: str) -> str:
    (folder / "own.py").write_text("def reply(request):\n    return '6'\n")
    config = folder / "helpers.toml"
    config.write_text(
        '[helpers]\nform = "short"\nfeedback_tokens = 4\n[helpers.roles.knowledge]\n'
        f'backend = "scripted"\ncall = "{folder}/own.py:reply"\n'
    )
    args = ["eval", "tiny", "--tasks", "gcd", "--problems", "3", "--samples", "2", "--config", str(config)]
    done = CliRunner().invoke(app, [*args, "--mode", mode, *more], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_several_modes_print_their_gap_to_plain(tmp_path: Path) -> None:
    text = run(tmp_path, "tagged,plain")
    assert text.index("mode plain") < text.index("mode tagged") < text.index("gap of tagged to plain, mean pass@1:")
    found = json.loads(run(tmp_path, "tagged,plain", "--json"))
    more = found["other_modes"]["tagged"]["accuracy"] - found["accuracy"]
    assert found["settings"]["mode"] == "plain" and found["gaps"]["tagged"]["mean"] == pytest.approx(more)


def result(**correct: tuple[int, ...]) -> Evaluation:
    return Evaluation({n: TaskResult(n, c, (4,) * len(c), 1.0, 0.0) for n, c in correct.items()}, {}, 0.0)


def test_a_gap_pairs_problems() -> None:
    plain, helped = result(a=(0, 2, 4), b=(1, 1)), result(a=(1, 3, 4), b=(1, 0))
    got = gap(helped, plain)
    assert got["tasks"]["a"]["gap"] == pytest.approx((0.25 + 0.25 + 0) / 3)
    assert got["tasks"]["b"]["gap"] == pytest.approx(-0.125) and got["mean"] == pytest.approx((0.5 / 3 - 0.125) / 2)
    low, high = got["tasks"]["a"]["interval95"]
    assert low == pytest.approx(0.0) and high == pytest.approx(0.25)  # of differences, not of two rates
    helped.tasks["b"] = TaskResult("b", (0, 0), (0, 0), 1.0, 0.0)
    assert gap(helped, plain)["mean"] is None


@pytest.mark.parametrize("mode", ["both", "plain,plain", "plain,", ""])
def test_modes_that_are_none_are_refused(mode: str) -> None:
    asked: dict[str, Any] = {"ks": [1], "problems": 1, "samples": 1, "temperature": 1.0, "max_new_tokens": 1, "seed": 0}
    with pytest.raises(UserError, match="--mode"):
        EvalRequest("tiny", "gcd", mode=mode, **asked)
