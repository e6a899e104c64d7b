"""The wire format of a group: strict, versioned, compressed, signed, content-addressed. No pickle, no torch.

::

    frame   = "ctrG" | version (1 byte) | public key (32) | signature (64) | body
    body    = one zstd frame that states its decompressed size, holding one msgpack map (:class:`WireGroup`)
    signed  = "coterie/group/v1\\0" | length of swarm name (1) | swarm name | public key | body
    id      = sha256(signed)

The signature covers the bytes as they travel, never a re-encoding, and the swarm's name, so that a group of one swarm
is no group of another. There is **no reward on the wire**, not even a claimed one: the receiver scores for itself.
There is no prompt and no answer either: the problem id names them and the receiver makes them again
(:mod:`coterie.swarm.verify`). Only a dataset's problem may be stated (:class:`Statement`), for receivers who trust its author.

Sizes are checked before anything of that size is allocated: the frame before it is parsed, the decompressed size before
decompression, counts and lengths by the decoder before it builds a list or a string. Versions are not negotiated: an
unknown one is refused and counted.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

import msgspec
import numpy as np
import zstandard
from msgspec import Meta
from numpy.typing import NDArray

from coterie.errors import CoterieError
from coterie.swarm.identity import Identity, verify_signature
from coterie.types import Group, Problem, Source, StopReason, Trajectory

MAGIC = b"ctrG"
VERSION = 1
HEADER = len(MAGIC) + 1 + 32 + 64
STATED = "jsonl/"  # ids of problems that only the holder of a file can make
_DOMAIN = b"coterie/group/v1\0"
_LEVEL = 3  # a typical group in 0.05 ms; level 6 takes 0.6 ms to save 2%
_LOGPROB_MIN, _LOGPROB_MAX = -10_000.0, 0.01  # rounding may put a log-prob a hair above 0

# Largest values any receiver accepts; a receiver's own Limits are usually tighter.
MAX_TRAJECTORIES, MAX_SEGMENTS, MAX_TEXT, MAX_TOKENS = 256, 256, 1 << 20, 1 << 17
_Count = Annotated[int, Meta(ge=0, le=(1 << 53) - 1)]
_Name = Annotated[str, Meta(min_length=1, max_length=128)]


class WireError(CoterieError):
    """A message is refused. ``kind`` is the counter it goes to; ``signed`` says whether its author is proven."""

    def __init__(self, kind: str, text: str, *, signed: bool = False) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.signed = kind, signed


class Text(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A stretch of the response by one source, as text."""

    source: Annotated[int, Meta(ge=0, le=2)]
    text: Annotated[str, Meta(max_length=MAX_TEXT)]


class Run(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A stretch of response tokens by one source. ``known``: its log-probs are sent; else they are unknown (NaN)."""

    source: Annotated[int, Meta(ge=0, le=2)]
    length: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    known: bool


class WireTrajectory(msgspec.Struct, forbid_unknown_fields=True, frozen=True, omit_defaults=True):
    """One answer. ``ids``: little-endian uint16 or uint32; ``logprobs``: little-endian float16 or float32, both
    without the prompt and with the width given by their length. ``context``: 8 bytes of blake2b over the prompt's ids
    (int32), which says whether the author's log-probs were taken under the receiver's own prompt ids."""

    segments: Annotated[list[Text], Meta(max_length=MAX_SEGMENTS)]
    stop: Literal["eos", "stop", "length"]
    temperature: float = 1.0
    mode: Literal["solo", "helped"] = "solo"
    context: Annotated[bytes, Meta(max_length=8)] = b""
    runs: Annotated[list[Run], Meta(max_length=MAX_SEGMENTS)] = []
    ids: Annotated[bytes, Meta(max_length=4 * MAX_TOKENS)] = b""
    logprobs: Annotated[bytes, Meta(max_length=4 * MAX_TOKENS)] = b""


class Statement(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A dataset's problem in full. ``prompt`` = ``question`` + the author's suffix."""

    question: Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)]
    suffix: Annotated[str, Meta(max_length=MAX_TEXT)]
    answer: Annotated[str, Meta(max_length=MAX_TEXT)]
    verifier: _Name


class WireGroup(msgspec.Struct, forbid_unknown_fields=True, frozen=True, omit_defaults=True):
    """All answers to one problem. ``session`` and ``seq`` order an author's messages; ``policy_version`` gives their
    age; ``sent_ms`` (wall clock) is used for nothing but to notice a clock that is wrong."""

    problem: Annotated[str, Meta(min_length=1, max_length=4096)]
    task: _Name
    prompt: Annotated[bytes, Meta(min_length=32, max_length=32)]  # sha256 of the prompt
    tokenizer: Annotated[str, Meta(max_length=128)]
    policy_version: _Count
    session: _Count
    seq: _Count
    sent_ms: _Count
    trajectories: Annotated[list[WireTrajectory], Meta(min_length=1, max_length=MAX_TRAJECTORIES)]
    statement: Statement | None = None


