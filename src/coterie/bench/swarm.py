"""What the swarm costs on this machine: bytes of a group, groups per second, bytes per node as the swarm grows.

    coterie bench swarm                         everything, a few minutes
    python -m coterie.bench.swarm traffic 8 64  one part

Groups are synthetic (8 answers x 200 tokens, :mod:`coterie.bench.synthetic`); exchanges, signatures and checks are the
real ones. Light peers of ``traffic`` publish 4 groups a step and ask for J = 4, over one relay on loopback.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import random
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from coterie.bench.synthetic import synthetic_group
from coterie.swarm.chooser import MARGIN
from coterie.swarm.exchange import Exchange, Frame, Request
from coterie.swarm.identity import Identity, new_identity
from coterie.swarm.selection import equal_share
from coterie.swarm.wire import Limits, encode_group, read

SWARM = "bench"
PUBLISHED, WANTED = 4, 4  # groups per node and step; J
_CTX = mp.get_context("spawn")  # a process forked after zenoh has started would hang


def run() -> dict[str, Any]:
    """All parts, with the settings they were measured at."""
    return {
        "sizes_bytes": sizes(),
        "wire_per_s": wire_rate(),
        "local": local(),
        "network": network(),
        "traffic": traffic((8, 64, 512)),
    }


def sizes() -> dict[str, int]:
    """Bytes of a group of 8 x 200 tokens on the wire."""
    me = new_identity(b"\x01" * 32)
    kinds: dict[str, tuple[bool, Literal["none", "float16", "float32"]]] = {
        "text": (False, "none"),
        "text+ids": (True, "none"),
        "text+ids+float16": (True, "float16"),
        "text+ids+float32": (True, "float32"),
    }
    groups = [synthetic_group(me.node_id, i) for i in range(20)]
    return {
        name: round(
            statistics.mean(
                len(encode_group(g, me, SWARM, seq=0, sent_ms=0, token_ids=ids, logprobs=lp).frame) for g in groups
            )
        )
        for name, (ids, lp) in kinds.items()
    }


def wire_rate(count: int = 200) -> dict[str, float]:
    """Groups per second of CPU time on one core: encode + sign, verify + decode."""
    me = new_identity(b"\x01" * 32)
    groups = [synthetic_group(me.node_id, i) for i in range(count)]
    start = time.process_time()
    frames = [encode_group(g, me, SWARM, seq=i, sent_ms=0).frame for i, g in enumerate(groups)]
    middle = time.process_time()
    for f in frames:
        read(f, SWARM, Limits())
    end = time.process_time()
    return {"encode_and_sign": count / (middle - start), "verify_and_decode": count / (end - middle)}


def frames_of(me: Identity, count: int) -> list[bytes]:
    return [encode_group(synthetic_group(me.node_id, i), me, SWARM, seq=i, sent_ms=0).frame for i in range(count)]


def local(count: int = 4000, batch: int = 8) -> dict[str, float]:
    """One process publishes groups in batches of ``batch``, another collects, verifies and decodes them: groups/s."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "swarm.sqlite")
        return _rate(_local_sender, _local_open, path, count, batch)


def network(count: int = 12_000, batch: int = 8) -> dict[str, float]:
    """The same over a relay on loopback, beside zenoh's own rate for the same bytes and no checks (medians of 3)."""
    relay, where = start_relay()
    rounds = []
    try:
        for _ in range(3):
            raw = _rate(_raw_sender, _raw_open, where, count, batch)
            ours = _rate(_network_sender, _network_open, where, count, batch)
            rounds.append({f"raw_{k}": v for k, v in raw.items()} | ours)
    finally:
        relay.terminate()
        relay.join()
    out = {k: statistics.median(r[k] for r in rounds) for k in rounds[0]}
    out["share_of_raw"] = out["moved_per_s"] / out["raw_moved_per_s"]
    out["share_of_raw_verified"] = out["verified_per_s"] / out["raw_moved_per_s"]
    return out


