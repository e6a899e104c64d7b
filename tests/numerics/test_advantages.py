"""Hand-derived numbers for every advantage, and the faults seen elsewhere (OB ids)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.advantages import BASELINES, KINDS, expected_informative_share, group_advantages
from coterie.errors import UserError
from coterie.types import Group, Problem, Source, StopReason, Trajectory

NAN = math.nan


def trajectory(reward: float | None, mode: str = "solo", failed: str | None = None) -> Trajectory:
    return Trajectory(
        token_ids=np.array([1, 2], np.int32),
        source=np.array([Source.CONTEXT, Source.POLICY], np.uint8),
        behavior_logprobs=np.zeros(2, np.float32),
        prompt_length=1,
        segments=(),
        stop_reason=StopReason.EOS,
        reward=reward,
        mode=mode,
        failed=failed,
    )


def group(*rewards: float | None, name: str = "g", modes: str = "") -> Group:
    """``modes``: one letter a trajectory, s(olo) or h(elped)."""
    kinds = [{"s": "solo", "h": "helped"}[m] for m in modes or "s" * len(rewards)]
    rows = tuple(trajectory(r, m) for r, m in zip(rewards, kinds, strict=True))
    return Group(name, Problem("p", "t", "q"), "me", 0, "tok", rows)


@pytest.mark.parametrize(
    ("kind", "rewards", "expected"),
    [
        # (1,0,0,0): mean 1/4, squares 9/16 + 3/16 = 3/4, ddof 1: s^2 = 1/4, s = 1/2
        ("mean_std", (1, 0, 0, 0), (1.5, -0.5, -0.5, -0.5)),
        # (2,4,9): mean 5, squares 9 + 1 + 16 = 26, s = sqrt(13)
        ("mean_std", (2, 4, 9), (-3 / 13**0.5, -1 / 13**0.5, 4 / 13**0.5)),
        ("mean", (1, 0, 0, 0), (0.75, -0.25, -0.25, -0.25)),
        ("mean", (2, 4, 9), (-3.0, -1.0, 4.0)),
        # rloo (2,4,9): 2 - 6.5, 4 - 5.5, 9 - 3
        ("rloo", (2, 4, 9), (-4.5, -1.5, 6.0)),
        ("rloo", (1, 0, 0, 0), (1.0, -1 / 3, -1 / 3, -1 / 3)),
        ("batch", (1, 0, 0, 0), (1.5, -0.5, -0.5, -0.5)),
    ],
)
def test_hand_numbers(kind: str, rewards: tuple[float, ...], expected: tuple[float, ...]) -> None:
    assert group_advantages([group(*rewards)], kind)[0] == pytest.approx(expected, abs=1e-5)


def test_batch_kind_uses_one_mean_and_deviation_over_all_groups() -> None:
    """Rewards (1,1),(0,0): mean 1/2, s^2 = 4 (1/4) / 3 = 1/3: +-sqrt(3)/2, although no group has any spread."""
    got = group_advantages([group(1, 1), group(0, 0)], "batch")
    assert got[0] == pytest.approx([math.sqrt(3) / 2] * 2, abs=1e-5)
    assert got[1] == pytest.approx([-math.sqrt(3) / 2] * 2, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_ob02_missing_and_nan_rewards_are_left_out(kind: str) -> None:
    clean = group_advantages([group(1, 0, 1)], kind)[0]
    for bad in (None, NAN, math.inf, -math.inf):
        assert group_advantages([group(1, bad, 0, 1)], kind)[0] == [clean[0], None, clean[1], clean[2]]


def test_failed_is_not_wrong() -> None:
    rows = (trajectory(1.0), trajectory(0.0, failed="scorer died"), trajectory(0.0))
    g = Group("g", Problem("p", "t", "q"), "me", 0, "tok", rows)
    assert group_advantages([g], "mean")[0] == [0.5, None, -0.5]


@pytest.mark.parametrize("kind", KINDS)
def test_ob03_ob04_single_usable_reward_gets_zero(kind: str) -> None:
    assert group_advantages([group(1, NAN, NAN, NAN)], kind)[0] == [0.0, None, None, None]
    assert group_advantages([group(1)], kind) == [[0.0]]
    assert group_advantages([group(None, NAN)], kind) == [[None, None]]
    assert group_advantages([], kind) == []


def test_ob05_leave_one_out_with_deviation_is_refused_and_all_kinds_bounded() -> None:
    with pytest.raises(UserError, match="rloo is never divided"):
        group_advantages([group(1, 0)], "rloo_std")
    with pytest.raises(UserError, match="baseline"):
        group_advantages([group(1, 0)], "mean", "other")
    for kind in KINDS:
        assert max(abs(a) for a in group_advantages([group(1, 0, 0, 0)], kind)[0]) <= 1.5  # type: ignore[arg-type]


def test_ob18_uneven_groups_keep_their_own_baseline() -> None:
    groups = [group(1, 0, 0, 1, name="a"), group(1, 1, 1, name="b"), group(0, 0, 1, 0, name="c")]
    assert group_advantages(groups, "mean") == [[0.5, -0.5, -0.5, 0.5], [0, 0, 0], [-0.25, -0.25, 0.75, -0.25]]
    reverse = group_advantages(groups[::-1], "mean")
    assert reverse[::-1] == group_advantages(groups, "mean")


@pytest.mark.parametrize("kind", ["mean_std", "mean", "rloo"])
def test_ob19_advantages_sum_to_zero_and_follow_permutation(kind: str) -> None:
    rewards = (0.0, 1.0, 1.0, 0.3)
    got = group_advantages([group(*rewards)], kind)[0]
    assert math.fsum(got) == pytest.approx(0, abs=1e-12)  # type: ignore[arg-type]
    assert group_advantages([group(*rewards[::-1])], kind)[0] == pytest.approx(got[::-1])


def test_ob20_mean_kind_never_divides_by_a_deviation() -> None:
    small = group_advantages([group(0.01, 0.0, 0.0, 0.01), group(100, 0)], "mean")
    assert small == [pytest.approx([0.005, -0.005, -0.005, 0.005]), [50, -50]]


@pytest.mark.parametrize("value", [0.1, 0.3, 1 / 3, 1e9])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_rewards_give_exactly_zero(kind: str, value: float) -> None:
    assert group_advantages([group(*[value] * 7)], kind)[0] == [0.0] * 7


def test_baselines_of_mixed_groups_by_hand() -> None:
    """Solo rewards (0, 1), helped (1, 1): means 1/2 solo, 1 helped, 3/4 shared."""
    g = [group(0, 1, 1, 1, modes="sshh")]
    assert group_advantages(g, "mean", "own_mode")[0] == [-0.5, 0.5, 0, 0]
    assert group_advantages(g, "mean", "solo_mean")[0] == [-0.5, 0.5, 0.5, 0.5]
    assert group_advantages(g, "mean", "shared")[0] == [-0.75, 0.25, 0.25, 0.25]
    # helped rows are not members of the solo pool: plain difference; solo rows leave themselves out
    assert group_advantages(g, "rloo", "solo_mean")[0] == [-1.0, 1.0, 0.5, 0.5]
    # deviation of the whole pool: squares 9/16 + 3/16 = 3/4 over 3: s = 1/2
    assert group_advantages(g, "mean_std", "solo_mean")[0] == pytest.approx([-1.0, 1.0, 1.0, 1.0], abs=1e-5)
    # own mode: solo deviation sqrt(1/2); helped: no spread, so nothing
    assert group_advantages(g, "mean_std", "own_mode")[0] == pytest.approx([-(0.5**0.5), 0.5**0.5, 0, 0], abs=1e-5)


def test_all_solo_wrong_stays_bounded_under_the_solo_mean() -> None:
    """Solo (0,0), helped (1,1): the solo deviation is 0; the pool's is sqrt(1/3)."""
    got = group_advantages([group(0, 0, 1, 1, modes="sshh")], "mean_std", "solo_mean")[0]
    assert got == pytest.approx([0, 0, 3**0.5, 3**0.5], abs=1e-5)
    assert group_advantages([group(1, 0, modes="hh")], "mean", "solo_mean")[0] == [0, 0]  # nothing to compare with


