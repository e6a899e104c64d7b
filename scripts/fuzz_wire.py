"""Fuzz the message decoder and verifier: no crash but WireError, no allocation above the cap.

Inputs are mutated at every depth: the frame, the signed compressed body, the msgpack inside (signed correctly, so that
the decoder and the checks behind the signature are reached), and whole random structures.

    python scripts/fuzz_wire.py --inputs 1000000            # mutation fuzzing, any machine
    pip install atheris; python scripts/fuzz_wire.py --atheris --inputs 1000000   # coverage-guided (libFuzzer)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import zstandard


def _instrumented() -> Any:
    """Counts branches in what is imported under it, if the coverage-guided fuzzer is asked for."""
    if "--atheris" not in sys.argv:
        return contextlib.nullcontext()
    import atheris

    return atheris.instrument_imports(include=["coterie.swarm", "coterie.prompting"])


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

with _instrumented():
    import swarm_kit as kit

    from coterie.swarm.access import Access
    from coterie.swarm.wire import HEADER, MAGIC, Limits, WireError, _signed, encode_group, read
    from coterie.types import Group, Problem

LIMITS = Limits(
    message_bytes=16_384, decompressed_bytes=65_536, trajectories=16, response_tokens=64, response_chars=4096
)
CAP = 4 * 1024 * 1024  # Python objects of a decoded message may take several times its bytes; far below any trouble
EVIL = kit.person(66)


def _stated() -> bytes:
    """A group on a dataset's problem that its author states in full."""
    problem = Problem(
        "jsonl/0123456789ab#1", "mine", "what is 3+4? Say it.", "7", "exact", {"question": "what is 3+4?"}
    )
    rows = tuple(kit.trajectory(problem, t) for t in ("7", "8"))
    group = Group("g", problem, EVIL.node_id, 0, kit.encoder().tokenizer_hash, rows)
    return encode_group(group, EVIL, "swarm", seq=0, sent_ms=0, state=True).frame


VECTORS = json.loads((Path(__file__).resolve().parents[1] / "tests/vectors/group_v1.json").read_text())
FRAMES = [bytes.fromhex(v["frame"]) for v in VECTORS.values()] + [_stated()]
RAWS = [zstandard.decompress(f[HEADER:]) for f in FRAMES]
_PACK = zstandard.ZstdCompressor(level=1, write_content_size=True)
_OPEN = Access("swarm")
_REBUILD = kit.rebuilder(LIMITS)
_REBUILD.trusted = frozenset([EVIL.node_id])  # what nobody else may do is tried too


def sealed(body: bytes) -> bytes:
    return MAGIC + b"\x01" + EVIL.public + EVIL.sign(_signed("swarm", EVIL.public, body)) + body


def build(kind: int, data: bytes) -> bytes:
    """A frame from fuzzer bytes: raw, a signed body, or signed and compressed content."""
    if kind == 0:
        return data
    return sealed(data) if kind == 1 else sealed(_PACK.compress(data))


def target(frame: bytes) -> str:
    """What a node does with bytes off the network. Anything but WireError escapes and is a finding."""
    try:
        _REBUILD.group(read(_OPEN.open(frame, LIMITS.message_bytes), "swarm", LIMITS))
    except WireError as e:
        return e.kind
    return "accepted"


def mutate(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4, 16])):
        at, what = rng.randrange(len(out) + 1), rng.randrange(6)
        if what == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif what == 1 and at < len(out):
            out[at] = rng.choice([0, 0x7F, 0x80, 0x90, 0x9F, 0xC0, 0xC1, 0xC6, 0xCB, 0xDB, 0xDD, 0xDF, 0xFF])
        elif what == 2:
            out[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif what == 3:
            del out[at : at + rng.randrange(1, 9)]
        elif what == 4:
            out[at : at + 5] = bytes([rng.choice([0xC6, 0xDB, 0xDD, 0xDF])]) + rng.randbytes(4)
        else:
            cut = rng.randrange(len(out) + 1)
            out[at:at] = out[min(at, cut) : max(at, cut)][:64]
    return bytes(out)


def structure(rng: random.Random, depth: int = 0) -> Any:
    """Random plain data, sometimes shaped like a group."""
    pick = rng.randrange(10 if depth < 4 else 7)
    if pick == 9 and depth == 0:
        data = msgspec.msgpack.decode(rng.choice(RAWS))
        part = data if rng.random() < 0.4 else rng.choice(data["trajectories"])
        part[rng.choice([*part, "extra"])] = structure(rng, 1)
        return data
    simple = [None, True, rng.choice([0, -1, 1, 1 << 32, -(1 << 62), (1 << 64) - 1]), rng.random() * 1e300,
              float("nan"), rng.randbytes(rng.randrange(20)), "x" * rng.randrange(40)]  # fmt: skip
    if pick < 7:
        return simple[pick]
    n = rng.randrange(5)
    return (
        [structure(rng, depth + 1) for _ in range(n)]
        if pick == 7
        else {str(i): structure(rng, depth + 1) for i in range(n)}
    )


def random_frame(rng: random.Random) -> bytes:
    pick = rng.random()
    if pick < 0.15:
        return mutate(rng.choice(FRAMES), rng)
    if pick < 0.3:
        return build(1, mutate(rng.choice(FRAMES)[HEADER:], rng))
    if pick < 0.75:
        return build(2, mutate(rng.choice(RAWS), rng))
    return build(2, msgspec.msgpack.encode(structure(rng)))


def run(inputs: int, seed: int) -> dict[str, Any]:
    rng, kinds, peak = random.Random(seed), Counter[str](), 0
    start = time.monotonic()
    for i in range(inputs):
        frame = random_frame(rng)
        measured = i % 50 == 0  # tracing every input would take ten times as long
        if measured:
            tracemalloc.start()
        try:
            kinds[target(frame)] += 1
        except Exception:
            print(f"FINDING seed {seed} input {i}: {frame.hex()}", file=sys.stderr)
            raise
        if measured:
            peak = max(peak, tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    if peak > CAP:
        raise SystemExit(f"allocated {peak} bytes, the cap is {CAP}")
    return {"inputs": inputs, "seconds": round(time.monotonic() - start, 1), "peak_bytes": peak, "kinds": dict(kinds)}


def run_atheris(inputs: int) -> None:
    import atheris

    count = [0]

    def one(data: bytes) -> None:
        count[0] += 1
        target(build(data[0] % 3 if data else 0, data[1:]))

    corpus = Path("fuzz_corpus")
    corpus.mkdir(exist_ok=True)
    for k, (frame, raw) in enumerate(zip(FRAMES, RAWS, strict=True)):
        (corpus / f"frame{k}").write_bytes(b"\x00" + frame)
        (corpus / f"body{k}").write_bytes(b"\x01" + frame[HEADER:])
        (corpus / f"raw{k}").write_bytes(b"\x02" + raw)
    atheris.Setup([sys.argv[0], f"-runs={inputs}", "-max_len=8192", "-rss_limit_mb=2048", str(corpus)], one)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--atheris", action="store_true", help="coverage-guided; leaves its corpus in ./fuzz_corpus")
    args = parser.parse_args()
    if args.atheris:
        run_atheris(args.inputs)
    else:
        print(json.dumps(run(args.inputs, args.seed), indent=1))


if __name__ == "__main__":
    main()
