"""A world small enough to read: additions as problems, a character tokenizer, nodes that meet in memory."""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coterie.config import SwarmConfig
from coterie.errors import CoterieError
from coterie.prompting import PromptEncoder
from coterie.swarm.access import Access
from coterie.swarm.identity import Identity, new_identity
from coterie.swarm.memory import MemoryHub
from coterie.swarm.node import SwarmNode
from coterie.swarm.verify import Rebuilder
from coterie.swarm.wire import Limits, Message, encode_group
from coterie.types import Group, Problem, Segment, Source, StopReason, Trajectory

LIMITS = Limits(
    message_bytes=65_536,
    decompressed_bytes=1 << 20,
    trajectories=16,
    response_tokens=64,
    response_chars=4096,
    prompt_tokens=128,
)
ALPHABET = "0123456789+=? abcdefghijklmnopqrstuvwxyz"


class CharTokenizer:
    """One character, one token, by the small part of the tokenizers' interface that PromptEncoder uses; starts at once."""

    eos_token_id, pad_token_id, bos_token_id, chat_template = 0, None, None, None
    all_special_ids = (0, 1)

    def __init__(self, order: str) -> None:
        self.vocab = {"<eos>": 0, "<unk>": 1} | {c: i + 2 for i, c in enumerate(order)}
        self.text = {i: t for t, i in self.vocab.items()}

    def get_vocab(self) -> dict[str, int]:
        return self.vocab

    def __len__(self) -> int:
        return len(self.vocab)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [self.vocab.get(t, 1) for t in re.findall("<eos>|.", text, re.DOTALL)]}

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(self.text[i] for i in ids)


@functools.cache
def encoder(order: str = ALPHABET) -> PromptEncoder:
    """Another ``order`` is another tokenizer."""
    return PromptEncoder(CharTokenizer(order))


def problem(index: int) -> Problem:
    return Problem(f"add:{index}", "add", f"{index}+{index + 1}=?", str(2 * index + 1))


def problem_of(problem_id: str) -> Problem:
    task, _, index = problem_id.partition(":")
    if task != "add" or not index.isdigit():
        raise CoterieError(f"problem {problem_id!r}: unknown task")
    return problem(int(index))


@dataclass
class Score:
    reward: float | None
    outcome: str = "ok"


def score(pairs: list[tuple[Problem, str]]) -> list[Score]:
    return [Score(float(text.strip() == p.reference)) for p, text in pairs]


def trajectory(p: Problem, text: str, enc: PromptEncoder | None = None, **changes: Any) -> Trajectory:
    """An answer that ended by itself."""
    enc = enc or encoder()
    prompt, answer = enc.prompt_ids(p.prompt), [*enc.encode(text), 0]
    n, t = len(prompt), len(answer)
    made = Trajectory(
        token_ids=np.array([*prompt, *answer], np.int32),
        source=np.repeat(np.array([Source.CONTEXT, Source.POLICY], np.uint8), [n, t]),
        behavior_logprobs=np.concatenate([np.full(n, np.nan), -np.linspace(0.1, 1, t)]).astype(np.float32),
        prompt_length=n,
        segments=(Segment(Source.POLICY, text),),
        stop_reason=StopReason.EOS,
    )
    return replace(made, **changes)


def group(identity: Identity, index: int, texts: list[str] | None = None, version: int = 0, **changes: Any) -> Group:
    """One right and one wrong answer, unless told otherwise."""
    p = problem(index)
    texts = [str(p.reference), "7 or so"] if texts is None else texts
    rows = tuple(trajectory(p, t) for t in texts)
    made = Group(f"{identity.name}/{index}", p, identity.node_id, version, encoder().tokenizer_hash, rows)
    return replace(made, **changes)


def message(identity: Identity, index: int = 1, seq: int = 0, swarm: str = "swarm", **changes: Any) -> Message:
    return encode_group(group(identity, index, **changes), identity, swarm, seq=seq, sent_ms=0)


def person(number: int, session: int = 1) -> Identity:
    return replace(new_identity(bytes([number]) * 32), session=session)


def rebuilder(limits: Limits = LIMITS, enc: PromptEncoder | None = None) -> Rebuilder:
    return Rebuilder(problem_of, enc or encoder(), limits, Counter())


def node(hub: MemoryHub, number: int, scorer: Any = score, access: Access | None = None, **settings: Any) -> SwarmNode:
    cfg = SwarmConfig(exchange="memory", **({"share": "all"} | settings))  # its groups carry no rewards
    return SwarmNode(cfg, person(number), hub.join(), rebuilder(), scorer, access=access, seed=number)
