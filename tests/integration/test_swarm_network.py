"""The network exchange with real relays and processes on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import swarm_kit as kit
from swarm_processes import Worker, free_port, wait_for

from coterie.config import SwarmConfig
from coterie.errors import CoterieError, UserError
from coterie.swarm.access import Access
from coterie.swarm.contribute import contribute
from coterie.swarm.exchange import Request
from coterie.swarm.network import NetworkExchange, read_swarm
from coterie.swarm.node import SwarmNode
from coterie.swarm.relay import DEFAULT_LISTEN, Relay
from coterie.swarm.zenoh_config import Security

ASK = Request(12, 262_144, 3.0)
SERVE = "from coterie.swarm.relay import *; serve(Relay(('tcp/127.0.0.1:{}',)), print)"


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def relay(port: int) -> Iterator[Relay]:
    with Relay((f"tcp/127.0.0.1:{port}",)) as r:
        yield r


def exchange(port: int, number: int, **settings: object) -> NetworkExchange:
    return NetworkExchange("swarm", kit.person(number), (f"tcp/127.0.0.1:{port}",), **settings)  # type: ignore[arg-type]


def start_relay(port: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", SERVE.format(port)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline().startswith(b"relay:")
    return process


def stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def own_listeners() -> set[tuple[str, str]]:
    """(address, port) in hexadecimal of every TCP socket on which this process listens, by the kernel's tables."""
    mine = set()
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            mine.add(os.readlink(fd))
    found = set()
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            part = row.split()
            if part[3] == "0A" and f"socket:[{part[9]}]" in mine:
                address, port = part[1].split(":")
                found.add((address, port))
    return found


def test_no_port_is_opened_beyond_loopback_unless_asked(port: int) -> None:
    assert DEFAULT_LISTEN.startswith("tcp/127.0.0.1:")
    before = own_listeners()
    with Relay((f"tcp/127.0.0.1:{port}",)):
        relay = own_listeners() - before
        assert relay == {("0100007F", f"{port:04X}")}  # 127.0.0.1, as the kernel writes it
        a = exchange(port, 1)
        assert a.status().link == "up" and own_listeners() - before == relay
        a.close()


def test_two_nodes_meet_at_a_relay_and_bursts_pass_its_rate_limit(relay: Relay, port: int) -> None:
    a, b = exchange(port, 1), exchange(port, 2)
    assert b.collect(Request(12, 262_144)) == [] and a.collect(Request(12, 262_144)) == []
    a.publish([bytes([i]) * 1000 for i in range(12)])
    got: list[bytes] = []
    wait_for(lambda: got.extend(f for _, f in b.collect(Request(12, 262_144))) or len(got) == 12, 5)
    assert sorted(g[0] for g in got) == list(range(12))
    assert a.collect(Request(12, 262_144)) == []  # own messages do not come back
    assert b.status().nodes == 2 and b.status().link == "up"
    a.close()
    b.close()


def test_a_flood_displaces_only_itself(relay: Relay, port: int) -> None:
    """600 messages of one sender beside 8 of another, within one step: all 8 are there."""
    a, loud, b = exchange(port, 1), exchange(port, 3, pace=190.0), exchange(port, 2)
    ask = Request(12, 5000)
    b.collect(ask)
    time.sleep(0.3)
    a.publish([b"quiet %d" % i for i in range(8)])
    for k in range(3):
        loud.publish([b"loud %d" % i for i in range(200 * k, 200 * k + 200)])
        time.sleep(1.1)
    got = b.collect(ask)
    assert len(got) == 48 and sum(sender == kit.person(1).node_id for sender, _ in got) == 8
    assert b.metrics()["swarm/dropped_oldest"] > 100
    for e in (a, b, loud):
        e.close()


@pytest.mark.parametrize(("cap", "heard"), [(5000, 2), (1 << 20, 2)], ids=["at the node", "at the relay"])
def test_messages_over_the_cap_are_dropped(relay: Relay, port: int, cap: int, heard: int) -> None:
    """The node reads nothing above its own cap; whatever that is, the relay passes nothing above 256 KiB on."""
    a, b = exchange(port, 1), exchange(port, 2)
    b.collect(Request(12, cap))
    a.publish([b"x" * 300_000, b"x" * 6000, b"ok"])
    got: list[bytes] = []
    wait_for(lambda: got.extend(f for _, f in b.collect(Request(12, cap))) or b"ok" in got, 5)
    assert sorted(map(len, got)) == ([2] if cap == 5000 else [2, 6000])
    assert b.metrics()["swarm/messages_received"] == heard
    a.close()
    b.close()