@dataclass(frozen=True)
class Limits:
    """What a receiver accepts. Checked before allocation, in this order."""

    message_bytes: int = 262_144
    decompressed_bytes: int = 4_194_304
    trajectories: int = 64
    response_tokens: int = 4096
    response_chars: int = 65_536
    prompt_tokens: int = 4096  # of the prompt as this node encodes it


@dataclass(frozen=True)
class Header:
    """A frame taken apart but not yet believed."""

    public: bytes
    signature: bytes
    body: bytes
    signed: bytes
    id: bytes  # 32

    @property
    def author(self) -> str:
        return self.public.hex()


@dataclass(frozen=True)
class Message:
    """A frame that is signed by ``author`` and well-formed. Whether its content is worth anything is not known yet."""

    id: bytes
    author: str
    body: WireGroup
    frame: bytes


def digest_prompt(prompt: str) -> bytes:
    return hashlib.sha256(prompt.encode()).digest()


def digest_ids(ids: NDArray[np.int32] | list[int]) -> bytes:
    return hashlib.blake2b(np.asarray(ids, dtype="<i4").tobytes(), digest_size=8).digest()


def encode_group(
    group: Group,
    identity: Identity,
    swarm: str,
    *,
    seq: int,
    sent_ms: int,
    token_ids: bool = True,
    logprobs: Literal["none", "float16", "float32"] = "float16",
    state: bool = False,
) -> Message:
    """Encode, compress and sign. Failed trajectories are left out: they are neither right nor wrong. ``state``: send a
    dataset's problem in full.

    Raises:
        WireError: nothing left to send, or the group breaks the format's own limits.
    """
    rows = [_wire_trajectory(t, token_ids, logprobs) for t in group.trajectories if t.failed is None]
    body = WireGroup(
        problem=group.problem.id,
        task=group.problem.task,
        prompt=digest_prompt(group.problem.prompt),
        tokenizer=group.tokenizer,
        policy_version=group.policy_version,
        session=identity.session,
        seq=seq,
        sent_ms=sent_ms,
        trajectories=rows,
        statement=statement_of(group.problem) if state else None,
    )
    return sign_body(body, identity, swarm)


def sign_body(body: WireGroup, identity: Identity, swarm: str) -> Message:
    """Pack, compress and sign a body; checked as a receiver would, so that no node publishes what no peer accepts."""
    raw = msgspec.msgpack.encode(body)
    try:
        msgspec.msgpack.decode(raw, type=WireGroup)
    except msgspec.ValidationError as e:
        raise WireError("schema", f"this group cannot be sent: {e}") from e
    packed = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True).compress(raw)
    signed = _signed(swarm, identity.public, packed)
    frame = MAGIC + bytes([VERSION]) + identity.public + identity.sign(signed) + packed
    return Message(hashlib.sha256(signed).digest(), identity.node_id, body, frame)


def parse(frame: bytes, swarm: str, limits: Limits) -> Header:
    """Take a frame apart after checking its size; nothing is decompressed or believed yet. Raises WireError."""
    if len(frame) > limits.message_bytes:
        raise WireError("size", f"{len(frame)} bytes, at most {limits.message_bytes} are accepted")
    if len(frame) <= HEADER or frame[:4] != MAGIC:
        raise WireError("format", "not a group")
    if frame[4] != VERSION:
        raise WireError("version", f"format version {frame[4]}, this node speaks {VERSION}")
    public, signature, body = frame[5:37], frame[37:101], frame[HEADER:]
    signed = _signed(swarm, public, body)
    return Header(public, signature, body, signed, hashlib.sha256(signed).digest())


def open_header(header: Header, limits: Limits) -> WireGroup:
    """Verify the signature, then decompress and decode within ``limits``. Raises WireError."""
    if not verify_signature(header.public, header.signature, header.signed):
        raise WireError("signature", "the signature does not match the author and content")
    raw = _decompress(header.body, limits)
    try:
        body = _DECODER.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
        raise WireError("schema", str(e), signed=True) from e
    if len(body.trajectories) > limits.trajectories:
        raise WireError("shape", f"{len(body.trajectories)} trajectories, at most {limits.trajectories}", signed=True)
    for t in body.trajectories:
        check_trajectory(t, limits)
    return body


def read(frame: bytes, swarm: str, limits: Limits) -> Message:
    """``parse`` and ``open_header`` in one: bytes to a believed message. Raises WireError."""
    header = parse(frame, swarm, limits)
    return Message(header.id, header.author, open_header(header, limits), frame)


