"""The wire format: golden bytes, exact round trips, sizes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import swarm_kit as kit
import zstandard

from coterie.bench.synthetic import synthetic_group
from coterie.swarm.wire import HEADER, Limits, WireError, encode_group, read, unpack_ids
from coterie.types import Segment, Source, StopReason

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "group_v1.json").read_text())


@pytest.mark.parametrize("name", VECTORS)
def test_golden_frames_decode_to_the_recorded_content(name: str) -> None:
    case = VECTORS[name]
    frame = bytes.fromhex(case["frame"])
    got = read(frame, case["swarm"], Limits())
    assert got.id.hex() == case["id"]
    assert got.author == case["author"] == kit.person(7).node_id
    assert json.loads(msgspec.json.encode(got.body)) == case["body"]
    # and the bytes before compression are what this version writes (zstd itself may change its output)
    assert msgspec.msgpack.encode(got.body) == zstandard.decompress(frame[HEADER:])


def test_golden_frames_are_refused_under_another_swarm_name() -> None:
    frame = bytes.fromhex(VECTORS["solo_float16"]["frame"])
    with pytest.raises(WireError) as e:
        read(frame, "swarm2", Limits())
    assert e.value.kind == "signature" and not e.value.signed


def test_ob23_a_group_survives_the_wire_exactly() -> None:
    me = kit.person(1)
    sent = kit.group(me, 3, ["7", "12", "7 ", "what"], version=5)
    message = encode_group(sent, me, "swarm", seq=0, sent_ms=0, logprobs="float32")
    got = kit.rebuilder().group(read(message.frame, "swarm", kit.LIMITS))
    assert (got.problem, got.author, got.policy_version, got.tokenizer) == (
        sent.problem, sent.author, sent.policy_version, sent.tokenizer)  # fmt: skip
    assert got.id == message.id.hex()
    for a, b in zip(sent.trajectories, got.trajectories, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        np.testing.assert_array_equal(a.source, b.source)
        np.testing.assert_array_equal(a.behavior_logprobs, b.behavior_logprobs)
        assert (a.prompt_length, a.segments, a.stop_reason, a.mode) == (
            b.prompt_length,
            b.segments,
            b.stop_reason,
            b.mode,
        )
        assert b.reward is None  # only the receiver's own verifier sets it


def test_ob22_helper_tokens_keep_their_source_and_unknown_log_probs_stay_unknown() -> None:
    case = VECTORS["helped"]
    got = kit.rebuilder().group(read(bytes.fromhex(case["frame"]), "swarm", kit.LIMITS))
    t = got.trajectories[0]
    assert t.source[5:].tolist() == [1, 1, 1, 0, 2, 0, 1, 1]
    expected = [-0.5, -0.25, -2, np.nan, np.nan, np.nan, -0.125, -1]
    np.testing.assert_array_equal(t.behavior_logprobs[5:], np.array(expected, np.float32))
    assert t.text == "4+59" and t.mode == "helped"
    assert t.segments[2] == Segment(Source.HELPER, "9")


def test_rewards_and_answers_are_not_on_the_wire() -> None:
    body = msgspec.to_builtins(kit.message(kit.person(1)).body)
    names = {*body, *body["trajectories"][0]}
    assert not names & {"reward", "rewards", "claimed", "reference", "answer", "metadata", "verifier"}


def test_failed_trajectories_are_left_out() -> None:
    me = kit.person(1)
    rows = kit.group(me, 3).trajectories
    sent = kit.group(me, 3, trajectories=(rows[0], replace(rows[1], failed="scorer gone")))
    assert len(encode_group(sent, me, "swarm", seq=0, sent_ms=0).body.trajectories) == 1
    none = kit.group(me, 3, trajectories=tuple(replace(t, failed="x") for t in rows))
    with pytest.raises(WireError, match="cannot be sent"):
        encode_group(none, me, "swarm", seq=0, sent_ms=0)


def test_wide_vocabularies_use_four_bytes_and_survive() -> None:
    me = kit.person(1)
    t = kit.trajectory(kit.problem(3), "7")
    wide = replace(t, token_ids=np.array([*t.token_ids[:-2], 151_643, 0], np.int32))
    sent = encode_group(kit.group(me, 3, trajectories=(wide,)), me, "swarm", seq=0, sent_ms=0)
    assert unpack_ids(read(sent.frame, "swarm", Limits()).body.trajectories[0]).tolist() == [151_643, 0]


def test_a_truncated_answer_has_no_end_token() -> None:
    me = kit.person(1)
    t = kit.trajectory(kit.problem(3), "12")
    cut = replace(
        t, token_ids=t.token_ids[:-1], source=t.source[:-1], behavior_logprobs=t.behavior_logprobs[:-1],
        stop_reason=StopReason.LENGTH,
    )  # fmt: skip
    message = encode_group(kit.group(me, 3, trajectories=(cut,)), me, "swarm", seq=0, sent_ms=0)
    got = kit.rebuilder().group(message).trajectories[0]
    assert got.truncated and got.token_ids.tolist() == cut.token_ids.tolist()


def test_size_of_a_typical_group() -> None:
    """8 answers x 200 tokens: bounds a little above what was measured, to notice a regression."""
    me = kit.person(1)
    g = synthetic_group(me.node_id, 1)
    size = {
        (ids, lp): len(encode_group(g, me, "swarm", seq=0, sent_ms=0, token_ids=ids, logprobs=lp).frame)
        for ids, lp in [(True, "float16"), (True, "float32"), (True, "none"), (False, "none")]
    }
    assert size[True, "float16"] < 11_000
    assert size[True, "float32"] < 14_000
    assert size[True, "none"] < 7_500
    assert size[False, "none"] < 4_500