def test_a_sender_above_the_relays_rate_loses_what_is_too_much(port: int) -> None:
    with Relay((f"tcp/127.0.0.1:{port}",), rate=20.0):
        a, b = exchange(port, 1, pace=0), exchange(port, 2)
        b.collect(Request(400, 5000))
        start = time.monotonic()
        while time.monotonic() - start < 2.0:
            a.publish([b"x"])
            time.sleep(0.005)
        time.sleep(0.5)
        b.collect(Request(400, 5000))
        assert 5 <= b.metrics()["swarm/messages_received"] <= 80  # of some 300 sent
        a.close()
        b.close()


def test_an_inbox_waits_for_a_relay_and_loses_nothing(tmp_path: Path, port: int) -> None:
    """More lines than the outbox holds (256), given before there is a relay."""
    inbox = tmp_path / "inbox.jsonl"
    inbox.write_text('{"problem": "add:3", "answers": ["7", "8"]}\n' * 300)
    me, said, sent = exchange(port, 1, wait_s=0.1, pace=1000.0), list[str](), list[int]()
    args = (inbox, me, kit.person(1), Access("swarm"), "swarm", kit.problem_of)
    work = threading.Thread(target=lambda: sent.append(contribute(*args, say=said.append)))
    work.start()
    wait_for(lambda: bool(said), 5)
    assert said == [f"waiting: no relay answers at tcp/127.0.0.1:{port}"] or said[0].startswith("waiting: no relay")
    with Relay((f"tcp/127.0.0.1:{port}",), rate=0):
        b = exchange(port, 2)
        b.collect(Request(400, 5000))
        wait_for(lambda: bool(sent), 30)
        assert sent == [300] and me.metrics()["swarm/unsent"] == 0 and me.pending() == 0
        b.close()
        me.close()


def test_an_outbox_that_overflows_says_so(relay: Relay, port: int) -> None:
    a = exchange(port, 1)
    a.publish([b"x"] * 400)
    assert 100 <= a.metrics()["swarm/unsent"] <= 144
    a.close()


def test_a_lone_node_that_asks_for_nothing_is_alone(relay: Relay, port: int) -> None:
    cfg = SwarmConfig(exchange="network", peer_groups=0)
    node = SwarmNode(cfg, kit.person(1), exchange(port, 1), kit.rebuilder(), kit.score)
    node.collect(0)
    assert node.state.mode == "solo" and node.state.cause == "no other node is in the swarm"
    node.close()


def test_sw05_the_same_identity_twice_is_refused(relay: Relay, port: int) -> None:
    a = exchange(port, 1)
    with pytest.raises(UserError, match=f"{kit.person(1).name} is already in use in swarm"):
        exchange(port, 1)
    a.close()
    exchange(port, 1).close()  # gone at once


def test_sw01_no_relay_is_a_state_and_a_late_relay_is_found(port: int) -> None:
    a = exchange(port, 1, wait_s=0.3)
    assert a.status().link == "down" and f"no relay answers at tcp/127.0.0.1:{port}" in a.status().cause
    start = time.monotonic()
    a.publish([b"lost"])
    assert a.metrics()["swarm/unsent"] == 1
    assert a.collect(ASK) == [] and time.monotonic() - start < 0.5
    with Relay((f"tcp/127.0.0.1:{port}",)):
        wait_for(lambda: a.status().link == "up", 10)
    a.close()


def test_sw01_one_dead_and_one_live_relay(relay: Relay, port: int) -> None:
    dead = free_port()
    a = NetworkExchange("swarm", kit.person(1), (f"tcp/127.0.0.1:{dead}", f"tcp/127.0.0.1:{port}"))
    assert a.status().link == "up"
    a.close()


def test_two_processes_and_a_relay_that_is_killed_and_restarted(tmp_path: Path, port: int) -> None:
    process = start_relay(port)
    where = f"tcp/127.0.0.1:{port}"
    nodes = [Worker(tmp_path, i, 10_000, 0.1, "network", connect=where) for i in (1, 2)]
    try:
        wait_for(lambda: all(any(s["got"] for s in n.steps()) for n in nodes), 30)
        stop(process)
        wait_for(lambda: all(n.steps()[-1]["mode"] != "sharing" for n in nodes), 15)
        assert "reconnecting" in nodes[0].steps()[-1]["cause"]
        process = start_relay(port)
        counts = [len(n.steps()) for n in nodes]
        wait_for(lambda: all(any(s["got"] for s in n.steps()[c + 5 :]) for n, c in zip(nodes, counts, strict=True)), 20)
        nodes[1].kill()  # a killed node is forgotten at once and can come back under its own name
        nodes[1] = Worker(tmp_path, 2, 10_000, 0.1, "network", connect=where)
        before = len(nodes[1].steps())
        wait_for(lambda: any(s["got"] for s in nodes[1].steps()[before:]), 30)
    finally:
        for n in nodes:
            n.kill()
        stop(process)
    for n in nodes:
        assert "Traceback" not in n.errors() and not any("refused" in line for line in n.lines()), n.errors()
        got = [g for s in n.steps() for g in s["got"]]
        assert len(got) == len(set(got)) and max(s["s"] for s in n.steps()) < 3.0


