"""The hostile node against real trainers, two steps each: what it sends arrives, and ends where it should."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from hostile_study import ARMS, run_arm, table

pytestmark = pytest.mark.slow
USED = {"wrong_answers", "code", "over_long", "injected", "bare"}  # right/wrong cannot tell these from honest groups
ENDS = {"refusable": "problem", "replay": "copy", "over_long+defence": "too_long", "injected+defence": "implausible"}


@pytest.mark.parametrize("arm", [a for a, (attack, _) in ARMS.items() if attack])
def test_an_attack_ends_where_it_should(arm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    r = run_arm(arm, seed=0, steps=3, problems=1)
    assert r["hostile_sent"] > 0 and not r["code_ran"]
    if arm != "replay":  # a copy that comes first is taken, once, and the original then is the copy
        assert (sum(r["hostile_used"]) > 0) == (arm in USED)
    assert all(n > 0 for n in r["peer_groups_used"])  # the honest ones go on sharing
    assert arm not in ENDS or r["faults"][ENDS[arm]] > 0
    if arm in ("refusable", "flood"):  # others need more steps for four faults
        assert r["named"] == 3
    assert arm in table([r])
