"""Helpers made of code or a table: deterministic, for experiments and tests."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from coterie.errors import UserError
from coterie.helpers.protocol import HelperFailure, HelperReply, HelperRequest, Outcome
from coterie.importing import load_function


@dataclass(frozen=True)
class ScriptedHelper:
    """``function(request) -> reply text``, or text and its log-prob. What it raises counts as a failure of the helper, not
    of the rollout."""

    name: str
    function: Callable[[HelperRequest], str | tuple[str, float]]

    def respond_batch(self, requests: Sequence[HelperRequest]) -> list[Outcome]:
        return [self._one(r) for r in requests]

    def _one(self, request: HelperRequest) -> Outcome:
        start = time.monotonic()
        try:  # the edge to a user's code: one question's error must not end the other rollouts
            said = self.function(request)
            text, logprob = (said, None) if isinstance(said, str) else (said[0], float(said[1]))
        except Exception as e:
            return HelperFailure("script", f"{type(e).__name__}: {e}", self.name, time.monotonic() - start)
        if not isinstance(text, str) or not text.strip():
            return HelperFailure("empty", f"returned {type(text).__name__}, not text", self.name)
        known = logprob is not None and math.isfinite(logprob) and logprob <= 0
        waited = time.monotonic() - start
        return HelperReply(
            text, self.name, span_logprob=logprob if known else None, latency_s=waited, offered_logprobs=known
        )


def table_helper(table: Mapping[str, str]) -> ScriptedHelper:
    """Replies by exact query; ``*`` answers everything else."""

    def look_up(request: HelperRequest) -> str:
        reply = table.get(request.query, table.get("*"))
        if reply is None:
            raise LookupError(f"no entry for {request.query!r} and no '*'")
        return reply

    return ScriptedHelper("table", look_up)


def call_helper(spec: str, where: str) -> ScriptedHelper:
    """``module:function`` or ``path/file.py:function`` (relative to the working directory).

    Raises:
        UserError: no such file, module or function; ``where`` says which setting named it.
    """
    try:
        return ScriptedHelper(spec, load_function(spec))
    except UserError as e:
        raise UserError(f"{where}: {e}") from e
