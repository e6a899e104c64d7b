"""From a believed message to a group this node may train on: problem made again, tokens rebuilt, answers scored here.

Nothing of the peer's enters but what its policy wrote. The prompt, the answer and the verifier are this node's own,
regenerated from the problem id; the prompt's ids are this node's own encoding; the text that is scored is decoded from
the very ids that are trained on.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

import numpy as np

from coterie.errors import CoterieError
from coterie.swarm.identity import short_name
from coterie.swarm.wire import (
    STATED,
    Limits,
    Message,
    WireError,
    WireTrajectory,
    digest_ids,
    digest_prompt,
    unpack_ids,
    unpack_logprobs,
)
from coterie.tasks.base import split_of_text
from coterie.tasks.composite import parts
from coterie.types import Group, Problem, Segment, Source, StopReason, Trajectory

if TYPE_CHECKING:
    from coterie.prompting import PromptEncoder


class ScoreLike(Protocol):
    """What a scorer returns for one answer."""

    @property
    def reward(self) -> float | None: ...

    @property
    def outcome(self) -> str: ...


ScoreFn = Callable[[list[tuple[Problem, str]]], Sequence[ScoreLike]]
ProblemFn = Callable[[str], Problem]
_TASK = re.compile(r"[\w.-]{1,64}")
STATED_VERIFIERS = ("exact", "numeric", "math", "code", "format")


@dataclass
class Rebuilder:
    """Turns messages into groups without rewards.

    Args:
        problem_of: id to Problem; raises CoterieError for a problem this node does not take (unknown task, other
            parameters), or WireError for one it must not take (its own held-out problems).
        encoder: this node's tokenizer.
        limits: bounds on response tokens, applied after re-encoding too.
        counts: what happened to trajectories: ``same_tokenizer``, ``reencoded``, ``other_prompt``, ``text_differs``.
        trusted: node ids of authors whose word is taken for problems of a dataset that is not here.
    """

    problem_of: ProblemFn
    encoder: PromptEncoder
    limits: Limits
    counts: Counter[str]
    trusted: frozenset[str] = frozenset()

    def group(self, message: Message) -> Group:
        """Raises WireError: ``other_task``, ``held_out``, ``problem``, ``shape``, ``too_long``, ``injection``."""
        body = message.body
        try:
            problem = self.problem_of(body.problem)
        except WireError:
            raise
        except CoterieError as e:
            if body.statement is None or message.author not in self.trusted:
                raise WireError("other_task", str(e), signed=True) from e
            problem = stated_problem(message, self.limits)
        if digest_prompt(problem.prompt) != body.prompt:
            raise WireError("problem", f"{body.problem!r} is another problem here than at its author", signed=True)
        prompt = np.asarray(self.encoder.prompt_ids(problem.prompt), np.int32)
        if len(prompt) > self.limits.prompt_tokens:
            raise WireError(
                "too_long", f"a prompt of {len(prompt)} tokens, at most {self.limits.prompt_tokens}", signed=True
            )
        same = body.tokenizer == self.encoder.tokenizer_hash
        rows = tuple(self._trajectory(t, prompt, same) for t in body.trajectories)
        return Group(message.id.hex(), problem, message.author, body.policy_version, body.tokenizer, rows)

    def _trajectory(self, t: WireTrajectory, prompt: np.ndarray, same: bool) -> Trajectory:
        if same and t.runs:
            self.counts["same_tokenizer"] += 1
            ids, source, logprobs = self._tokens(t, prompt)
        else:
            self.counts["reencoded"] += 1
            ids, source = self._reencoded(t)
            logprobs = np.full(len(ids), np.nan, np.float32)
        if not (source == Source.POLICY).any():
            raise WireError("shape", "a trajectory in which the policy wrote nothing", signed=True)
        if len(ids) > self.limits.response_tokens:
            raise WireError("too_long", f"{len(ids)} tokens, at most {self.limits.response_tokens}", signed=True)
        self._check_end(t, ids, source)
        p = len(prompt)
        return Trajectory(
            token_ids=np.concatenate([prompt, ids.astype(np.int32)]),
            source=np.concatenate([np.full(p, Source.CONTEXT, np.uint8), source]),
            behavior_logprobs=np.concatenate([np.full(p, np.nan, np.float32), logprobs]),
            prompt_length=p,
            segments=self._segments(ids, source),
            stop_reason=StopReason(t.stop),
            temperature=t.temperature,
            mode=t.mode,
        )

    def _tokens(self, t: WireTrajectory, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The author's own ids (same tokenizer): ids, source, log-probs (NaN where unknown), each [t]."""
        ids = unpack_ids(t)
        if len(ids) and int(ids.max()) >= len(self.encoder.tokenizer):
            raise WireError("shape", f"token id {int(ids.max())} is not in the vocabulary", signed=True)
        lengths = [r.length for r in t.runs]
        source = np.repeat(np.array([r.source for r in t.runs], np.uint8), lengths)
        known = np.repeat(np.array([r.known for r in t.runs], bool), lengths)
        logprobs = np.full(len(ids), np.nan, np.float32)
        logprobs[known] = unpack_logprobs(t)
        if t.context != digest_ids(
            prompt
        ):  # another system prompt or helper wrapper: other conditions, other log-probs
            self.counts["other_prompt"] += 1
            logprobs[:] = np.nan
        if "".join(s.text for s in t.segments) != "".join(s.text for s in self._segments(ids, source)):
            self.counts["text_differs"] += 1  # harmless: what is scored and trained on is decoded from the ids
        return ids, source, logprobs

    def _reencoded(self, t: WireTrajectory) -> tuple[np.ndarray, np.ndarray]:
        """A peer's text in this node's tokens, with the end token its policy sampled restored: ids, source, each [t]."""
        ids: list[int] = []
        source: list[int] = []
        for s in t.segments:
            part = self.encoder.encode(s.text)
            ids += part
            source += [s.source] * len(part)
        if t.stop == "eos":
            own = self.encoder.tokenizer.eos_token_id
            ids.append(int(own) if own is not None else min(self.encoder.eos_ids))
            source.append(int(Source.POLICY))
        return np.asarray(ids, np.int64), np.asarray(source, np.uint8)

    def _check_end(self, t: WireTrajectory, ids: np.ndarray, source: np.ndarray) -> None:
        """An end token stands at the end, once, exactly if the rollout says that it ended by one."""
        ends = np.flatnonzero(np.isin(ids, list(self.encoder.eos_ids)) & (source == Source.POLICY))
        right = [len(ids) - 1] if t.stop == "eos" else []
        if ends.tolist() != right:
            raise WireError("injection", f"end tokens at {ends.tolist()[:4]}, expected at {right}", signed=True)

    def _segments(self, ids: np.ndarray, source: np.ndarray) -> tuple[Segment, ...]:
        out = []
        for kind, run in groupby(range(len(ids)), key=lambda i: int(source[i])):
            out.append(Segment(Source(kind), self.encoder.decode(ids[list(run)])))
        return tuple(out)