def _rate(
    sender: Callable[..., None], opened: Callable[[str], Exchange], where: str, count: int, batch: int
) -> dict[str, float]:
    """Twice: moving bytes only, and with signature check and decoding in the receiving process."""
    out: dict[str, float] = {}
    for name, check in (("moved_per_s", False), ("verified_per_s", True)):
        exchange = opened(where)
        exchange.collect(Request(count, 1 << 20))
        mine, theirs = _CTX.Pipe()
        process = _CTX.Process(target=sender, args=(where, count, batch, theirs))
        process.start()
        mine.recv()  # frames are made; the clock starts with the first one sent
        time.sleep(1.0)  # subscriptions have reached the relay
        mine.send("go")
        start = last = time.perf_counter()
        cpu, got = time.process_time(), 0
        while got < count and time.perf_counter() - last < 3.0:
            for _, frame in exchange.collect(Request(count, 1 << 20, 0.5)):
                if check:
                    read(frame, SWARM, Limits())
                got += 1
                last = time.perf_counter()
        out[name] = got / (last - start)
        out[name.replace("per_s", "cpu_us")] = 1e6 * (time.process_time() - cpu) / max(1, got)
        out[name.replace("per_s", "lost")] = float(count - got)
        process.join()
        exchange.close()
    return out


