"""The node the trainer talks to: what it returns, when, and what it remembers."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import swarm_kit as kit

from coterie.config import Config, SwarmConfig
from coterie.errors import UserError
from coterie.swarm.build import open_link, open_node
from coterie.swarm.controller import AdaptiveShare
from coterie.swarm.exchange import Request, Status
from coterie.swarm.identity import Identity
from coterie.swarm.memory import MemoryHub
from coterie.swarm.node import SoloNode, State, SwarmNode
from coterie.swarm.pool import Entry, Pool
from coterie.swarm.wire import Statement, WireError, encode_group, read, sign_body
from coterie.tasks.base import split_of_text
from coterie.tasks.taskset import split_of
from coterie.types import Group, Problem, StopReason


def publish(node: SwarmNode, indices: range, version: int = 0) -> None:
    node.publish([kit.group(node.identity, i, version=version) for i in indices])


def test_peers_groups_arrive_scored_here_and_only_once() -> None:
    hub = MemoryHub()
    a, b = kit.node(hub, 1), kit.node(hub, 2)
    publish(a, range(8))
    first, second = b.collect(0), b.collect(1)
    assert b.metrics()["peer/reward"] == 0.5
    third = b.collect(2)
    assert len(first) == len(second) == 4 and third == []
    assert len({g.id for g in first + second}) == 8
    for g in first + second:
        assert g.author == a.author and g.rewards == [1.0, 0.0] and g.problem == kit.problem_of(g.problem.id)
    assert b.state == State("sharing")
    assert b.metrics()["swarm/dropped/used"] == 8


def test_the_prompt_and_the_reference_are_the_receivers_own() -> None:
    hub = MemoryHub()
    a, b = kit.node(hub, 1), kit.node(hub, 2)
    lie = replace(kit.problem(3), reference="99", verifier="always", metadata={"x": 1})
    a.publish([replace(kit.group(a.identity, 3, ["99", "7"]), problem=lie)])
    (g,) = b.collect(0)
    assert g.rewards == [0.0, 1.0] and g.problem.reference == "7" and g.problem.verifier == "task"


def test_groups_without_signal_are_dropped_unless_uniform() -> None:
    hub = MemoryHub()
    a, b, c = kit.node(hub, 1), kit.node(hub, 2), kit.node(hub, 3, selection="uniform")
    a.publish([kit.group(a.identity, i, ["no", "nor this"]) for i in range(4)])
    assert b.collect(0) == [] and b.metrics()["swarm/dropped/uninformative"] == 4
    assert len(c.collect(0)) == 4
    assert b.state.mode == "degraded" and "4 uninformative" in b.state.cause


def test_only_as_many_answers_are_scored_as_are_needed() -> None:
    scored = []
    hub = MemoryHub()
    a = kit.node(hub, 1)
    b = kit.node(hub, 2, lambda pairs: [scored.append(p) or s for p, s in zip(pairs, kit.score(pairs), strict=True)])
    publish(a, range(12))
    assert len(b.collect(0)) == 4 and len(scored) == 8  # 4 groups of 2


def test_variance_takes_the_widest_groups() -> None:
    hub = MemoryHub()
    a, b = kit.node(hub, 1), kit.node(hub, 2, selection="variance", peer_groups=2)
    wide = [kit.group(a.identity, i, [str(2 * i + 1), "x"]) for i in range(2)]
    narrow = [kit.group(a.identity, i, [str(2 * i + 1), *"abcdefg"]) for i in range(2, 6)]
    a.publish([*narrow, *wide])
    assert {g.problem.id for g in b.collect(0)} == {"add:0", "add:1"}


def test_a_node_that_asks_for_none_publishes_and_receives_nothing() -> None:
    hub = MemoryHub()
    a, b = kit.node(hub, 1), kit.node(hub, 2, peer_groups=0)
    state = np.random.get_state()[1].tolist(), random.getstate()
    publish(a, range(4))
    publish(b, range(4, 8))
    assert b.collect(0) == [] and len(a.collect(0)) == 4
    assert (np.random.get_state()[1].tolist(), random.getstate()) == state
    assert b.state == State("sharing") and b.metrics()["swarm/received"] == 0


def test_a_solo_node_does_nothing_at_all() -> None:
    node = open_node(Config(), open_link(Config()), encoder=kit.encoder(), problem_of=kit.problem_of, score=kit.score)
    assert isinstance(node, SoloNode)
    node.publish([kit.group(kit.person(1), 1)])
    assert node.collect(0) == [] and node.metrics() == {} and node.state_dict() == {}
    assert node.state.mode == "solo"


def test_sw09_a_swarm_of_one_says_so() -> None:
    node = kit.node(MemoryHub(), 1)
    for step in range(6):
        publish(node, range(step, step + 1))
        assert node.collect(step) == []
    assert node.state == State("solo", "no other node is in the swarm")


def test_degraded_when_peers_fall_silent() -> None:
    hub = MemoryHub()
    a, b = kit.node(hub, 1), kit.node(hub, 2, ttl=2)
    publish(a, range(4))
    assert len(b.collect(0)) == 4 and b.state.mode == "sharing"
    for step in range(1, 4):
        b.collect(step)
    assert b.state.mode == "degraded" and "no message from any peer" in b.state.cause
    assert b.events == ["swarm: sharing", f"swarm: degraded ({b.state.cause})"]
    assert b.summary() == f"swarm: degraded ({b.state.cause}); published 0 groups, used 4 from 1 peers"


class _Broken:
    """An exchange whose link is down."""

    def publish(self, frames: object) -> None: ...

    def collect(self, request: Request) -> list[bytes]:
        return []

    def status(self) -> Status:
        return Status("down", "no relay answers at tcp/nowhere:1", None)

    def beat(self, info: str) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


def test_sw01_a_broken_link_is_a_state_not_an_end() -> None:
    node = SwarmNode(SwarmConfig(), kit.person(1), _Broken(), kit.rebuilder(), kit.score)
    publish(node, range(3))
    assert node.collect(0) == []
    assert node.state == State("solo", "no relay answers at tcp/nowhere:1")
    assert node.metrics()["swarm/state"] == 0


def test_a_restart_takes_no_group_twice_and_keeps_the_pool() -> None:
    hub = MemoryHub()
    a, b = kit.node(hub, 1), kit.node(hub, 2, peer_groups=2)
    sent = [kit.message(a.identity, i, seq=i) for i in range(6)]
    a.exchange.publish([m.frame for m in sent])
    used = b.collect(0)
    state = json.loads(json.dumps(b.state_dict()))
    b.close()
    again = kit.node(hub, 2, peer_groups=2)
    again.load_state_dict(state)
    assert len(again.pool) == 4
    a.exchange.publish([m.frame for m in sent])  # everything once more
    later = again.collect(1) + again.collect(2) + again.collect(3)
    assert {g.id for g in later} | {g.id for g in used} == {m.id.hex() for m in sent}
    assert len(later) + len(used) == 6
    assert again.metrics()["swarm/refused/replay"] == 6
    fresh = kit.node(MemoryHub(), 3)
    fresh.load_state_dict(state)  # another identity: still knows what was used
    assert len(fresh.pool) == 4


def test_the_pool_is_bounded_and_fair() -> None:
    hub = MemoryHub()
    a, b, c = kit.node(hub, 1), kit.node(hub, 2), kit.node(hub, 3, pool=6, per_peer=1, ttl=50)
    publish(b, range(6))
    c.collect(0)
    for step in range(2):
        publish(a, range(10 * step + 100, 10 * step + 108))
        chosen = c.collect(step + 1)
        assert len(c.pool) <= 6 and {g.author for g in chosen} == {a.author, b.author}  # a's flood displaced a's
    assert c.pool.dropped["full"] > 0
    expired = kit.node(hub, 4, ttl=1, per_peer=1)
    publish(a, range(50, 56))
    for step in range(4):
        expired.collect(step)
    assert len(expired.pool) == 0 and expired.pool.dropped["expired"] >= 3


def test_a_full_pool_loses_what_is_worth_least() -> None:
    pool = Pool(6, ttl=4)
    a, b = kit.person(1), kit.person(2)
    for i in range(3):
        pool.add(Entry(replace(kit.group(a, i), id=f"a{i}"), b"", i))
        pool.add(Entry(replace(kit.group(b, 10 + i), id=f"b{i}"), b"", i))
    pool.add(Entry(replace(kit.group(a, 9), id="a9"), b"", 9), {b.node_id: 0.2})
    assert list(pool.entries) == ["a0", "a1", "b1", "a2", "b2", "a9"]  # a has more, b's are worth a fifth
    pool.add(Entry(replace(kit.group(a, 8), id="a8"), b"", 9))
    assert "a0" not in pool.entries and pool.dropped["full"] == 2


def test_quotas_spread_a_batch_over_peers() -> None:
    hub = MemoryHub(capacity=1000)
    many = [kit.node(hub, i) for i in range(1, 5)]
    b = kit.node(hub, 9)
    for k, n in enumerate(many):
        publish(n, range(100 * k, 100 * k + (30 if k == 0 else 2)))
    chosen = b.collect(0)
    assert len(chosen) == 4
    assert max(sum(g.author == n.author for g in chosen) for n in many) <= 2


def test_text_from_another_tokenizer_ends_where_its_author_ended() -> None:
    me = kit.person(1)
    other = kit.encoder(kit.ALPHABET[::-1])
    p = kit.problem(3)
    rows = [kit.trajectory(p, "7", other), kit.trajectory(p, "77", other)]
    rows[1] = replace(
        rows[1], token_ids=rows[1].token_ids[:-1], source=rows[1].source[:-1],
        behavior_logprobs=rows[1].behavior_logprobs[:-1], stop_reason=StopReason.LENGTH,
    )  # fmt: skip
    sent = kit.group(me, 3, tokenizer=other.tokenizer_hash, trajectories=tuple(rows))
    rebuild = kit.rebuilder()
    got = rebuild.group(encode_group(sent, me, "swarm", seq=0, sent_ms=0))
    prompt = kit.encoder().prompt_ids(p.prompt)
    assert got.trajectories[0].token_ids.tolist() == [*prompt, *kit.encoder().encode("7"), 0]
    assert got.trajectories[1].token_ids.tolist() == [*prompt, *kit.encoder().encode("77")]
    assert np.isnan(got.trajectories[0].behavior_logprobs).all()
    assert rebuild.counts == {"reencoded": 2} and got.trajectories[0].text == "7"


def test_log_probs_under_another_prompt_are_unknown() -> None:
    me = kit.person(1)
    row = kit.trajectory(kit.problem(3), "7")
    row = replace(
        row, token_ids=np.concatenate([[5], row.token_ids]).astype(np.int32), prompt_length=row.prompt_length + 1,
        source=np.concatenate([[0], row.source]).astype(np.uint8),
        behavior_logprobs=np.concatenate([[np.nan], row.behavior_logprobs]).astype(np.float32),
    )  # fmt: skip
    rebuild = kit.rebuilder()
    got = rebuild.group(encode_group(kit.group(me, 3, trajectories=(row,)), me, "swarm", seq=0, sent_ms=0))
    assert np.isnan(got.trajectories[0].behavior_logprobs).all() and rebuild.counts["other_prompt"] == 1
    assert got.trajectories[0].token_ids[:-2].tolist() == kit.encoder().prompt_ids(kit.problem(3).prompt)


def test_sw11_a_wrong_clock_changes_nothing_and_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = MemoryHub()
    a, b = kit.node(hub, 1), kit.node(hub, 2)
    now = time.time()
    for k, offset in enumerate([600, -600]):
        monkeypatch.setattr("coterie.swarm.node.time.time", lambda o=offset: now + o)
        a.publish([kit.group(a.identity, 10 * k + i) for i in range(2)])
        monkeypatch.setattr("coterie.swarm.node.time.time", lambda: now)
        assert len(b.collect(k)) == 2
        if k == 0:
            assert round(b.metrics()["swarm/clock_skew_s"]) == -600
            assert b.events == [
                "swarm: sharing",
                "this clock differs from most peers' by -600 s (nothing depends on it)",
            ]


def test_sw12_stale_groups_are_refused_and_counted() -> None:
    hub = MemoryHub()
    a, b = kit.node(hub, 1), kit.node(hub, 2, max_age=5)
    publish(a, range(1), version=10)
    publish(a, range(1, 2), version=5)
    publish(a, range(2, 3), version=4)
    assert {g.policy_version for g in b.collect(0)} == {10, 5}
    assert b.metrics()["swarm/refused/stale"] == 1 and b.metrics()["swarm/staleness"] == 2.5


def test_a_restarted_author_with_lower_versions_is_heard() -> None:
    hub = MemoryHub()
    b = kit.node(hub, 2)
    sender = hub.join()
    old, new = kit.person(1, session=1), kit.person(1, session=2)
    sender.publish([kit.message(old, 1, seq=50, version=100).frame, kit.message(new, 2, seq=0, version=0).frame])
    assert len(b.collect(0)) == 2
    sender.publish([kit.message(old, 3, seq=51, version=101).frame])  # late, from before the restart
    assert len(b.collect(1)) == 1
    sender.publish([kit.message(old, 1, seq=50, version=100).frame])
    assert b.collect(2) == []


def test_allow_list_and_invite() -> None:
    from coterie.swarm.access import Access

    hub = MemoryHub()
    a, stranger = kit.node(hub, 1), kit.node(hub, 3)
    b = kit.node(hub, 2, access=Access("swarm", allow=frozenset({a.author})))
    publish(a, range(1))
    publish(stranger, range(1, 2))
    assert [g.author for g in b.collect(0)] == [a.author] and b.metrics()["swarm/refused/not_allowed"] == 1
    hub = MemoryHub()
    sealed = [kit.node(hub, i, access=Access("swarm", invite=b"k" * 32)) for i in (1, 2)]
    outsider = kit.node(hub, 3)
    publish(sealed[0], range(2))
    publish(outsider, range(2, 4))
    assert len(sealed[1].collect(0)) == 2 and sealed[1].metrics()["swarm/refused/seal"] == 2
    assert outsider.collect(0) == []


def test_the_adaptive_ratio_backs_off_and_recovers() -> None:
    share = AdaptiveShare(8, margin=0.03, kl_limit=0.5)
    for accuracy in (0.4, 0.5, 0.48):
        share.feedback(accuracy, 0.1)
    assert share.wanted == 8
    share.feedback(0.4, 0.1)
    assert share.wanted == 4
    share.feedback(0.41, 0.1)
    assert share.wanted == 5
    share.feedback(0.45, 0.9)
    assert share.wanted == 2
    other = AdaptiveShare(8)
    other.load(json.loads(json.dumps(share.state())))
    assert (other.wanted, other.best) == (share.wanted, share.best)


def test_open_node_builds_what_the_config_says_and_refuses_a_second(tmp_path: Path) -> None:
    cfg = Config(run_dir=str(tmp_path / "node_0"), swarm=SwarmConfig(exchange="local"))
    parts = dict(encoder=kit.encoder(), problem_of=kit.problem_of, score=kit.score)
    node = open_node(cfg, open_link(cfg), **parts)
    assert (tmp_path / "swarm.sqlite").exists() and (tmp_path / "node_0" / "identity.pem").exists()
    with pytest.raises(UserError, match="already in use"):
        open_link(cfg)
    node.close()
    open_node(cfg, open_link(cfg), **parts).close()
    bad = [
        (SwarmConfig(exchange="memory"), "one process"),
        (SwarmConfig(exchange="network"), r"needs swarm\.connect"),
        (SwarmConfig(exchange="local", allow=("amber-otter",)), "not a node id"),
        (SwarmConfig(exchange="local", invite_file=str(tmp_path / "none")), "no such file"),
        (SwarmConfig(exchange="network", connect=("host:1",)), "an endpoint looks like"),
    ]
    for section, text in bad:
        with pytest.raises(UserError, match=text):
            open_link(cfg.model_copy(update={"swarm": section}))


def stated(me: Identity, index: int, question: str, verifier: str = "exact", state: bool = True) -> bytes:
    """A frame with a problem of a dataset that only its author has."""
    p = Problem(f"jsonl/0123456789ab#{index}", "mine", f"{question} Say it.", "7", verifier, {"question": question})
    rows = tuple(kit.trajectory(p, t) for t in ("7", "8"))
    group = Group(f"{me.name}/{index}", p, me.node_id, 0, kit.encoder().tokenizer_hash, rows)
    return encode_group(group, me, "swarm", seq=index, sent_ms=0, state=state).frame


def questions(split: str) -> list[str]:
    return [q for q in (f"what is {i}?" for i in range(200)) if split_of_text(q) == split]


def test_a_dataset_problem_is_taken_at_the_word_of_a_trusted_author_only() -> None:
    hub = MemoryHub()
    me, frames = kit.person(1), hub.join()
    node = kit.node(hub, 2)
    node._rebuild.trusted = frozenset([me.node_id])
    wary = kit.node(hub, 3)
    train = questions("train")
    frames.publish([stated(me, 0, train[0]), stated(me, 1, train[1], state=False)])
    (got,) = node.collect(0)
    assert got.problem.id == "jsonl/0123456789ab#0" and got.problem.task == f"mine@{me.name}"
    assert [t.reward for t in got.trajectories] == [1.0, 0.0]  # scored here, by the stated answer
    assert got.problem.prompt == f"{train[0]} Say it." and split_of(got.problem) == "train"
    assert node.metrics()["swarm/refused/other_task"] == 1
    assert wary.collect(0) == [] and wary.metrics()["swarm/refused/other_task"] == 2


@pytest.mark.parametrize(
    ("question", "verifier", "kind"),
    [
        (questions("eval")[0], "exact", "held_out"),
        (questions("eval")[0] + " ", "exact", "held_out"),
        (questions("train")[0], "task", "problem"),  # needs more than the answer
        (questions("train")[0], "exact+numeric*x", "problem"),
        (questions("train")[0], "1e308*exact+1e308*exact", "problem"),  # a reward beyond all numbers
        (questions("train")[0] * 20, "exact", "too_long"),  # in tokens
        ("x" * 5000, "exact", "problem"),  # before anything encodes it
    ],
)
def test_what_even_a_trusted_author_cannot_state(question: str, verifier: str, kind: str) -> None:
    me = kit.person(1)
    rebuild = kit.rebuilder()
    rebuild.trusted = frozenset([me.node_id])
    with pytest.raises(WireError) as e:
        rebuild.group(read(stated(me, 0, question, verifier), "swarm", kit.LIMITS))
    assert e.value.kind == kind


def test_a_stated_problem_does_not_replace_an_own_one() -> None:
    """Who is trusted for what is not here cannot change what is."""
    me = kit.person(1)
    rebuild = kit.rebuilder()
    rebuild.trusted = frozenset([me.node_id])
    body = kit.message(me, 3).body
    lie = msgspec.structs.replace(body, statement=Statement("3+4=?", "", "8", "exact"))
    assert rebuild.group(sign_body(lie, me, "swarm")).problem.reference == "7"
