"""A few thousand hostile inputs in every run; scripts/fuzz_wire.py has the million."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import fuzz_wire

from coterie.swarm.node import SwarmNode
from coterie.swarm.wire import MAX_TOKENS

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=20)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
    max_leaves=20,
)


def test_mutated_frames_bodies_and_contents_are_refused_or_understood() -> None:
    result = fuzz_wire.run(2500, seed=1)
    assert result["peak_bytes"] < fuzz_wire.CAP
    # the fuzzer reaches every layer: otherwise it tests nothing
    assert {"signature", "format", "schema", "shape", "accepted"} <= set(result["kinds"])


@settings(max_examples=150, deadline=None)
@given(plain)
def test_any_plain_data_correctly_signed_is_refused(data: object) -> None:
    assert fuzz_wire.target(fuzz_wire.build(2, msgspec.msgpack.encode(data))) == "schema"


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400), st.integers(0, 2))
def test_any_bytes_at_any_layer_are_refused(data: bytes, kind: int) -> None:
    assert fuzz_wire.target(fuzz_wire.build(kind, data)) in {"format", "signature", "schema", "version", "bomb"}


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["ids", "logprobs", "runs", "segments", "stop", "temperature", "context", "mode"]),
    plain | st.lists(st.tuples(st.integers(0, 3), st.integers(0, MAX_TOKENS), st.booleans()), max_size=4),
)
def test_any_field_of_a_trajectory_may_be_anything(name: str, value: object) -> None:
    data = msgspec.msgpack.decode(fuzz_wire.RAWS[0])
    data["trajectories"][0][name] = value
    kinds = {"schema", "shape", "number", "too_long", "injection", "accepted"}
    assert fuzz_wire.target(fuzz_wire.build(2, msgspec.msgpack.encode(data))) in kinds


def test_a_node_survives_noise_between_honest_messages() -> None:
    from swarm_kit import group, node

    from coterie.swarm.memory import MemoryHub

    rng = random.Random(5)
    hub = MemoryHub(capacity=1000)
    evil, a, b = hub.join(), node(hub, 1), node(hub, 2)
    assert isinstance(b, SwarmNode)
    for step in range(10):
        evil.publish([fuzz_wire.random_frame(rng) for _ in range(30)])
        a.publish([group(a.identity, 10 * step + i) for i in range(2)])
        assert any(g.author == a.author for g in b.collect(step))
