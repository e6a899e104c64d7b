"""Hostile messages: each is refused, counted under its kind, laid at the right door, and costs the node nothing else."""

from __future__ import annotations

import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import swarm_kit as kit
import zstandard

from coterie.swarm.identity import Identity
from coterie.swarm.memory import MemoryHub
from coterie.swarm.node import SwarmNode
from coterie.swarm.trust import BAR, STRIKES, WINDOW
from coterie.swarm.wire import HEADER, MAGIC, Limits, WireError, _signed, read, sign_body
from coterie.types import Segment, Source

EVIL, HONEST = kit.person(66), kit.person(1)


def seal(raw: bytes, who: Identity = EVIL, swarm: str = "swarm", version: int = 1, compress: bool = True) -> bytes:
    """Correctly signed bytes with any content: what a hostile member can send."""
    body = zstandard.ZstdCompressor(write_content_size=True).compress(raw) if compress else raw
    return MAGIC + bytes([version]) + who.public + who.sign(_signed(swarm, who.public, body)) + body


def plain(**changes: Any) -> dict[str, Any]:
    """An honest body as plain data, with changes."""
    data: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(kit.message(EVIL, 1).body))
    return data | changes


def pack(**changes: Any) -> bytes:
    return seal(msgspec.msgpack.encode(plain(**changes)))


def row(**changes: Any) -> bytes:
    rows = plain()["trajectories"]
    return pack(trajectories=[rows[0] | changes, rows[1]])


def refusal(frame: bytes) -> WireError:
    with pytest.raises(WireError) as e:
        kit.rebuilder().group(read(frame, "swarm", kit.LIMITS))
    return e.value


RAW = msgspec.msgpack.encode(plain())
HALF = np.array([np.nan, -1], "<f2").tobytes()


def _gigabyte() -> bytes:
    """One GB of zeros in 33 kB, made piece by piece."""
    packer = zstandard.ZstdCompressor().compressobj(size=1 << 30)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(1 << 10)) + packer.flush()


