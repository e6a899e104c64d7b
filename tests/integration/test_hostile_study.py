"""The hostile node against real trainers: what it sends arrives, is refused and named, and leaves no trace in the weights."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from hostile_study import ARMS, SEVERAL, run_arm, table

pytestmark = pytest.mark.slow
STEPS = 4
ENDS = {
    "refusable": "problem",
    "replay": "carried",
    "wrong_answers": "copy",
    "code": "copy",
    "over_long": "longer",
    "injected": "implausible",
    "bare": "implausible",
}


@functools.cache
def absent(arm: str) -> dict[str, Any]:
    return run_arm(arm, seed=0, steps=STEPS, problems=1)


@pytest.mark.parametrize("arm", ["content", *SEVERAL["content"]])
def test_nothing_is_used_and_the_weights_are_those_of_a_swarm_without_the_attack(
    arm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    r = run_arm(arm, seed=0, steps=STEPS, problems=1)
    assert r["hostile_sent"] > 0 and not r["code_ran"] and sum(r["hostile_used"]) == 0
    assert r["weights"] == absent("absent")["weights"] and r["peer_groups_used"] == absent("absent")["peer_groups_used"]
    assert all(n > 0 for n in r["peer_groups_used"])  # the honest ones go on sharing
    assert arm not in ENDS or r["refused"][ENDS[arm]] > 0
    assert r["honest_named"] == 0
    if arm in ("refusable", "flood", "replay"):  # others need more steps until four of them were read
        assert all(r["named"])
    assert arm in table([r])


@pytest.mark.parametrize("arm", SEVERAL["form"])
def test_bad_form_is_dropped(arm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by construction: what is nearly as short and as likely as own answers passes."""
    monkeypatch.chdir(tmp_path)
    r = run_arm(arm, seed=0, steps=STEPS, problems=1)
    assert sum(r["hostile_used"]) <= 0.1 * sum(r["peer_groups_used"]) and r["honest_named"] == 0
    assert arm not in ENDS or r["refused"][ENDS[arm]] > 0


@pytest.mark.parametrize("arm", [a for a, (attack, on) in ARMS.items() if attack and not on])
def test_without_the_defences_the_same_attacks_are_learned_from(
    arm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test above can fail."""
    monkeypatch.chdir(tmp_path)
    r = run_arm(arm, seed=0, steps=STEPS, problems=1)
    assert sum(r["hostile_used"]) > 0 and r["weights"] != absent("absent-off")["weights"]