def test_a_mesh_without_a_relay(port: int) -> None:
    where = f"tcp/127.0.0.1:{port}"
    a = NetworkExchange("swarm", kit.person(1), (), listen=(where,))
    b = NetworkExchange("swarm", kit.person(2), (where,), listen=("tcp/127.0.0.1:0",))
    wait_for(lambda: b.status().link == "up" and a.status().link == "up", 5)
    b.collect(Request(12, 1000))
    time.sleep(0.3)
    a.publish([b"hello"])
    assert b.collect(Request(12, 1000, 3.0)) == [(kit.person(1).node_id, b"hello")]
    a.close()
    b.close()


def test_a_password_keeps_strangers_out(tmp_path: Path, port: int) -> None:
    (tmp_path / "users").write_text("swarm:secret\n")
    where = f"tcp/127.0.0.1:{port}"
    with Relay((where,), security=Security(users_file=str(tmp_path / "users"))):
        good = NetworkExchange("swarm", kit.person(1), (where,), security=Security(user="swarm", password="secret"))
        bad = NetworkExchange(
            "swarm", kit.person(2), (where,), security=Security(user="swarm", password="x"), wait_s=0.5
        )
        assert good.status().link == "up" and bad.status().link == "down"
        good.close()
        bad.close()


def test_who_is_there(relay: Relay, port: int) -> None:
    a, b = exchange(port, 1), exchange(port, 2)
    a.beat('{"step": 8}')
    there = {kit.person(1).node_id: '{"step": 8}', kit.person(2).node_id: ""}
    wait_for(lambda: dict(read_swarm("swarm", (f"tcp/127.0.0.1:{port}",), Security())) == there)
    a.close()
    b.close()


def test_a_busy_node_says_how_it_is(relay: Relay, port: int) -> None:
    """A node that always has something to send is heard of all the same."""
    a = exchange(port, 1)
    a.beat('{"step": 8}')
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(0.2):
            a.publish([b"x" * 100] * 20)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        assert dict(read_swarm("swarm", (f"tcp/127.0.0.1:{port}",), Security())) == {
            kit.person(1).node_id: '{"step": 8}'
        }
    finally:
        stop.set()
        worker.join()
        a.close()


def test_sw05_two_that_entered_apart_are_told_when_they_meet(tmp_path: Path, port: int) -> None:
    """One identity on two sides of a network in parts: when it is whole again, one of them stays."""
    twins, relays, ports = [], [], (port, free_port())
    for p in ports:
        relays.append(start_relay(p))
        twins.append(exchange(p, 1))
    assert all(t.status().link == "up" for t in twins)
    for r in relays:
        stop(r)
    wait_for(lambda: all(t.status().link == "down" for t in twins), 15)
    linked = Relay((f"tcp/127.0.0.1:{ports[1]}",))
    with linked, Relay((f"tcp/127.0.0.1:{port}",), connect=(f"tcp/127.0.0.1:{ports[1]}",)):
        wait_for(lambda: sum("same identity" in t.status().cause for t in twins) == 1, 45)
        stays = next(t for t in twins if t.status().link == "up")
        assert stays.status().cause == ""
        for t in twins:
            t.close()


def test_a_relay_says_what_its_settings_lack(port: int) -> None:
    with pytest.raises(UserError, match="needs --tls-certificate and --tls-key"):
        Relay((f"tls/127.0.0.1:{port}",))
    with pytest.raises(UserError, match=r"--users-file none\.txt: no such file"):
        Relay((f"tcp/127.0.0.1:{port}",), security=Security(users_file="none.txt"))


def test_a_taken_port_is_said_in_one_line(relay: Relay, port: int) -> None:
    with pytest.raises(CoterieError, match=f"relay: cannot open tcp/127.0.0.1:{port}"):
        Relay((f"tcp/127.0.0.1:{port}",))