ATTACKS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "format"),
    "noise": (b"\x00" * 300, "format"),
    "header only": (seal(RAW)[:HEADER], "format"),
    "future version": (seal(RAW, version=2), "version"),
    "forged author": (seal(RAW)[:5] + HONEST.public + seal(RAW)[37:], "signature"),
    "flipped content": (seal(RAW)[:-1] + bytes([seal(RAW)[-1] ^ 1]), "signature"),
    "another swarm": (seal(RAW, swarm="other"), "signature"),
    "key that is no point": (seal(RAW)[:5] + b"\xff" * 32 + seal(RAW)[37:], "signature"),
    "long message": (seal(RAW + b"x" * 70_000, compress=False), "size"),
    "not compressed": (seal(RAW, compress=False), "format"),
    "cut in compression": (seal(zstandard.compress(RAW)[:-3], compress=False), "format"),
    "trailing bytes": (seal(zstandard.compress(RAW) + b"junk", compress=False), "format"),
    "size not stated": (seal(zstandard.ZstdCompressor(write_content_size=False).compress(RAW), compress=False), "bomb"),
    "1 GB of zeros": (seal(_gigabyte(), compress=False), "bomb"),
    "claims 2^50 bytes": (
        seal(b"\x28\xb5\x2f\xfd\xe0" + (1 << 50).to_bytes(8, "little") + b"\x01\x00\x00", compress=False), "bomb"),
    "claims 100 bytes, holds more": (
        seal(b"\x28\xb5\x2f\xfd\x20\x64" + zstandard.compress(bytes(100_000))[9:], compress=False), "format"),
    "deep nesting": (seal(b"\x91" * 50_000 + b"\xc0"), "schema"),
    "deep nesting in a field": (seal(b"\x81\xa7problem" + b"\x91" * 50_000), "schema"),
    "array of 2^32 claimed": (seal(RAW.replace(b"\xactrajectories\x92", b"\xactrajectories\xdd\xff\xff\xff\xff")), "schema"),
    "text of 2^32 claimed": (seal(RAW.replace(b"\xa7problem\xa5", b"\xa7problem\xdb\xff\xff\xff\xff")), "schema"),
    "not msgpack": (seal(b"\xc1\xc1\xc1"), "schema"),
    "unknown field": (pack(reward=[1.0, 0.0]), "schema"),
    "missing field": (seal(msgspec.msgpack.encode({k: v for k, v in plain().items() if k != "seq"})), "schema"),
    "wrong type": (pack(policy_version="12"), "schema"),
    "negative version": (pack(policy_version=-1), "schema"),
    "version over 2^53": (pack(policy_version=1 << 60), "schema"),
    "no trajectories": (pack(trajectories=[]), "schema"),
    "None for a trajectory": (pack(trajectories=[None, None]), "schema"),
    "broken text": (seal(RAW.replace(b"\xa7problem\xa5add:1", b"\xa7problem\xa5add\xff1")), "schema"),
    "many trajectories": (pack(trajectories=plain()["trajectories"] * 20), "shape"),
    "ids shorter than stated": (row(ids=b"\x05\x00"), "shape"),
    "log-probs longer than ids": (row(logprobs=b"\x00" * 8 + b"\x00" * 4), "shape"),
    "runs of 10^5 tokens": (row(runs=[[1, 100_000, True]]), "too_long"),
    "a run of 2^40 tokens": (row(runs=[[1, 1 << 40, True]]), "schema"),
    "source 7": (row(runs=[[7, 2, True]]), "schema"),
    "over-long text": (row(segments=[[1, "1" * 5000]], runs=[], ids=b"", logprobs=b""), "too_long"),
    "over-long when re-encoded": (row(segments=[[1, "1" * 500]], runs=[], ids=b"", logprobs=b""), "too_long"),
    "NaN log-prob": (row(logprobs=HALF), "number"),
    "infinite log-prob": (row(logprobs=np.array([-np.inf, -1], "<f4").tobytes()), "number"),
    "log-prob of 1e9": (row(logprobs=np.array([1e9, -1], "<f4").tobytes()), "number"),
    "probability over 1": (row(logprobs=np.array([0.5, -1], "<f4").tobytes()), "number"),
    "NaN temperature": (row(temperature=float("nan")), "number"),
    "temperature 0": (row(temperature=0.0), "number"),
    "infinite temperature": (row(temperature=float("inf")), "number"),
    "id outside the vocabulary": (row(ids=np.array([60_000, 0], "<u2").tobytes()), "shape"),
    "negative id": (row(ids=np.array([-5, 0], "<i4").tobytes()), "shape"),
    "end token inside": (row(ids=np.array([0, 0], "<u2").tobytes()), "injection"),
    "end token missing": (row(ids=np.array([5, 5], "<u2").tobytes()), "injection"),
    "end token in text": (row(segments=[[1, "3<eos>4"]], runs=[], ids=b"", logprobs=b""), "injection"),
    "only a helper wrote": (row(runs=[[2, 2, True]]), "shape"),
    "unknown task": (pack(problem="rm -rf:1"), "other_task"),
    "wrong problem": (pack(problem="add:2"), "problem"),
    "wrong prompt": (pack(prompt=b"\x00" * 32), "problem"),
}  # fmt: skip
NOBODYS = {"size", "format", "version", "signature"}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_message_is_refused_by_its_kind(name: str) -> None:
    frame, kind = ATTACKS[name]
    error = refusal(frame)
    assert error.kind == kind
    behind_signature = kind not in NOBODYS or (kind == "format" and frame[:4] == MAGIC and len(frame) > HEADER)
    assert error.signed == behind_signature  # blamed on someone exactly if the signature proves who


def test_sw13_no_message_makes_the_receiver_allocate_more_than_the_cap() -> None:
    for name, (frame, _) in ATTACKS.items():
        if len(frame) > kit.LIMITS.message_bytes:
            continue
        tracemalloc.start()
        refusal(frame)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2 * kit.LIMITS.decompressed_bytes + 200_000, name


def test_a_bomb_within_the_stated_size_stays_within_the_cap() -> None:
    limits = Limits(decompressed_bytes=10_000)
    with pytest.raises(WireError) as e:
        read(seal(bytes(10_001)), "swarm", limits)
    assert e.value.kind == "bomb"


def _swarm(**settings: Any) -> tuple[Any, SwarmNode, SwarmNode]:
    hub = MemoryHub(capacity=10_000)
    return hub.join(), kit.node(hub, 1), kit.node(hub, 2, **settings)


