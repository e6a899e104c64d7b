"""Own answers as the measure of others': figures by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import swarm_kit as kit

from coterie.swarm.yardstick import Yardstick, better
from coterie.types import Group, Source, StopReason, Trajectory


def answer(length: int, logprob: float = -0.1, reward: float = 1.0, **changes: object) -> Trajectory:
    """``length`` tokens with the end, all of one log-prob."""
    t = kit.trajectory(kit.problem(1), "7" * (length - 1), reward=reward)
    known = np.where(t.source == int(Source.POLICY), np.float32(logprob), np.float32(np.nan))
    return replace(t, behavior_logprobs=known.astype(np.float32), **changes)


def group(*rows: Trajectory) -> Group:
    return replace(kit.group(kit.person(1), 1), trajectories=rows)


def test_lengths_are_measured_against_own_finished_answers_to_the_same_task() -> None:
    y = Yardstick(longer=1.5, less_likely=0)
    y.note([group(*(answer(10) for _ in range(15)))])
    assert y.longest("add") == np.inf  # too few to compare with
    y.note([group(answer(10), *(answer(60, stop_reason=StopReason.LENGTH) for _ in range(9)))])
    assert y.longest("add") == 15 and y.longest("another") == np.inf
    assert not y.too_long(group(answer(15), answer(5, reward=0.0)))
    assert y.too_long(group(answer(16), answer(5, reward=0.0)))
    assert not y.too_long(group(answer(15), answer(60, reward=0.0)))  # a wrong one is no example
    helped = answer(30)
    source = helped.source.copy()
    source[helped.prompt_length : helped.prompt_length + 20] = int(Source.HELPER)
    assert not y.too_long(group(replace(helped, source=source), answer(5, reward=0.0)))
    assert Yardstick(0, 0).longest("add") == np.inf


def test_likelihood_is_measured_against_own_least_likely_stretches() -> None:
    y = Yardstick(longer=0, less_likely=2)
    rows = [np.full(40, -0.1, np.float32), np.full(40, -0.1, np.float32)]
    rows[1][20:36] = -3.1
    assert y.least_likely() == -np.inf and not y.implausible(rows)
    y.note([group(*(answer(30, -0.5) for _ in range(16)))])
    assert y.least_likely() == -2.0  # twice -0.5 would forbid what is merely not certain
    assert y.implausible(rows) and not y.implausible(rows[:1])
    y.note([group(*(answer(30, -1.6) for _ in range(40)))])
    assert np.isclose(y.least_likely(), -3.2) and not y.implausible(rows)
    assert y.implausible([np.full(3, -4, np.float32)])  # short ones as a whole
    again = Yardstick(longer=0, less_likely=2)
    again.load(json.loads(json.dumps(y.state())))
    assert again.least_likely() == y.least_likely()


def test_better_than_the_mean() -> None:
    rows = [answer(3, reward=r) for r in (0.0, 0.5, 1.0)]
    assert better(group(*rows)) == [rows[2]]
    assert better(group(rows[0], rows[0])) == []
