"""Selection is a pure function of the set of groups, the seed and the limits."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import swarm_kit as kit
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.swarm.selection import (
    Quotas,
    equal_share,
    fresh,
    select,
    worst_stretch,
)
from coterie.swarm.verify import answer_digests
from coterie.types import Group

_BASE = [kit.group(kit.person(a), i) for a in range(1, 5) for i in range(6)]


def scored(g: Group, rewards: list[float | None], task: str) -> Group:
    t = g.trajectories[0]
    problem = replace(g.problem, task=task)
    return replace(g, problem=problem, trajectories=tuple(replace(t, reward=r) for r in rewards))


groups = st.lists(
    st.tuples(
        st.integers(0, len(_BASE) - 1),
        st.lists(st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=4),
        st.sampled_from(["a", "b"]),
    ),
    max_size=20,
    unique_by=lambda x: x[0],
).map(lambda rows: [scored(_BASE[i], r, t) for i, r, t in rows])
strategies = st.sampled_from(["uniform", "informative", "variance"])


@settings(max_examples=150, deadline=None)
@given(groups, st.integers(0, 6), strategies, st.integers(0, 9), st.integers(0, 3), st.integers(0, 3))
def test_selection_keeps_every_promise(pool, count, strategy, seed, per_author, per_task) -> None:
    quotas = Quotas(per_author, per_task)
    chosen = select(pool, count, strategy, seed, quotas)
    ids = [g.id for g in chosen]
    assert len(ids) == len(set(ids)) <= count and set(ids) <= {g.id for g in pool}
    if strategy != "uniform":
        assert all(g.informative for g in chosen)
    if per_author:
        assert max(Counter(g.author for g in chosen).values(), default=0) <= per_author
    if per_task:
        assert max(Counter(g.problem.task for g in chosen).values(), default=0) <= per_task
    mixed = pool[:]
    random.Random(seed + 1).shuffle(mixed)
    assert [g.id for g in select(mixed, count, strategy, seed, quotas)] == ids  # order of arrival is irrelevant
    if not per_author and not per_task:
        usable = [g for g in pool if strategy == "uniform" or g.informative]
        assert len(chosen) == min(count, len(usable))
    if strategy == "variance" and not per_author and not per_task and chosen:
        rest = [float(np.var(g.valid_rewards)) for g in pool if g.informative and g.id not in ids]
        assert min(float(np.var(g.valid_rewards)) for g in chosen) >= max(rest, default=0.0)


def test_uniform_is_uniform() -> None:
    pool = _BASE[:6]
    counts = Counter(g.id for seed in range(1200) for g in select(pool, 2, "uniform", seed))
    assert len(counts) == 6 and all(340 <= n <= 460 for n in counts.values())  # 400 +- 3.7 sd


def test_beyond_its_share_an_author_only_fills_what_others_leave() -> None:
    assert [equal_share(4, n) for n in (0, 1, 2, 3, 8)] == [4, 4, 2, 2, 1]
    many, few = _BASE[:6], _BASE[6:7]
    for seed in range(20):
        chosen = select([*many, *few], 4, "uniform", seed, Quotas(author=4, share=2))
        assert Counter(g.author for g in chosen) == {many[0].author: 3, few[0].author: 1}
        assert len(select(many, 4, "uniform", seed, Quotas(author=3, share=2))) == 3


def test_sw12_age_is_counted_in_the_authors_own_versions() -> None:
    g = replace(_BASE[0], policy_version=10)
    assert fresh([g], {g.author: 15}, 5) == [g]
    assert fresh([g], {g.author: 16}, 5) == []
    assert fresh([g], {}, 5) == []


def test_what_one_author_adds_never_moves_the_others() -> None:
    """A group's place in line is its own: others' groups are chosen as if the useless ones were not there."""
    pool, dull = _BASE[:12], [scored(g, [0.0, 0.0], "a") for g in _BASE[12:]]
    pool = [scored(g, [0.0, 1.0], "a") for g in pool]
    for seed in range(20):
        alone = select(pool, 4, "informative", seed, Quotas(author=2))
        assert select([*dull, *pool], 4, "informative", seed, Quotas(author=2)) == alone


def test_answers_are_the_same_under_new_ids_order_and_signatures() -> None:
    g = _BASE[0]
    copy = replace(g, id="another", author="thief", trajectories=g.trajectories[::-1])
    assert answer_digests(g) == answer_digests(copy)[::-1] and len(set(answer_digests(g))) == 2
    assert not set(answer_digests(g)) & set(answer_digests(replace(g, problem=kit.problem(99))))


def test_worst_stretch() -> None:
    natural = np.full(200, -0.3, np.float32)
    injected = natural.copy()
    injected[100:116] = -9.0
    assert injected.mean() > -1.1
    assert worst_stretch(injected, 16) < -8.9 and np.isclose(worst_stretch(natural, 16), -0.3)
    assert worst_stretch(np.array([-1.0, -3.0], np.float32), 16) == -2.0
    assert worst_stretch(np.zeros(0, np.float32), 16) == 0.0
