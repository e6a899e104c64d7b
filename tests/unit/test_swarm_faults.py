"""Faults that other swarms have had, one test each, under the ids by which the project knows them."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import swarm_kit as kit

from coterie.swarm.contribute import read_lines
from coterie.swarm.memory import MemoryHub
from coterie.swarm.node import SwarmNode
from coterie.swarm.wire import WireError, read, sign_body


def publish(node: SwarmNode, indices: range, version: int = 0) -> None:
    node.publish([kit.group(node.identity, i, version=version) for i in indices])


def test_sw02_a_group_is_one_message_and_used_whole_or_not_at_all() -> None:
    """Answers and what belongs to them cannot arrive apart: any part that is missing refuses the whole."""
    hub = MemoryHub()
    b, wire = kit.node(hub, 2), hub.join()
    whole = kit.message(kit.person(1), 1)
    t = whole.body.trajectories[0]
    for changes in ({"ids": b""}, {"logprobs": b""}, {"ids": t.ids[:-2]}):
        part = msgspec.structs.replace(t, **changes)
        body = msgspec.structs.replace(whole.body, trajectories=[part, *whole.body.trajectories[1:]])
        frame = sign_body(body, kit.person(1), "swarm").frame
        with pytest.raises(WireError):
            kit.rebuilder().group(read(frame, "swarm", kit.LIMITS))
        wire.publish([frame])
    wire.publish([whole.frame[: len(whole.frame) // 2]])
    assert b.collect(0) == [] and len(b.pool) == 0


def test_sw03_a_message_in_three_pieces_is_read_once_it_is_whole(tmp_path: Path) -> None:
    inbox = tmp_path / "inbox.jsonl"
    inbox.write_bytes(b"")
    lines = read_lines(inbox, follow=True, poll_s=0.01)

    def write_slowly() -> None:
        for piece in (b'{"problem": "add:3",', b' "answers": ["7"', b"]}\n"):
            with open(inbox, "ab") as f:
                f.write(piece)
            time.sleep(0.05)

    writer = threading.Thread(target=write_slowly)
    writer.start()
    assert next(line for line in lines if line) == (1, b'{"problem": "add:3", "answers": ["7"]}\n')
    writer.join()


def test_sw04_sw07_fast_and_slow_nodes_use_each_other() -> None:
    """There is no round to miss: one node takes ten steps for each of the other's, and starts 1000 versions ahead."""
    hub = MemoryHub()
    fast, slow = kit.node(hub, 1), kit.node(hub, 2)
    used = {fast.author: 0, slow.author: 0}
    for step in range(100):
        publish(fast, range(10 * step, 10 * step + 2), version=1000 + step)
        used[fast.author] += len(fast.collect(step))
        if step % 10 == 9:
            publish(slow, range(10_000 + step, 10_000 + step + 4), version=step // 10)
            got = slow.collect(step // 10)
            used[slow.author] += len(got)
            assert all(slow.ledger.age(g) <= slow.cfg.max_age for g in got)
    assert (
        used[fast.author] >= 36 and used[slow.author] == 40
    )  # all that the slow one wrote until the last step; 4 a step


def test_sw06_a_newcomer_needs_nothing_from_anybody_and_shares_at_once() -> None:
    hub = MemoryHub()
    old = kit.node(hub, 1)
    for step in range(50):
        publish(old, range(4 * step, 4 * step + 4), version=step)
        old.collect(step)
    new = kit.node(hub, 2)
    publish(new, range(1000, 1004))
    publish(old, range(2000, 2004), version=50)
    assert len(new.collect(0)) == 4 and len(old.collect(51)) == 4


def test_sw08_nobody_is_waited_for_and_late_groups_count_once() -> None:
    """Three fast nodes and a slow one: steps take no longer, and what comes late is used in a later step."""
    hub = MemoryHub()
    fast, slow, me = [kit.node(hub, i) for i in (1, 2, 3)], kit.node(hub, 4), kit.node(hub, 5, peer_groups=8)
    for step, n in enumerate([6, 6, 8]):
        for k, node in enumerate(fast):
            publish(node, range(1000 * k + 10 * step, 1000 * k + 10 * step + 2), version=step)
        if step == 2:
            publish(slow, range(9000, 9002))
        start = time.monotonic()
        got = me.collect(step)
        assert len(got) == n and time.monotonic() - start < 1.0
        assert sum(g.author == slow.author for g in got) == (2 if step == 2 else 0)
    assert me.collect(3) == []


def test_sw10_numbers_that_are_none_are_refused_and_their_sender_named() -> None:
    hub = MemoryHub()
    a, b, evil = kit.node(hub, 1), kit.node(hub, 2), kit.person(66)
    wire = hub.join()
    for i, bad in enumerate([np.nan, np.inf, -np.inf, 1e9]):
        body = kit.message(evil, i, seq=i).body
        t = body.trajectories[0]
        row = msgspec.structs.replace(t, logprobs=np.full(len(t.ids) // 2, bad, "<f4").tobytes())
        wire.publish([sign_body(msgspec.structs.replace(body, trajectories=[row]), evil, "swarm").frame])
    publish(a, range(100, 104))
    got = b.collect(0)
    assert len(got) == 4 and all(
        np.isfinite(t.behavior_logprobs[t.prompt_length :]).all() for g in got for t in g.trajectories
    )
    assert b.metrics()["swarm/refused/number"] == 4 and any(evil.name in e and "quarantine" in e for e in b.events)


def test_sw14_a_run_shorter_than_any_lag_ends() -> None:
    """One step, with groups allowed to be older than the run is long, among peers that never answer."""
    hub = MemoryHub()
    a, _ = kit.node(hub, 1, max_age=8, ttl=4), kit.node(hub, 2)
    publish(a, range(4))
    assert a.collect(0) == []
    a.close()
    assert a.summary().startswith("swarm: ")