def stated_problem(message: Message, limits: Limits) -> Problem:
    """A dataset's problem as its author states it, under the author's name so that it never mixes with an own task.

    Raises WireError: ``held_out`` (by its text, the same rule on every node), ``problem`` (of no dataset, or a verifier
    that needs more than the answer).
    """
    body, s = message.body, message.body.statement
    assert s is not None
    try:
        own_words = all(name in STATED_VERIFIERS for name, _ in parts(s.verifier))
    except CoterieError:
        own_words = False
    if not own_words or not body.problem.startswith(STATED):
        text = f"{body.problem[:200]!r} with verifier {s.verifier!r} cannot be taken at its author's word"
        raise WireError("problem", text, signed=True)
    if not _TASK.fullmatch(body.task) or len(s.question) + len(s.suffix) > limits.response_chars:
        raise WireError(
            "problem", "a stated problem with a strange task name, or with a text out of bounds", signed=True
        )
    if "eval" in (split_of_text(s.question), split_of_text(s.question.strip()), split_of_text(s.question + s.suffix)):
        raise WireError("held_out", f"{body.problem[:200]!r} is held out for evaluation", signed=True)
    name = f"{body.task}@{short_name(message.author)}"
    return Problem(body.problem, name, s.question + s.suffix, s.answer, s.verifier, {"question": s.question})


def score_group(group: Group, score: ScoreFn) -> tuple[Group, bool]:
    """The group with this node's own rewards, and whether an answer broke out of the scorer's bounds (a breach)."""
    scores = score([(group.problem, t.text) for t in group.trajectories])
    rows = tuple(
        replace(t, reward=s.reward, failed=None if s.reward is not None else f"scorer: {s.outcome}")
        for t, s in zip(group.trajectories, scores, strict=True)
    )
    return replace(group, trajectories=rows), any(s.outcome == "breach" for s in scores)


def answer_digests(group: Group) -> list[str]:
    """One per trajectory, equal for equal answers to the same problem, whoever signed them."""
    return [
        digest_prompt("\0".join([group.problem.id, group.problem.prompt, *(s.text for s in t.segments)])).hex()[:16]
        for t in group.trajectories
    ]