def _send(exchange: Exchange, me: Identity, count: int, batch: int, pipe: Connection) -> None:
    frames = frames_of(me, min(count, 200)) * -(-count // 200)
    pipe.send("ready")
    pipe.recv()
    for i in range(0, count, batch):
        exchange.publish(frames[i : min(i + batch, count)])
    time.sleep(1.0)
    exchange.close()


def _local_open(where: str) -> Exchange:
    from coterie.swarm.local import LocalExchange

    return LocalExchange(where, "reader", keep=100_000)


def _local_sender(where: str, count: int, batch: int, pipe: Connection) -> None:
    from coterie.swarm.local import LocalExchange

    me = new_identity()
    _send(LocalExchange(where, me.node_id, keep=100_000), me, count, batch, pipe)


def _network_open(where: str) -> Exchange:
    from coterie.swarm.network import NetworkExchange

    return NetworkExchange(SWARM, new_identity(), (where,), pace=0, block=True)


def _network_sender(where: str, count: int, batch: int, pipe: Connection) -> None:
    from coterie.swarm.network import NetworkExchange

    me = new_identity()
    _send(NetworkExchange(SWARM, me, (where,), pace=0, block=True), me, count, batch, pipe)


class _Raw:
    """Plain zenoh put and subscribe, nothing else: the yardstick."""

    def __init__(self, where: str, subscribe: bool) -> None:
        import zenoh

        from coterie.swarm.zenoh_config import Security, node_config

        self._zenoh = zenoh
        self._session: Any = zenoh.open(node_config((where,), (), Security()))
        self._ring: Any = (
            self._session.declare_subscriber("raw/**", zenoh.handlers.RingChannel(100_000)) if subscribe else None
        )

    def publish(self, frames: list[bytes]) -> None:
        for f in frames:
            self._session.put("raw/a", f, congestion_control=self._zenoh.CongestionControl.BLOCK)

    def collect(self, request: Request) -> list[Frame]:
        out: list[Frame] = []
        deadline = time.monotonic() + request.wait_s
        while not out and time.monotonic() < deadline:
            time.sleep(0.01)  # as the exchange polls: a spinning reader would take the sender's core
            while (sample := self._ring.try_recv()) is not None:
                out.append(("", sample.payload.to_bytes()))
        return out

    def beat(self, info: str) -> None:
        """Nothing."""

    def close(self) -> None:
        self._session.close()


def _raw_open(where: str) -> Any:
    return _Raw(where, True)


def _raw_sender(where: str, count: int, batch: int, pipe: Connection) -> None:
    exchange: Any = _Raw(where, False)
    _send(exchange, new_identity(), count, batch, pipe)


def start_relay(rate: float = 0.0) -> tuple[Any, str]:
    """A relay process on a free loopback port: the process and its endpoint."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        where = f"tcp/127.0.0.1:{s.getsockname()[1]}"
    mine, theirs = _CTX.Pipe()
    process = _CTX.Process(target=_relay, args=(where, rate, theirs), daemon=True)
    process.start()
    mine.recv()
    return process, where


def _relay(where: str, rate: float, pipe: Connection) -> None:
    from coterie.swarm.relay import Relay, serve

    relay = Relay((where,), rate=rate)
    pipe.send("up")
    serve(relay, lambda _: None)


def traffic(nodes: tuple[int, ...], *, steps: int = 16, processes: int = 4) -> list[dict[str, float]]:
    """Bytes received per node and step at each swarm size, after ``steps`` / 2 steps of settling."""
    return [_traffic(n, steps, min(processes, n)) for n in nodes]


def _traffic(n: int, steps: int, processes: int) -> dict[str, float]:
    relay, where = start_relay(rate=200.0)
    step_s = max(0.5, n / 80)  # two cores must serve everybody
    workers = []
    try:
        for p in range(processes):
            mine, theirs = _CTX.Pipe()
            numbers = list(range(p, n, processes))
            process = _CTX.Process(target=_light_peers, args=(where, numbers, steps, step_s, theirs))
            process.start()
            workers.append((process, mine))
        for _, pipe in workers:
            pipe.recv()
        for _, pipe in workers:
            pipe.send("go")
        results = [pipe.recv() for _, pipe in workers]
        for process, _ in workers:
            process.join()
    finally:
        relay.terminate()
        relay.join()
    rows = [r for result in results for r in result["rows"]]
    size = statistics.mean(r["frame"] for r in rows)
    return {
        "nodes": n,
        "step_s": step_s,
        "group_bytes": round(size),
        "groups_per_node_step": round(statistics.mean(r["messages"] for r in rows), 2),
        "payload_bytes_per_node_step": round(statistics.mean(r["bytes"] for r in rows)),
        "wire_bytes_per_node_step": round(sum(r["wire"] for r in results) / n / (steps - steps // 2)),
        "fewest_groups": min(r["messages"] for r in rows),
        "most_groups": max(r["messages"] for r in rows),
        "late_steps": sum(r["late"] for r in results),
    }


def _light_peers(where: str, numbers: list[int], steps: int, step_s: float, pipe: Connection) -> None:
    """Many nodes' exchanges in one process, each at its own phase of the step."""
    from coterie.swarm.network import NetworkExchange

    peers = []
    frames = [frames_of(new_identity(), 8) for _ in range(4)]
    for i in numbers:
        me = new_identity(i.to_bytes(32, "big"))
        peers.append(NetworkExchange(SWARM, me, (where,), published=PUBLISHED, wait_s=30.0, seed=i))
    pipe.send("open")
    pipe.recv()
    rng = random.Random(numbers[0])
    start = time.monotonic() + 0.5
    plan = sorted((start + (s + rng.random()) * step_s, s, k) for k in range(len(peers)) for s in range(steps))
    before: dict[int, dict[str, float]] = {}
    useful: list[float | None] = [None] * len(peers)
    wire0, late = 0, 0
    for due, step, k in plan:
        now = time.monotonic()
        late += now > due + step_s / 2
        time.sleep(max(0.0, due - now))
        peers[k].publish(rng.sample(frames[k % 4], PUBLISHED))
        got = Counter(sender for sender, _ in peers[k].collect(Request(MARGIN * WANTED, 262_144, useful=useful[k])))
        fair = MARGIN * equal_share(
            WANTED, len(got)
        )  # a node's own account of what was worth hearing, all being honest
        useful[k] = float(sum(min(n, fair) for n in got.values()))
        if step == steps // 2 - 1:
            before[k] = peers[k].metrics()
        if step == steps // 2 and not wire0:
            wire0 = received_by_sockets()
    wire = received_by_sockets() - wire0
    measured = steps - steps // 2
    rows = []
    for k, peer in enumerate(peers):
        after = peer.metrics()
        rows.append(
            {
                "messages": (after["swarm/messages_received"] - before[k]["swarm/messages_received"]) / measured,
                "bytes": (after["swarm/bytes_received"] - before[k]["swarm/bytes_received"]) / measured,
                "frame": statistics.mean(map(len, frames[k % 4])),
            }
        )
    pipe.send({"rows": rows, "wire": wire, "late": late})
    for peer in peers:
        peer.close()


def received_by_sockets() -> int:
    """Bytes received so far over this process's TCP connections (Linux: tcp_info.tcpi_bytes_received)."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as s:
                if s.family == socket.AF_INET and s.type == socket.SOCK_STREAM:
                    info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                    total += struct.unpack_from("<Q", info, 128)[0]
        except OSError:  # closed meanwhile, or not a TCP socket
            continue
    return total


def main() -> None:
    part, rest = (sys.argv[1] if len(sys.argv) > 1 else "all"), tuple(int(x) for x in sys.argv[2:])
    parts: dict[str, Callable[[], Any]] = {
        "all": run,
        "sizes": sizes,
        "wire": wire_rate,
        "local": local,
        "network": network,
        "traffic": lambda: traffic(rest or (8, 64, 512)),
    }
    print(json.dumps(parts[part](), indent=1))


if __name__ == "__main__":
    main()