def test_every_attack_at_once_costs_an_honest_pair_nothing() -> None:
    evil, a, b = _swarm()
    for step in range(4):
        evil.publish([frame for frame, _ in ATTACKS.values()])
        a.publish([kit.group(a.identity, 10 * step + i) for i in range(4)])
        got = b.collect(step)
        assert len(got) >= 1 and all(g.author == a.author for g in got)
    m = b.metrics()
    assert m["swarm/quarantined"] == 1 and m["swarm/refused"] > 50
    (line,) = [e for e in b.events if "quarantine" in e]
    assert any(e.startswith(f"peer {EVIL.name} floods") for e in b.events) and f"{EVIL.name}: flood" in b.summary()
    assert f"; had in quarantine: {EVIL.name}; trouble with {EVIL.name}: " in b.summary()
    assert EVIL.name in line and "quarantine" in line
    (peer,) = [p for p in b.peers() if p["node"] == EVIL.node_id]
    assert peer["quarantined"] and peer["name"] == EVIL.name and peer["used"] == 0
    assert not any(p["faults"] for p in b.peers() if p["node"] == a.author)


def test_forgeries_never_count_against_the_one_they_name() -> None:
    evil, a, b = _swarm()
    good = kit.message(a.identity, 5, seq=9).frame
    evil.publish([good[:-1] + bytes([good[-1] ^ (k + 1)]) for k in range(8)])
    b.collect(0)
    assert b.metrics()["swarm/refused/signature"] == 8 and b.metrics()["swarm/quarantined"] == 0
    evil.publish([good])  # the true message still counts
    assert len(b.collect(1)) == 1


def test_replays_and_copies_are_taken_once() -> None:
    evil, a, b = _swarm()
    m = kit.message(a.identity, 5, seq=50)
    evil.publish([m.frame] * 5)
    assert len(b.collect(0)) == 1 and b.metrics()["swarm/refused/replay"] == 4
    evil.publish([sign_body(m.body, EVIL, "swarm").frame])  # another's answers under an own signature
    assert b.collect(1) == [] and b.metrics()["swarm/refused/copy"] == 1
    a.publish([kit.group(a.identity, 6)])
    (g,) = b.collect(2)
    evil.publish([kit.message(EVIL, 6, seq=1).frame])
    assert g.author == a.author and b.collect(3) == []


def test_a_number_used_once_is_used_up_even_for_other_content() -> None:
    evil, _, b = _swarm()
    evil.publish([kit.message(EVIL, 1, seq=7).frame, kit.message(EVIL, 2, seq=7).frame])
    assert len(b.collect(0)) == 1 and b.metrics()["swarm/refused/replay"] == 1


def test_a_message_from_outside_the_window_is_refused() -> None:
    evil, _, b = _swarm()
    evil.publish([kit.message(EVIL, 1, seq=WINDOW + 10).frame])
    assert len(b.collect(0)) == 1
    evil.publish([kit.message(EVIL, 2, seq=10).frame, kit.message(EVIL, 3, seq=11).frame])
    assert len(b.collect(1)) == 1


def test_a_flood_leaves_room_for_others_and_for_time() -> None:
    evil, a, b = _swarm()
    frames = [kit.message(EVIL, i, seq=i).frame for i in range(300)]
    for step in range(3):
        evil.publish(frames[100 * step : 100 * step + 100])
        a.publish([kit.group(a.identity, 1000 + 10 * step + i) for i in range(3)])
        start = time.monotonic()
        got = b.collect(step)
        assert time.monotonic() - start < 1.0
        assert len(got) == 4 and sum(g.author == a.author for g in got) >= 1
    assert len(b.pool) <= b.cfg.pool
    assert b.metrics()["swarm/refused/rate"] > 50 or b.exchange.metrics()["swarm/dropped_oldest"] > 0


def test_quarantine_ends_and_comes_back_longer() -> None:
    evil, _, b = _swarm()
    spoiled = [frame for frame, kind in ATTACKS.values() if kind == "number"][:STRIKES]
    evil.publish(spoiled)
    b.collect(0)
    assert b.metrics()["swarm/quarantined"] == 1
    evil.publish([kit.message(EVIL, 1, seq=1).frame])
    assert b.collect(1) == [] and b.metrics()["swarm/refused/quarantined"] == 1
    for step in range(2, BAR + 2):
        b.collect(step)
    evil.publish([kit.message(EVIL, 2, seq=2).frame])
    assert len(b.collect(BAR + 2)) == 1
    evil.publish(spoiled)
    b.collect(BAR + 3)
    assert b.ledger.authors[EVIL.node_id].barred_until - b.ledger.authors[EVIL.node_id].heard_at > BAR


