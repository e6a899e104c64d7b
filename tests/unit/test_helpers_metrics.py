"""Metrics of helped trajectories, against counts made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from coterie.helpers.metrics import helper_metrics
from coterie.types import Consult, Group, Problem, Segment, Source, StopReason, Trajectory

P, C, H = Source.POLICY, Source.CONTEXT, Source.HELPER


def row(parts: Sequence[tuple[Source, str]], consults: Sequence[Consult] = (), **values: object) -> Trajectory:
    """One token per character, a prompt of two tokens; helper tokens have known log-probs unless the text has a ``?``."""
    text = "".join(t for _, t in parts)
    source = [C, C, *(s for s, t in parts for _ in t)]
    logprobs = [np.nan if s is C or (s is H and "?" in text) else -1.0 for s in source]
    return Trajectory(np.zeros(len(source), np.int32), np.array(source, np.uint8), np.array(logprobs, np.float32), 2,
                      tuple(Segment(s, t) for s, t in parts), StopReason.EOS, consults=tuple(consults),
                      **{"mode": "helped", "reward": 1.0, **values})  # type: ignore[arg-type]  # fmt: skip


def consult(role: str, outcome: str, latency: float = 0.0) -> Consult:
    return Consult(role, "h", "q", outcome, 0, 0, latency)


def extract(text: str) -> str | None:
    return text.partition("#")[2] or None


ROWS = (
    # copies 12 from the reply: 4 policy, 2 context, 2 helper, 3 policy
    row([(P, "abcd"), (C, "<"), (H, "12"), (C, ">"), (P, "#12")], [consult("verify", "ok", 1.0)]),
    # had 12 before the reply said so; the reply's log-probs are unknown
    row([(P, "is 12"), (C, "<"), (H, "12?"), (C, ">"), (P, "#12")], [consult("verify", "ok", 3.0)], reward=0.0),
    # 112 is not 12
    row([(P, "b"), (C, "<"), (H, "112"), (C, ">"), (P, "#12")], [consult("knowledge", "ok", 2.0)]),
    row(
        [(P, "d"), (C, "-")],
        [consult("verify", "failed", 4.0), consult("", "invalid"), consult("verify", "limit")],
        failed="helper",
        reward=None,
    ),
    row([(P, "<feedback>#1")], reward=0.0),
    row([(P, "s")], mode="solo", reward=0.5),
)


def test_every_figure() -> None:
    m = helper_metrics([Group("g", Problem("p", "t", "q", reference="12"), "a", 0, "h", ROWS)], extract=extract)
    tokens = sum(t.response_length for t in ROWS[:5])
    want = {
        "helpers/trajectories": 5,
        "helpers/share": 5 / 6,
        "helpers/consults": 6 / 5,
        "helpers/consults/verify": 4 / 5,
        "helpers/consults/knowledge": 1 / 5,
        "helpers/asking": 4 / 5,
        "helpers/failed": 1 / 6,
        "helpers/invalid": 1 / 6,
        "helpers/limit": 1 / 6,
        "helpers/lost": 1 / 5,
        "helpers/void": 0.0,
        "helpers/self_feedback": 1 / 5,
        "helpers/token_share": (2 + 3 + 3) / tokens,
        "helpers/context_share": (2 + 2 + 2 + 1) / tokens,
        "helpers/known_logprobs": 5 / 8,
        "helpers/latency_s": 2.5,
        "helpers/latency_p95_s": float(np.quantile([1, 3, 2, 4], 0.95)),
        "helpers/reward/helped": 2 / 4,  # the failed one is neither right nor wrong
        "helpers/reward/solo": 0.5,
        "helpers/reward/with_reply": 2 / 3,
        "helpers/reward/without_reply": 0.0,
        "helpers/answer_in_feedback": 2 / 3,
        "helpers/copied": 1 / 3,
    }
    assert m == pytest.approx(want)


def test_without_helped_trajectories_there_is_nothing_to_say() -> None:
    assert helper_metrics([Group("g", Problem("p", "t", "q"), "a", 0, "h", ROWS[5:])]) == {}


def test_void_rollouts_are_counted() -> None:
    void = row([(P, "and so on")])
    void = Trajectory(
        void.token_ids, void.source, void.behavior_logprobs, 2, void.segments, StopReason.LENGTH, mode="helped"
    )
    m = helper_metrics([Group("g", Problem("p", "t", "q"), "a", 0, "h", (void, ROWS[4]))])
    assert m["helpers/void"] == 0.5 and "helpers/answer_in_feedback" not in m
