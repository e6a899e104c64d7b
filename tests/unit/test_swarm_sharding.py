"""A node hears what it asks for, whatever the size of the swarm."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.swarm.exchange import Request
from coterie.swarm.memory import MemoryHub
from coterie.swarm.sharding import BASE, LEVELS, Inbox, Listener, covers, fair_sample, key_of, plan, random_leaf, redraw


@given(st.floats(4 / BASE**LEVELS, 1.0))
def test_a_plan_covers_the_fraction_within_a_seventh(fraction: float) -> None:
    depth, count = plan(fraction)
    assert abs(count / BASE**depth - fraction) <= fraction / 7 + 1e-12
    assert 1 <= count <= 63


@given(st.floats(0.0005, 1.0), st.integers(0, 5))
def test_subtrees_are_disjoint_and_complete(fraction: float, seed: int) -> None:
    rng = random.Random(seed)
    chosen = redraw(set(), fraction, rng)
    depth, count = plan(fraction)
    assert len(chosen) == count and {len(p) for p in chosen} == {depth}
    again = redraw(chosen, fraction, rng)
    assert len(again & chosen) >= count - 1 and len(again) == count


def test_keys() -> None:
    assert key_of("a3") == "a/3/*/*" and key_of("") == "*/*/*/*"
    assert covers({"a3"}, "a/3/0/f") and not covers({"a3"}, "a/4/0/f") and covers({""}, "0/0/0/0")
    assert len(random_leaf(random.Random(0)).split("/")) == LEVELS


@pytest.mark.parametrize("nodes", [2, 8, 64, 512])
def test_what_arrives_does_not_grow_with_the_swarm(nodes: int) -> None:
    """512 nodes publish 4 messages a step each; one listener wants 12 a step."""
    rng = random.Random(nodes)
    listener = Listener(rng)
    listener.start(nodes, 4, 12)
    total, steps = 0, 40
    for step in range(steps + 10):
        heard = sum(covers(listener.prefixes, random_leaf(rng)) for _ in range(4 * (nodes - 1)))
        total += heard if step >= 10 else 0
        listener.update(heard, 12)
    mean = total / steps
    assert mean == 4 if nodes == 2 else 9 <= mean <= 15


def test_a_wrong_first_guess_is_corrected() -> None:
    rng = random.Random(0)
    listener = Listener(rng)
    listener.start(2, 4, 12)  # believes in 2 nodes; there are 200
    for _ in range(30):
        listener.update(sum(covers(listener.prefixes, random_leaf(rng)) for _ in range(800)), 12)
    assert 0.5 * 12 / 800 < listener.fraction < 2 * 12 / 800


def test_a_flood_does_not_make_a_node_deaf() -> None:
    rng = random.Random(0)
    listener = Listener(rng)
    heard = 0
    for step in range(60):
        honest = sum(covers(listener.prefixes, random_leaf(rng)) for _ in range(12))
        flood = sum(covers(listener.prefixes, random_leaf(rng)) for _ in range(300))
        heard += honest if step >= 20 else 0
        listener.update(honest + flood, 12, useful=honest)
    assert heard / 40 > 9  # of 12
    for _ in range(60):  # a flood 1000 times the honest traffic is not taken whole
        flood = sum(covers(listener.prefixes, random_leaf(rng)) for _ in range(12_000))
        listener.update(flood, 12, useful=0)
    assert flood < 1.5 * 32 * 12


def test_an_inbox_is_full_at_the_cost_of_who_fills_it() -> None:
    box = Inbox(10)
    for i in range(3):
        box.put("quiet", b"q%d" % i)
        for k in range(50):
            box.put("loud", b"x%d" % (50 * i + k))
    rows = box.take()
    assert [f for s, f in rows if s == "quiet"] == [b"q0", b"q1", b"q2"] and len(rows) == 10 and box.lost == 143
    assert [f for s, f in rows if s == "loud"] == [b"x%d" % i for i in range(143, 150)]  # the newest, in order
    assert box.take() == []


def test_memory_hub_delivers_to_others_only_and_drops_the_oldest() -> None:
    hub = MemoryHub(capacity=3)
    a, b = hub.join(), hub.join()
    a.publish([bytes([i]) for i in range(5)])
    assert a.collect(Request(12, 100)) == []
    assert b.collect(Request(12, 100)) == [("#0", b"\x02"), ("#0", b"\x03"), ("#0", b"\x04")]
    assert b.metrics()["swarm/dropped_oldest"] == 2 and b.status().nodes == 2
    a.close()
    assert b.status().nodes == 1


def test_a_fair_sample_gives_each_sender_its_turn_and_keeps_the_order() -> None:
    frames = [("loud", b"l%d" % i) for i in range(500)] + [("a", b"a1"), ("a", b"a2"), ("b", b"b1")]
    for seed in range(20):
        got = fair_sample(frames, 10, random.Random(seed))
        assert len(set(got)) == 10 and set(frames[-3:]) <= set(got)
        assert got == sorted(got, key=frames.index)
    assert fair_sample(frames[:5], 10, random.Random(0)) == frames[:5]
    assert len({tuple(fair_sample(frames, 10, random.Random(s))) for s in range(20)}) > 1  # at random


def test_last_in_line_is_not_first_served() -> None:
    """Whoever sends much just before a node collects does not push out what came before."""
    hub = MemoryHub(capacity=100)
    quiet, loud, reader = hub.join(), hub.join(), hub.join()
    quiet.publish([b"q%d" % i for i in range(4)])
    loud.publish([b"x%d" % i for i in range(500)])
    got = [frame for _, frame in reader.collect(Request(12, 1000))]
    assert len(got) == 48 and {b"q%d" % i for i in range(4)} <= set(got)