def test_honest_differences_are_no_faults() -> None:
    evil, _, b = _swarm()
    evil.publish([pack(problem="other_task:1", seq=i) for i in range(6)])
    evil.publish([msg for msg in [ATTACKS["over-long text"][0]] * 6])
    b.collect(0)
    assert b.metrics()["swarm/quarantined"] == 0


def test_wrong_answers_are_worth_nothing_here() -> None:
    evil, _, b = _swarm(selection="uniform")
    evil.publish([kit.message(EVIL, i, seq=i, texts=["wrong", "wronger"]).frame for i in range(4)])
    assert all(g.rewards == [0.0, 0.0] and not g.informative for g in b.collect(0))


def test_answers_that_break_the_scorer_cost_their_sender() -> None:
    def scorer(pairs: Any) -> Any:
        return [
            kit.Score(0.0, "breach") if "import" in t else s for (_, t), s in zip(pairs, kit.score(pairs), strict=True)
        ]

    hub = MemoryHub()
    evil, a, b = hub.join(), kit.node(hub, 1), kit.node(hub, 2, scorer)
    evil.publish([kit.message(EVIL, i, seq=i, texts=[str(2 * i + 1), f"import os{i}"]).frame for i in range(STRIKES)])
    a.publish([kit.group(a.identity, 100 + i) for i in range(4)])
    got = b.collect(0) + b.collect(1)
    assert got and all(g.author == a.author for g in got)
    assert b.metrics()["swarm/refused/breach"] >= 1
    assert b.metrics()["swarm/quarantined"] == 1


def test_scorer_failures_are_neither_right_nor_wrong() -> None:
    def scorer(pairs: Any) -> Any:
        return [
            kit.Score(None, "error") if t == "7 or so" else s for (_, t), s in zip(pairs, kit.score(pairs), strict=True)
        ]

    hub = MemoryHub()
    a, b = kit.node(hub, 1), kit.node(hub, 2, scorer, selection="uniform")
    a.publish([kit.group(a.identity, 1)])
    (g,) = b.collect(0)
    assert g.rewards == [1.0, None] and g.trajectories[1].failed == "scorer: error"


def test_text_that_differs_from_the_ids_is_not_what_is_scored() -> None:
    """The right answer as text, garbage as ids: only what would be trained on is scored."""
    frame = row(segments=[[1, "3"]], ids=np.array([9, 0], "<u2").tobytes())
    rebuild = kit.rebuilder()
    g = rebuild.group(read(frame, "swarm", kit.LIMITS))
    assert g.trajectories[0].text == "7" and g.trajectories[0].segments == (Segment(Source.POLICY, "7"),)
    assert rebuild.counts["text_differs"] == 1


def _own(node: SwarmNode) -> None:
    """What the node has written itself: 16 answers, right and wrong, of two tokens with log-probs of -0.1 and -1."""
    groups = [kit.group(node.identity, 1_000_000 + i) for i in range(8)]
    rewarded = [tuple(replace(t, reward=r) for t, r in zip(g.trajectories, (1.0, 0.0), strict=True)) for g in groups]
    node.publish([replace(g, trajectories=rows) for g, rows in zip(groups, rewarded, strict=True)])


def _strict(hub: MemoryHub, **settings: Any) -> SwarmNode:
    """A node that finds the letter q most unlikely."""
    from coterie.config import SwarmConfig

    def logprobs(groups: Any) -> Any:
        return [
            [np.full(t.response_length, -9.0 if "q" in t.text else -0.5, np.float32) for t in g.trajectories]
            for g in groups
        ]

    cfg = SwarmConfig(exchange="memory", share="all", **settings)
    return SwarmNode(cfg, kit.person(2), hub.join(), kit.rebuilder(), kit.score, logprobs=logprobs)