def test_ob24_expected_share_of_informative_groups() -> None:
    """p = 0.18, G = 2: 2 p (1-p) = 0.2952. So about 70% of groups of two carry no signal."""
    assert expected_informative_share(0.18, 2) == pytest.approx(0.2952)
    assert expected_informative_share(0.5, 3) == pytest.approx(0.75)
    assert expected_informative_share(0.0, 8) == expected_informative_share(1.0, 8) == 0.0
    with pytest.raises(ValueError, match="group_size"):
        expected_informative_share(0.5, 0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(
            st.tuples(st.one_of(st.none(), st.floats(-1e6, 1e6), st.just(NAN)), st.sampled_from(["s", "h"])),
            max_size=6,
        ),
        max_size=4,
    ),
    st.sampled_from(KINDS),
    st.sampled_from(BASELINES),
)
def test_always_finite_and_aligned(data: list[list[tuple[float | None, str]]], kind: str, baseline: str) -> None:
    groups = [group(*[r for r, _ in rows], modes="".join(m for _, m in rows)) for rows in data]
    got = group_advantages(groups, kind, baseline)
    assert [len(a) for a in got] == [len(rows) for rows in data]
    for rows, advantages in zip(data, got, strict=True):
        for (reward, _), a in zip(rows, advantages, strict=True):
            usable = reward is not None and math.isfinite(reward)
            assert (a is not None and math.isfinite(a)) if usable else a is None
