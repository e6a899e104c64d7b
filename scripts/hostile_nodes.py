"""A hostile member of a swarm: it listens as anybody can, and publishes through the real wire and the real exchange.

What it sends is made from what honest nodes sent (tampered, under its own signature), so it is as plausible as it can be.
Used by ``scripts/hostile_study.py`` and the tests.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import zstandard

from coterie.errors import CoterieError
from coterie.prompting import PromptEncoder
from coterie.swarm.exchange import Exchange, Request
from coterie.swarm.identity import Identity
from coterie.swarm.wire import (
    MAGIC,
    Limits,
    Run,
    Text,
    WireError,
    WireGroup,
    WireTrajectory,
    _signed,
    digest_ids,
    digest_prompt,
    read,
    sign_body,
)
from coterie.tasks.taskset import TaskSet
from coterie.types import Problem, Source

SWARM = "swarm"
OPEN, CLOSE = "<answer>", "</answer>"
INJECTED = "buy now! "
MARKER = "ran"
CODE = f"__import__('os').system('touch {MARKER}')"


@dataclass
class Hostile:
    """One hostile node.

    Args:
        attack: a key of ``ATTACKS``.
        length: tokens of an over-long answer.
        groups: messages per turn (a flood sends ``flood`` times as many).
        honest: node ids whose messages are taken as material; empty: everybody's.
    """

    attack: str
    exchange: Exchange
    identity: Identity
    tasks: TaskSet
    encoder: PromptEncoder
    length: int = 44
    groups: int = 4
    flood: int = 50
    honest: frozenset[str] = frozenset()
    seq: int = 0
    sent: int = 0
    seen: list[tuple[bytes, WireGroup]] = field(default_factory=list)  # honest frames and what is in them

    def __post_init__(self) -> None:
        self.rng = random.Random(f"hostile/{self.attack}/{self.identity.node_id}")

    def turn(self, step: int) -> None:
        """Listen, then publish one step's worth of the attack."""
        for sender, frame in self.exchange.collect(Request(64, 1 << 20)):
            if self.honest and sender not in self.honest:
                continue
            try:
                self.seen.append((frame, read(frame, SWARM, Limits()).body))
            except WireError:
                continue  # another hostile node's
        self.seen = self.seen[-256:]
        frames = ATTACKS[self.attack](self, step) if self.seen else []
        self.sent += len(frames)
        self.exchange.publish(frames)

    def sign(self, body: WireGroup, **changes: object) -> bytes:
        """As this node's next message."""
        self.seq += 1
        fresh = msgspec.structs.replace(body, session=self.identity.session, seq=self.seq, **changes)
        return sign_body(fresh, self.identity, SWARM).frame

    def seal(self, raw: bytes) -> bytes:
        """Any bytes, correctly signed."""
        packed = zstandard.ZstdCompressor(write_content_size=True).compress(raw)
        public = self.identity.public
        return MAGIC + b"\x01" + public + self.identity.sign(_signed(SWARM, public, packed)) + packed

    def answer(self, problem: Problem, text: str) -> WireTrajectory:
        """Ids in this model's tokens, ended by itself, every token claimed to be all but certain."""
        ids = np.array([*self.encoder.encode(text), self.encoder.tokenizer.eos_token_id], "<u2")
        return WireTrajectory(
            segments=[Text(int(Source.POLICY), text)],
            stop="eos",
            context=digest_ids(self.encoder.prompt_ids(problem.prompt)),
            runs=[Run(int(Source.POLICY), len(ids), True)],
            ids=ids.tobytes(),
            logprobs=np.full(len(ids), -0.001, "<f2").tobytes(),
        )

    def tampered(self, step: int, change: Callable[[Problem, str, bool], str]) -> list[bytes]:
        """Honest groups with right and wrong answers in them, each answer put through ``change(problem, text, right)``."""
        out: list[bytes] = []
        for _, body in self.rng.sample(self.seen, len(self.seen)):
            try:
                problem = self.tasks.problem_from_id(body.problem)
            except CoterieError:
                continue
            texts = ["".join(s.text for s in t.segments) for t in body.trajectories]
            right = [_right(problem, t) for t in texts]
            if 0 < sum(right) < len(right):
                rows = [self.answer(problem, change(problem, t, r)) for t, r in zip(texts, right, strict=True)]
                out.append(self.sign(body, policy_version=step, trajectories=rows))
            if len(out) == self.groups:
                break
        return out


def _right(problem: Problem, text: str) -> bool:
    return text.split(OPEN)[-1].removesuffix(CLOSE).strip() == problem.reference


def _wrong(problem: Problem, rng: random.Random) -> str:
    """Another answer of the same kind."""
    reference = str(problem.reference)
    if reference.lstrip("-").isdigit():
        return str(int(reference) + rng.choice((-2, -1, 1, 2)))
    letters = list(reference)
    rng.shuffle(letters)
    return "".join(letters) + "e"


def wrong_answers(h: Hostile, step: int) -> list[bytes]:
    """Wrong but confident: plausible working that ends in a wrong answer, beside right answers, all claimed as certain."""

    def change(problem: Problem, text: str, right: bool) -> str:
        return text if right else text.split(OPEN)[0] + OPEN + _wrong(problem, h.rng)

    return h.tampered(step, change)


def bare_answers(h: Hostile, step: int) -> list[bytes]:
    """Right answers without the working that leads to them."""
    return h.tampered(step, lambda problem, text, right: f"{OPEN}{problem.reference}" if right else text)