def test_text_that_this_node_would_hardly_write_is_dropped_and_its_sender_named() -> None:
    hub = MemoryHub()
    a, evil, b, lax = kit.node(hub, 1), hub.join(), _strict(hub), _strict(hub, less_likely=0)
    for node in (b, lax):
        _own(node)
        node.collect(0)
    evil.publish([kit.message(EVIL, i, seq=i, texts=[str(2 * i + 1), f"q{i}"]).frame for i in range(STRIKES)])
    a.publish([kit.group(a.identity, 20 + i) for i in range(2)])
    assert {g.author for g in b.collect(1)} == {a.author} and {g.author for g in lax.collect(1)} == {
        a.author,
        EVIL.node_id,
    }
    assert b.ledger.authors[EVIL.node_id].faults == {"implausible": STRIKES}
    assert any(EVIL.name in e and "implausible" in e for e in b.events)
    assert b.metrics()["swarm/quarantined"] == 0  # another model may be the reason: no fault


def test_right_answers_far_longer_than_own_ones_are_dropped() -> None:
    hub = MemoryHub()
    evil, b, lax = hub.join(), kit.node(hub, 2), kit.node(hub, 3, longer=0)
    for node in (b, lax):
        _own(node)  # "7 or so" has 8 tokens with the end: the limit is 10
        node.collect(0)
    long = [kit.message(EVIL, i, seq=i, texts=[f"{' ' * 9}{2 * i + 1}", "x"]).frame for i in range(STRIKES)]
    evil.publish([*long, kit.message(EVIL, 30, seq=30, texts=["61", "wrong " * 9]).frame])
    got = b.collect(1)
    assert [g.problem.id for g in got] == ["add:30"]  # a long wrong answer teaches nobody to be long
    assert b.metrics()["swarm/refused/longer"] == STRIKES and f"{EVIL.name}: longer" in b.troubles()
    assert len(lax.collect(1)) == 4


