"""What a scoring process may say about an answer: a reward, an outcome and a few words."""

from __future__ import annotations

import json
import math
from typing import Any

Reply = dict[str, Any]  # {"reward": float | None, "outcome": str, "detail": str}


def check_reply(payload: bytes) -> Reply:
    """A reply of a process that has seen an answer, read as hostile."""
    try:
        data = json.loads(payload)
        reward, outcome, detail = data["reward"], data["outcome"], data["detail"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return breach("reply", "malformed reply")
    number = isinstance(reward, int | float) and not isinstance(reward, bool) and math.isfinite(reward)
    known = outcome in ("ok", "error", "breach", "bad_reference")
    if not (number or reward is None) or not known or not isinstance(detail, str):
        return breach("reply", "malformed reply")
    return {"reward": reward, "outcome": outcome, "detail": detail[:500]}


def breach(kind: str, what: str) -> Reply:
    return {"reward": 0.0, "outcome": "breach", "detail": f"{kind}: {what}"}