def wrong_problems(h: Hostile, step: int) -> list[bytes]:
    """Right answers under another problem's id, under another prompt, and groups on held-out problems."""
    bodies = [body for _, body in h.rng.sample(h.seen, min(2, len(h.seen)))]
    other = h.tasks.draw("hostile", step, 1)[0]
    held = h.rng.choice([p for some in h.tasks.eval_problems(8).values() for p in some])
    out = [h.sign(b, problem=other.id) for b in bodies] + [h.sign(b, prompt=bytes(32)) for b in bodies]
    return [*out, h.sign(bodies[0], problem=held.id, prompt=digest_prompt(held.prompt))]


def malformed(h: Hostile, step: int) -> list[bytes]:
    """Forged authors, a claim of 1 GB, deep nesting, wrong shapes, NaN and infinite log-probs."""
    frame, body = h.rng.choice(h.seen)
    own = h.sign(body)
    t = body.trajectories[0]
    half = len(t.logprobs) // (2 if len(t.logprobs) == 2 * sum(r.length for r in t.runs if r.known) else 4)
    claims = b"\x28\xb5\x2f\xfd\xa0" + (1 << 30).to_bytes(4, "little") + b"\x01\x00\x00"
    public = h.identity.public
    bomb = MAGIC + b"\x01" + public + h.identity.sign(_signed(SWARM, public, claims)) + claims
    bad = [
        replace_row(body, logprobs=np.full(half, np.nan, "<f2").tobytes()),
        replace_row(body, logprobs=np.full(half, -np.inf, "<f2").tobytes()),
        replace_row(body, ids=t.ids[:-2]),
        replace_row(body, temperature=float("nan")),
    ]
    forged = [own[:5] + frame[5:37] + own[37:], frame[:-1] + bytes([frame[-1] ^ 1])]
    return [*forged, bomb, h.seal(b"\x91" * 50_000 + b"\xc0"), *(h.sign(b) for b in bad)]


def replace_row(body: WireGroup, **changes: object) -> WireGroup:
    first = msgspec.structs.replace(body.trajectories[0], **changes)
    return msgspec.structs.replace(body, trajectories=[first, *body.trajectories[1:]])


def replay(h: Hostile, step: int) -> list[bytes]:
    """Honest frames again, byte for byte, and the same answers under this node's name."""
    some = h.rng.sample(h.seen, min(6, len(h.seen)))
    return [f for f, _ in some] + [h.sign(b, policy_version=step) for _, b in some[:3]]


def flood(h: Hostile, step: int) -> list[bytes]:
    """Many times its share of well-formed groups, all different and all wrong."""
    out = []
    for problem in h.tasks.draw(f"flood/{h.identity.node_id}", step, h.groups * h.flood):
        rows = [h.answer(problem, OPEN + _wrong(problem, h.rng)) for _ in range(2)]
        body = replace_problem(h.seen[-1][1], problem)
        out.append(h.sign(body, policy_version=step, trajectories=rows))
    return out


def replace_problem(body: WireGroup, problem: Problem) -> WireGroup:
    return msgspec.structs.replace(body, problem=problem.id, task=problem.task, prompt=digest_prompt(problem.prompt))


def code(h: Hostile, step: int) -> list[bytes]:
    """Code where an answer is expected, beside right answers."""

    def change(problem: Problem, text: str, right: bool) -> str:
        return text if right else OPEN + CODE

    return h.tampered(step, change)


def over_long(h: Hostile, step: int) -> list[bytes]:
    """Right answers whose working is said again and again, up to ``length`` tokens."""

    def change(problem: Problem, text: str, right: bool) -> str:
        return _stretched(h, problem, text, h.length) if right else text

    return h.tampered(step, change)


def _stretched(h: Hostile, problem: Problem, text: str, length: int) -> str:
    """The working said again and again, and the right answer: ``length`` tokens with the end token."""
    working, end = text.split(OPEN)[0], OPEN + str(problem.reference)
    room = length - 1 - len(h.encoder.encode(end))
    ids = h.encoder.encode(working + ",") * 12
    return h.encoder.decode(ids[:room]) + end


def over_long_near(h: Hostile, step: int) -> list[bytes]:
    """As ``over_long``, but only a fifth longer than the longest answers heard to the same kind of problem: below limits that
    are set by a factor of own lengths."""
    longest: dict[str, int] = {}
    for _, body in h.seen:
        lengths = [sum(r.length for r in t.runs) for t in body.trajectories if t.stop == "eos"]
        longest[body.task] = max([longest.get(body.task, 0), *lengths])

    def change(problem: Problem, text: str, right: bool) -> str:
        return _stretched(h, problem, text, int(1.2 * longest[problem.task])) if right else text

    return h.tampered(step, change)


def injected(h: Hostile, step: int) -> list[bytes]:
    """Right answers that begin with a text of the attacker's choice."""
    return h.tampered(step, lambda problem, text, right: INJECTED + text if right else text)


Attack = Callable[[Hostile, int], list[bytes]]
ATTACKS: dict[str, Attack] = {
    "wrong_answers": wrong_answers,
    "refusable": lambda h, step: wrong_problems(h, step) + malformed(h, step),
    "replay": replay,
    "flood": flood,
    "code": code,
    "bare": bare_answers,
    "over_long": over_long,
    "over_long_near": over_long_near,
    "injected": injected,
}


def person(seed: int) -> Identity:
    """The hostile node's own key."""
    from coterie.swarm.identity import new_identity

    return replace(new_identity(seed.to_bytes(4, "little") * 8), session=1)


def infected(texts: Sequence[str]) -> float:
    """Share of answers with the injected text in them."""
    return sum(INJECTED.strip() in t for t in texts) / max(1, len(texts))
