"""A real network in parts: namespaces of the kernel, joined by a bridge, with cables that can be pulled.

One namespace for the relay, two for nodes. Needs root and the kernel's leave to make namespaces; skipped, with the reason,
where either is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from swarm_processes import Worker, wait_for

pytestmark = pytest.mark.slow
RELAY = "tcp/10.77.0.1:7447"
SERVE = f"from coterie.swarm.relay import *; serve(Relay(({RELAY!r},)), print)"


def ip(*args: str) -> None:
    done = subprocess.run(["ip", *args], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(args)}: {done.stderr.strip()}")


class Net:
    """Namespaces ``r`` (relay, bridge 10.77.0.1), ``a`` (10.77.0.2) and ``b`` (10.77.0.3)."""

    def __init__(self) -> None:
        self._mark = f"ctr{os.getpid() % 100_000}"
        self.names = {n: f"{self._mark}{n}" for n in "rab"}

    def make(self) -> None:
        for name in self.names.values():
            ip("netns", "add", name)
            self.inside(name, "link", "set", "lo", "up")
        r = self.names["r"]
        self.inside(r, "link", "add", "br0", "type", "bridge")
        self.inside(r, "addr", "add", "10.77.0.1/24", "dev", "br0")
        self.inside(r, "link", "set", "br0", "up")
        for n, address in (("a", "10.77.0.2/24"), ("b", "10.77.0.3/24")):
            name = self.names[n]
            self.inside(r, "link", "add", f"to_{n}", "type", "veth", "peer", "name", "eth0", "netns", name)
            self.inside(r, "link", "set", f"to_{n}", "master", "br0", "up")
            self.inside(name, "addr", "add", address, "dev", "eth0")
            self.inside(name, "link", "set", "eth0", "up")

    def inside(self, name: str, *args: str) -> None:
        ip("-n", name, *args)

    def cable(self, n: str, state: str) -> None:
        """Pull (``down``) or plug in (``up``) the cable of ``a`` or ``b``: packets vanish, nobody is told."""
        self.inside(self.names["r"], "link", "set", f"to_{n}", state)

    def prefix(self, n: str) -> list[str]:
        return ["ip", "netns", "exec", self.names[n]]

    def remove(self) -> None:
        for name in self.names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.fixture
def net() -> Iterator[Net]:
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    made = Net()
    try:
        made.make()
    except OSError as e:
        made.remove()
        pytest.skip(f"no network namespaces here: {e}")
    try:
        yield made
    finally:
        made.remove()


def start_relay(net: Net) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([*net.prefix("r"), sys.executable, "-c", SERVE], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline().startswith(b"relay:")
    return process


def stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def shared_since(node: Worker, before: int, author: str = "") -> bool:
    """Whether ``node`` has taken a group since its step number ``before`` (of ``author``, if given)."""
    return (
        any(author in g for s in node.steps()[before:] for g in s["authors"])
        if author
        else any(s["got"] for s in node.steps()[before:])
    )


def counts(nodes: Sequence[Worker]) -> list[int]:
    return [len(n.steps()) for n in nodes]


def test_a_partition_heals_and_a_relay_comes_back_without_a_restart(net: Net, tmp_path: Path) -> None:
    relay = start_relay(net)
    where = {"a1": (1, "a"), "a2": (2, "a"), "b": (3, "b")}
    nodes = [
        Worker(tmp_path, i, 100_000, 0.1, "network", prefix=net.prefix(n), connect=RELAY) for i, n in where.values()
    ]
    a1, a2, b = nodes
    try:
        wait_for(lambda: all(n.steps() and n.steps()[-1]["mode"] == "sharing" for n in nodes), 60)
        b_author = b.steps()[0]["node"]

        net.cable("b", "down")  # longer than the lease of 10 s: the relay forgets b
        wait_for(lambda: b.steps()[-1]["mode"] != "sharing", 30)
        cut = counts(nodes)
        time.sleep(15)
        assert all(n > c + 30 for n, c in zip(counts(nodes), cut, strict=True))  # everybody goes on
        assert shared_since(a1, cut[0]) and shared_since(a2, cut[1])  # those on this side go on sharing
        assert not shared_since(b, cut[2]) and "reconnecting" in b.steps()[-1]["cause"]
        assert not shared_since(a1, cut[0] + 10, b_author)

        net.cable("b", "up")
        healed = counts(nodes)
        wait_for(lambda: shared_since(b, healed[2]), 40)
        wait_for(lambda: any(shared_since(n, h, b_author) for n, h in zip(nodes[:2], healed, strict=False)), 40)

        stop(relay)
        wait_for(lambda: all(n.steps()[-1]["mode"] != "sharing" for n in nodes), 30)
        alone = counts(nodes)
        time.sleep(3)
        assert all(n > c + 5 for n, c in zip(counts(nodes), alone, strict=True))
        relay = start_relay(net)
        back = counts(nodes)
        wait_for(lambda: all(shared_since(n, k) for n, k in zip(nodes, back, strict=True)), 40)
        assert all(n.process.poll() is None for n in nodes)
    finally:
        for n in nodes:
            n.kill()
        stop(relay)
    for n in nodes:
        check(n)


def check(node: Worker) -> None:
    """No fault, no group taken twice, no step longer than what a step is allowed to wait."""
    steps: list[dict[str, Any]] = node.steps()
    got = [g for s in steps for g in s["got"]]
    assert len(got) == len(set(got))
    assert max(s["s"] for s in steps) < 3.0
    assert "Traceback" not in node.errors() and not any("refused" in line for line in node.lines()), node.errors()