def check_trajectory(t: WireTrajectory, limits: Limits) -> None:
    """Shapes and numbers that the schema cannot state. Raises WireError."""
    if not (0.0 < t.temperature <= 100.0):  # also refuses NaN
        raise WireError("number", f"temperature {t.temperature}", signed=True)
    if sum(len(s.text) for s in t.segments) > limits.response_chars:
        raise WireError("too_long", f"a response of over {limits.response_chars} characters", signed=True)
    n = sum(r.length for r in t.runs)
    if n > limits.response_tokens:
        raise WireError("too_long", f"a response of {n} tokens, at most {limits.response_tokens}", signed=True)
    if len(t.ids) not in (2 * n, 4 * n):
        raise WireError("shape", f"{len(t.ids)} bytes of ids for {n} tokens", signed=True)
    known = sum(r.length for r in t.runs if r.known)
    if len(t.logprobs) not in (2 * known, 4 * known):
        raise WireError("shape", f"{len(t.logprobs)} bytes of log-probs for {known} tokens", signed=True)
    values = unpack_logprobs(t)
    with np.errstate(invalid="ignore"):
        good = np.isfinite(values) & (values >= _LOGPROB_MIN) & (values <= _LOGPROB_MAX)
    if not good.all():
        raise WireError("number", f"log-prob {values[~good][0]} (an unknown one is left out, not sent)", signed=True)


def unpack_ids(t: WireTrajectory) -> NDArray[np.int64]:
    n = sum(r.length for r in t.runs)
    return np.frombuffer(t.ids, dtype="<u2" if len(t.ids) == 2 * n else "<u4").astype(np.int64)


def unpack_logprobs(t: WireTrajectory) -> NDArray[np.float32]:
    """The values of the known runs, in order (no NaN, checked by :func:`check_trajectory`)."""
    known = sum(r.length for r in t.runs if r.known)
    return np.frombuffer(t.logprobs, dtype="<f2" if len(t.logprobs) == 2 * known else "<f4").astype(np.float32)


_Stop = Literal["eos", "stop", "length"]
_STOP: dict[StopReason, _Stop] = {StopReason.EOS: "eos", StopReason.STOP: "stop", StopReason.LENGTH: "length"}
_DECODER = msgspec.msgpack.Decoder(WireGroup)


def _signed(swarm: str, public: bytes, body: bytes) -> bytes:
    name = swarm.encode()
    return _DOMAIN + bytes([len(name)]) + name + public + body


def _decompress(data: bytes, limits: Limits) -> bytes:
    try:
        size = zstandard.frame_content_size(data)
        if size < 0 or size > limits.decompressed_bytes:
            text = f"states a decompressed size of {size}, 0 to {limits.decompressed_bytes} are accepted"
            raise WireError("bomb", text, signed=True)
        return zstandard.ZstdDecompressor().decompress(
            data, max_output_size=limits.decompressed_bytes, allow_extra_data=False
        )
    except (zstandard.ZstdError, MemoryError) as e:
        raise WireError("format", f"not a zstd frame: {e}", signed=True) from e


def statement_of(problem: Problem) -> Statement | None:
    """What a receiver without the file needs; None for a problem that can be made from its id."""
    if not problem.id.startswith(STATED):
        return None
    question = problem.metadata["question"]
    return Statement(question, problem.prompt.removeprefix(question), problem.reference or "", problem.verifier)


def _wire_trajectory(t: Trajectory, token_ids: bool, logprobs: str) -> WireTrajectory:
    segments = [Text(int(s.source), s.text) for s in t.segments]
    stop = _STOP[t.stop_reason]
    mode: Literal["solo", "helped"] = "helped" if t.mode == "helped" else "solo"
    if not token_ids:
        return WireTrajectory(segments, stop, float(t.temperature), mode)
    p = t.prompt_length
    ids, source, values = t.token_ids[p:], t.source[p:], t.behavior_logprobs[p:]
    known = np.isfinite(values) if logprobs != "none" else np.zeros(len(ids), bool)
    runs = _runs(source, known)
    sent = np.clip(values[known], _LOGPROB_MIN, 0.0).astype("<f2" if logprobs == "float16" else "<f4")
    width = "<u2" if len(ids) == 0 or int(ids.max()) < 65_536 else "<u4"
    packed = ids.astype(width).tobytes()
    context = digest_ids(t.token_ids[:p])
    return WireTrajectory(segments, stop, float(t.temperature), mode, context, runs, packed, sent.tobytes())


def _runs(source: NDArray[np.uint8], known: NDArray[np.bool_]) -> list[Run]:
    if len(source) == 0:
        return []
    cut = np.flatnonzero((np.diff(source) != 0) | (np.diff(known.astype(np.int8)) != 0)) + 1
    edges = [0, *cut.tolist(), len(source)]
    return [Run(int(Source(source[a])), b - a, bool(known[a])) for a, b in pairwise(edges)]
