"""The vocabulary: what flows through coterie, on one page.

``Problem -> Trajectory -> Group -> Batch``. The first three are frozen records: nothing downstream overwrites a field;
a change is a new record (:func:`dataclasses.replace`). ``Batch`` (tensors) lives in :mod:`coterie.batching`, so that this
module, the wire format and relay-only nodes need no torch.

Axis letters in shape comments: ``P`` problems, ``G`` trajectories of a group, ``B`` rows of a batch, ``T`` tokens,
``V`` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Source(IntEnum):
    """Who wrote a token. Recorded with the token; travels on the wire."""

    CONTEXT = 0  # prompt, chat template, wrappers around a helper's words, error notes
    POLICY = 1  # sampled by the author's policy
    HELPER = 2  # written by a helper


class StopReason(StrEnum):
    """Why a rollout ended."""

    EOS = "eos"  # the policy sampled its end token (which is part of token_ids, and trained)
    STOP = "stop"  # a stop string was completed (the token that completed it is kept whole)
    LENGTH = "length"  # the token budget ran out: the answer is truncated


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of one task.

    ``id`` names (task, parameters, index) and is enough to make the problem again on any machine. ``reference`` is what
    the verifier compares with; it never leaves the scorer (helpers are sent ``prompt`` only).
    """

    id: str
    task: str  # the name under which the config lists it, and under which metrics are reported
    prompt: str
    reference: str | None = None
    verifier: str = "task"  # "task": the task's own scorer; else a name from coterie.tasks.verifiers
    metadata: dict[str, Any] = field(default_factory=dict, hash=False, compare=False)


@dataclass(frozen=True, slots=True)
class Consult:
    """One question to a helper, and where its words lie in the trajectory: ``token_ids[start:end]``."""

    role: str
    helper: str  # model or backend name
    query: str
    outcome: str  # "ok" | "failed" | "limit" | "invalid"
    start: int
    end: int
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the response written by one source, as text (end and pad markers removed)."""

    source: Source
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One sampled answer to one problem, as the exact token ids sampled (prompt included, end token included if sampled).

    All three arrays have the same length ``T``. ``reward`` is set by the local verifier only. ``failed`` names an
    infrastructure failure: such a trajectory is neither right nor wrong and is left out of baselines and loss.
    """

    token_ids: NDArray[np.int32]  # [T]
    source: NDArray[np.uint8]  # [T] Source
    behavior_logprobs: NDArray[np.float32]  # [T] under whoever wrote the token, at ``temperature``; NaN = unknown
    prompt_length: int  # token_ids[:prompt_length] is the prompt
    segments: tuple[Segment, ...]  # the response as text
    stop_reason: StopReason
    temperature: float = 1.0
    reward: float | None = None
    failed: str | None = None
    mode: str = "solo"  # "solo": plain prompt; "helped": helpers could be asked
    consults: tuple[Consult, ...] = ()

    def __post_init__(self) -> None:
        if not (len(self.token_ids) == len(self.source) == len(self.behavior_logprobs)):
            raise ValueError(
                f"token_ids, source and behavior_logprobs differ in length: "
                f"{len(self.token_ids)}, {len(self.source)}, {len(self.behavior_logprobs)}"
            )

    @property
    def text(self) -> str:
        """What the policy wrote (helpers' words left out): what the verifier reads."""
        return "".join(s.text for s in self.segments if s.source is Source.POLICY)

    @property
    def truncated(self) -> bool:
        return self.stop_reason is StopReason.LENGTH

    @property
    def response_length(self) -> int:
        """Tokens after the prompt, whoever wrote them."""
        return len(self.token_ids) - self.prompt_length


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """All G trajectories for one problem: the unit that is shared, selected and counted (I and J count groups)."""

    id: str
    problem: Problem
    author: str  # the node whose policy wrote it; own and peer are derived from this, never stored
    policy_version: int  # the author's optimiser step when it was sampled
    tokenizer: str  # hash of the author's tokenizer
    trajectories: tuple[Trajectory, ...]

    @property
    def rewards(self) -> list[float | None]:
        return [t.reward for t in self.trajectories]

    @property
    def informative(self) -> bool:
        """Whether the valid rewards differ, so that the group can move the policy."""
        valid = self.valid_rewards
        return len(valid) > 1 and max(valid) > min(valid)

    @property
    def valid_rewards(self) -> list[float]:
        return [t.reward for t in self.trajectories if t.reward is not None and t.failed is None]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Every setting of the sampler, explicit: a checkpoint's own generation config is never consulted."""

    max_new_tokens: int
    temperature: float = 1.0  # 0 = greedy (evaluation only)
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """What an engine returns for one row: the ids it sampled, their log-probs, and why it stopped."""

    token_ids: NDArray[np.int32]  # [t] without the prompt; ends with EOS if stop_reason is EOS
    logprobs: NDArray[np.float32]  # [t] of the distribution sampled from
    stop_reason: StopReason
    stop_string: str | None = None
