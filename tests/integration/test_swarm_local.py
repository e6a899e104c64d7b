"""The local exchange with real processes: sharing, kills at random, restarts, throughput."""

from __future__ import annotations

import json
import random
import sqlite3
import time
from pathlib import Path

import pytest
from swarm_processes import Worker, wait_for

from coterie.swarm.exchange import Request
from coterie.swarm.local import LocalExchange, read_nodes


def test_two_processes_share_through_one_file(tmp_path: Path) -> None:
    nodes = [Worker(tmp_path, i, steps=40, pause=0.05, exchange="local") for i in (1, 2)]
    wait_for(lambda: all(n.steps() for n in nodes))
    there = {node: json.loads(info) for node, _, _, info in read_nodes(tmp_path / "swarm.sqlite")}
    assert {line["node"] for n in nodes for line in n.steps()} == set(there)
    assert all(set(info["tasks"]) == {"add"} for info in there.values())
    assert [n.end() for n in nodes] == [0, 0], nodes[0].errors() + nodes[1].errors()
    for n in nodes:
        got = [g for line in n.steps() for g in line["got"]]
        assert len(got) == len(set(got)) >= 10
        assert n.steps()[-1]["mode"] in ("sharing", "degraded")
    assert any(line["mode"] == "sharing" for line in nodes[0].steps())
    assert read_nodes(tmp_path / "swarm.sqlite") == []  # both have left


def _kill_and_restart(tmp_path: Path, nodes: int, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    alive = {i: Worker(tmp_path, i, steps=10_000, pause=0.03, exchange="local") for i in range(nodes)}
    wait_for(lambda: all(len(w.steps()) > 5 for w in alive.values()), 60)
    for _ in range(kills):
        victims = rng.sample(sorted(alive), rng.randint(1, nodes - 1))
        for i in victims:
            alive[i].kill()
        survivors = [i for i in alive if i not in victims]
        before = {i: len(alive[i].steps()) for i in survivors}
        wait_for(lambda s=survivors, b=before: all(len(alive[i].steps()) > b[i] + 2 for i in s), 20)
        for i in victims:
            alive[i] = Worker(tmp_path, i, steps=10_000, pause=0.03, exchange="local")
        counts = {i: len(alive[i].steps()) for i in victims}
        wait_for(lambda v=victims, c=counts: all(len(alive[i].steps()) > c[i] + 2 for i in v), 60)
    for w in alive.values():
        w.kill()
    for w in alive.values():
        assert "Traceback" not in w.errors(), w.errors()
        lines = w.steps()
        # a step whose state was saved but whose line was cut off by the kill may lack; none may be there twice
        got = [g for line in lines for g in line["got"]]
        redone = len(lines) - len({line["step"] for line in lines})
        assert len(got) - len(set(got)) <= 4 * redone  # only a step that is run again may take its groups again
        assert len({line["node"] for line in lines}) == 1  # the identity survives
        assert max(line["s"] for line in lines) < 5.0
        assert any(line["mode"] == "sharing" for line in lines[-20:])
    db = sqlite3.connect(tmp_path / "swarm.sqlite")
    assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()


def test_killed_nodes_come_back_and_survivors_do_not_notice(tmp_path: Path) -> None:
    _kill_and_restart(tmp_path, nodes=3, kills=2, seed=0)


@pytest.mark.slow
def test_fifty_random_kills_of_eight_nodes(tmp_path: Path) -> None:
    _kill_and_restart(tmp_path, nodes=8, kills=50, seed=1)


def test_the_file_is_bounded_and_a_newcomer_starts_at_the_end(tmp_path: Path) -> None:
    a = LocalExchange(tmp_path / "s.sqlite", "a", keep=50)
    a.publish([b"old"] * 10)
    b = LocalExchange(tmp_path / "s.sqlite", "b", keep=50)
    for _ in range(20):
        a.publish([b"new"] * 10)
    got = b.collect(Request(12, 100))
    assert got and set(got) == {("a", b"new")} and len(got) <= 48
    assert b.collect(Request(12, 100)) == [] and a.collect(Request(12, 100)) == []
    rows = sqlite3.connect(tmp_path / "s.sqlite")
    assert rows.execute("SELECT count(*) FROM frames").fetchone()[0] <= 50
    rows.close()
    a.publish([b"x" * 101, b"y"])
    assert b.collect(Request(12, 100)) == [("a", b"y")]
    a.close()
    b.close()


def test_a_flood_leaves_room_in_the_file_for_others(tmp_path: Path) -> None:
    a, loud, b = (LocalExchange(tmp_path / "s.sqlite", n) for n in ("a", "loud", "b"))
    a.publish([b"quiet"] * 8)
    loud.publish([b"loud"] * 1000)
    got = b.collect(Request(12, 100))
    assert len(got) == 48 and got[:8] == [("a", b"quiet")] * 8


def test_a_locked_file_costs_a_bounded_wait_and_loses_nothing(tmp_path: Path) -> None:
    a, b = (LocalExchange(tmp_path / "s.sqlite", n) for n in "ab")
    hog = sqlite3.connect(tmp_path / "s.sqlite", isolation_level=None)
    hog.execute("BEGIN IMMEDIATE")
    start = time.monotonic()
    a.publish([b"waits"])
    assert time.monotonic() - start < 4 and a.status().link == "down" and "locked" in a.status().cause
    hog.execute("ROLLBACK")
    a.publish([])
    assert b.collect(Request(4, 100)) == [("a", b"waits")] and a.status().link == "up"
    for x in (a, b, hog):
        x.close()


def test_garbage_in_the_file_is_not_taken_for_a_message(tmp_path: Path) -> None:
    a = LocalExchange(tmp_path / "s.sqlite", "a")
    db = sqlite3.connect(tmp_path / "s.sqlite")
    db.execute("INSERT INTO frames (node, frame) VALUES ('b', 'text, not bytes'), ('b', NULL or 7)")
    db.commit()
    db.close()
    assert a.collect(Request(4, 100)) == []
    a.close()