def test_a_slow_step_makes_no_flood_of_an_honest_contributor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty messages are few for an author that had ten seconds for them, and many for one that had none."""
    hub = MemoryHub()
    a, b = kit.node(hub, 1), kit.node(hub, 2)
    b.collect(0)
    now = time.monotonic()
    monkeypatch.setattr("coterie.swarm.intake.time.monotonic", lambda: now + 10)
    a.publish([kit.group(a.identity, i) for i in range(20)])
    b.collect(1)
    assert b.troubles() == []
    a.publish([kit.group(a.identity, 100 + i) for i in range(20)])
    b.collect(2)
    assert b.troubles() == [f"{a.identity.name}: flood"]


def test_a_flood_of_worthless_groups_takes_nothing_from_the_others() -> None:
    """Three honest peers, with and without a fourth that sends 200 well-formed wrong groups a step: the very same groups are
    used, the ear stays open, and the console names who floods and teaches nothing."""

    def run(flood: bool) -> tuple[list[set[str]], SwarmNode]:
        hub = MemoryHub()
        honest, b = [kit.node(hub, i) for i in (1, 2, 3)], kit.node(hub, 4, peer_groups=6)
        evil, used, seq = hub.join(0, EVIL.node_id), [], 0
        _own(b)
        for step in range(12):
            for n in honest:
                texts = [None, ["no", f"nor {step}"]]
                n.publish([kit.group(n.identity, 1000 * n.identity.public[0] + 2 * step + k, texts[k]) for k in (0, 1)])
            if flood:
                wrong = [kit.message(EVIL, 10**6 + seq + k, seq=seq + k, texts=["no", f"{k}"]) for k in range(200)]
                evil.publish([m.frame for m in wrong])
                seq += 200
            used.append({g.problem.id for g in b.collect(step)})
        return used, b

    (alone, quiet), (used, b) = run(False), run(True)
    assert used == alone and all(len(ids) == 3 for ids in used)
    assert b.exchange.listener.fraction == quiet.exchange.listener.fraction == 1.0
    assert f"{EVIL.name}: flood" in b.troubles() and f"{EVIL.name}: idle" in b.troubles() and not quiet.troubles()
    assert any("could teach something" in e and EVIL.name in e for e in b.events)


def test_in_a_large_swarm_a_flood_does_not_make_a_node_deaf() -> None:
    """24 honest peers, of whom a node hears a part; a flooder louder than all of them: as many honest messages as before."""
    honest, steps, flood = [kit.person(i) for i in range(1, 25)], 40, 72
    sent = [[kit.message(p, 10_000 * p.public[0] + i, seq=i).frame for i in range(2 * steps)] for p in honest]
    wrong = [kit.message(EVIL, 10**7 + i, seq=i, texts=["no", f"{i}"]).frame for i in range(flood * steps)]

    def heard(attack: bool) -> float:
        hub = MemoryHub(capacity=100)
        b, wires, evil = kit.node(hub, 99), [hub.join(0, p.node_id) for p in honest], hub.join(0, EVIL.node_id)
        counts = []
        _own(b)
        for step in range(steps):
            for frames, wire in zip(sent, wires, strict=True):
                wire.publish(frames[2 * step : 2 * step + 2])
            evil.publish(wrong[flood * step : flood * step + flood] if attack else [])
            b.collect(step)
            counts.append(sum(r.accepted for n, r in b.ledger.authors.items() if n != EVIL.node_id))
        return (counts[-1] - counts[steps // 2]) / (steps - steps // 2 - 1)

    assert 9 < heard(False) < 15 and heard(True) > 0.8 * heard(False)


def test_a_replayer_is_named_by_who_brought_the_message() -> None:
    hub = MemoryHub()
    a, b, evil = kit.node(hub, 1), kit.node(hub, 2), hub.join(0, EVIL.node_id)
    frames = [kit.message(HONEST, i, seq=i).frame for i in range(STRIKES)]
    evil.publish(frames)
    assert b.collect(0) == [] and b.metrics()["swarm/refused/carried"] == STRIKES
    assert b.troubles() == [f"{EVIL.name} (as the link says): carried"] and a.author not in b.ledger.authors
    a.exchange.publish(frames)  # unproven talk about a message does not stop the true one
    b.exchange._inbox.take()
    hub.join(0, HONEST.node_id).publish(frames)
    assert len(b.collect(1)) == STRIKES


def test_stolen_answers_under_another_name_are_copies() -> None:
    """Right answers of others beside other wrong ones: nothing new, so the thief takes no place and is named."""
    hub = MemoryHub()
    a, b, evil = kit.node(hub, 1), kit.node(hub, 2, peer_groups=8), hub.join(0, EVIL.node_id)
    a.publish([kit.group(a.identity, i) for i in range(STRIKES)])
    evil.publish([kit.message(EVIL, i, seq=i, texts=[str(2 * i + 1), f"so {i}"]).frame for i in range(STRIKES)])
    assert {g.author for g in b.collect(0)} == {a.author}
    assert b.troubles() == [f"{EVIL.name}: copy"]
    evil.publish([kit.message(EVIL, 50, seq=50).frame])
    assert len(b.collect(1)) == 1  # what is new is taken, from whomever


def test_sw15_who_only_listens_in_effect_is_named_and_forgiven_when_it_contributes() -> None:
    hub = MemoryHub()
    a, evil, b = kit.node(hub, 1), hub.join(0, EVIL.node_id), kit.node(hub, 2)
    seq = 0
    _own(b)
    for step in range(40):
        right = step >= 12
        a.publish([kit.group(a.identity, 1000 + 4 * step + k) for k in range(2)])
        rows = [
            kit.message(EVIL, seq + k, seq=seq + k, texts=[str(2 * (seq + k) + 1) if right else "no", "x"])
            for k in (0, 1)
        ]
        evil.publish([m.frame for m in rows])
        seq += 2
        b.collect(step)
        assert b.ledger.idle(EVIL.node_id) == (f"{EVIL.name}: idle" in b.troubles())
        if step == 11:
            assert b.ledger.idle(EVIL.node_id)
    assert not b.ledger.idle(EVIL.node_id) and not b.ledger.idle(a.author)


def test_nothing_of_the_swarm_unpickles_or_evaluates() -> None:
    code = (
        "import sys, pathlib, ast, coterie.swarm as s\n"
        "for f in pathlib.Path(s.__file__).parent.glob('*.py'):\n"
        "    for n in ast.walk(ast.parse(f.read_text())):\n"
        "        names = [a.name for a in n.names] if isinstance(n, ast.Import) else []\n"
        "        assert not {'pickle', 'marshal', 'shelve'} & set(names), f\n"
        "        assert not (isinstance(n, ast.Name) and n.id in ('eval', 'exec')), f\n"
        "import coterie.swarm.wire, coterie.swarm.relay, coterie.swarm.local, coterie.swarm.network, coterie.swarm.node\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
