"""What the helpers of one step did, from its own trajectories alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from coterie.helpers.protocol import answered
from coterie.types import Consult, Group, Problem, Source, Trajectory

Extract = Callable[[str], str | None]


def helper_metrics(
    groups: Sequence[Group], *, feedback_tag: str = "<feedback>", extract: Extract | None = None
) -> dict[str, float]:
    """Metrics of helped trajectories (formulas and healthy values: docs/helpers.md); empty without any.

    ``extract``: text -> final answer, the function the verifier uses. Without it no copy rate is reported.
    """
    pairs = [(g.problem, t) for g in groups for t in g.trajectories if t.mode == "helped"]
    if not pairs:
        return {}
    rows = [t for _, t in pairs]
    asked = [c for t in rows for c in t.consults]
    tokens = max(1, sum(t.response_length for t in rows))
    out = {
        "helpers/trajectories": float(len(rows)),
        "helpers/share": len(rows) / sum(len(g.trajectories) for g in groups),
        "helpers/consults": len(asked) / len(rows),
        "helpers/asking": _mean([bool(t.consults) for t in rows]),
        "helpers/lost": _mean([t.failed is not None for t in rows]),
        "helpers/void": _mean([not t.consults and not answered(t.text) and t.truncated for t in rows]),
        "helpers/self_feedback": _mean([bool(feedback_tag) and feedback_tag in t.text for t in rows]),
        "helpers/token_share": sum(int((t.source == Source.HELPER).sum()) for t in rows) / tokens,
        "helpers/context_share": sum(int((_response(t) == Source.CONTEXT).sum()) for t in rows) / tokens,
        "helpers/known_logprobs": _mean([k for t in rows for k in _known(t)]),
    }
    for outcome in ("failed", "invalid", "limit"):
        out[f"helpers/{outcome}"] = _mean([c.outcome == outcome for c in asked])
    for role in sorted({c.role for c in asked if c.role}):
        out[f"helpers/consults/{role}"] = sum(c.role == role for c in asked) / len(rows)
    waits = [c.latency_s for c in asked if c.outcome in ("ok", "failed")]
    if waits:
        out["helpers/latency_s"] = _mean(waits)
        out["helpers/latency_p95_s"] = float(np.quantile(waits, 0.95))
    return out | _rewards(groups) | _leaks(pairs, extract)


def _rewards(groups: Sequence[Group]) -> dict[str, float]:
    """Mean reward by mode, and of helped trajectories with and without a served question."""
    rows = [t for g in groups for t in g.trajectories if t.reward is not None and t.failed is None]
    helped = [t for t in rows if t.mode == "helped"]
    parts = {
        "helped": helped,
        "solo": [t for t in rows if t.mode == "solo"],
        "with_reply": [t for t in helped if _served(t)],
        "without_reply": [t for t in helped if not _served(t)],
    }
    return {f"helpers/reward/{k}": _mean([t.reward or 0.0 for t in ts]) for k, ts in parts.items() if ts}


def _leaks(pairs: Sequence[tuple[Problem, Trajectory]], extract: Extract | None) -> dict[str, float]:
    """How often helpers hand over the answer, and how often the policy takes it from them."""
    served = [(p, t) for p, t in pairs if _served(t)]
    with_gold = [(p.reference, t) for p, t in served if p.reference]
    out = {}
    if with_gold:
        out["helpers/answer_in_feedback"] = _mean([_occurs(gold, _words(t)) for gold, t in with_gold])
    if served and extract is not None:
        out["helpers/copied"] = _mean([_copied(t, extract) for _, t in served])
    return out


def _copied(t: Trajectory, extract: Extract) -> bool:
    """Whether the final answer stands in a reply, and the policy had not written it before that reply."""
    answer = extract(t.text)
    if not answer:
        return False
    own = ""
    for s in t.segments:
        if s.source is Source.HELPER and _occurs(answer, s.text):
            return not _occurs(answer, own)
        own += s.text if s.source is Source.POLICY else ""
    return False


def _occurs(answer: str, text: str) -> bool:
    """Whether ``answer`` stands in ``text`` on its own (``12`` does not occur in ``112``)."""
    return re.search(rf"(?<!\w){re.escape(answer.strip())}(?!\w)", text) is not None


def _words(t: Trajectory) -> str:
    return "\n".join(s.text for s in t.segments if s.source is Source.HELPER)


def _served(t: Trajectory) -> list[Consult]:
    return [c for c in t.consults if c.outcome == "ok"]


def _response(t: Trajectory) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return t.source[t.prompt_length :]


def _known(t: Trajectory) -> list[bool]:
    """Which helper tokens have a log-prob."""
    return [bool(k) for k in np.isfinite(t.behavior_logprobs[t.source == Source.HELPER])]


def _mean(values: Sequence[float] | Sequence[bool]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
