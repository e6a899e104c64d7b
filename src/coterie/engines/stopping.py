"""When a row ends: end tokens, stop strings, the token budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coterie.types import StopReason

_MARGIN = 8  # characters decoded before the longest stop string: decoders treat the start of a text specially


class Stopping:
    """Decides after each sampled token whether the row has ended. Nothing is ever appended or taken away."""

    def __init__(
        self, eos_ids: frozenset[int], stop: Sequence[str], max_new_tokens: int, decode: Callable[[Sequence[int]], str]
    ) -> None:
        self.eos_ids = eos_ids
        self.max_new_tokens = max_new_tokens
        self.stop = tuple(stop)
        self._decode = decode
        self._longest = max(map(len, stop), default=0)
        self._may_end: dict[int, bool] = {}

    def check(self, ids: Sequence[int]) -> tuple[StopReason, str | None] | None:
        """Why the row that has sampled ``ids`` so far ends with its last token, or None if it goes on."""
        if ids[-1] in self.eos_ids:
            return StopReason.EOS, None
        if self.stop and self._may_end_a_stop(ids[-1]):
            found = self._find(ids)
            if found is not None:
                return StopReason.STOP, found
        if len(ids) >= self.max_new_tokens:
            return StopReason.LENGTH, None
        return None

    def _may_end_a_stop(self, token: int) -> bool:
        """Whether this token can write the last character of a stop string: most cannot, and need no decoding."""
        known = self._may_end.get(token)
        if known is None:
            text = self._decode([token])
            # Part of a character, or text that only shows in context (a space at the start): decide by decoding.
            unclear = not text.strip() or "\ufffd" in text
            known = unclear or any(s[-1] in text for s in self.stop)
            self._may_end[token] = known
        return known

    def _find(self, ids: Sequence[int]) -> str | None:
        """The stop string that ends first in the tail of ``ids``; only as many tokens as it can span are decoded."""
        wanted = self._longest + _MARGIN
        count = wanted
        text = self._decode(ids[-count:])
        while len(text) < wanted and count < len(ids):
            count *= 2
            text = self._decode(ids[-count:])
        ends = [(at + len(s), -len(s), s) for s in self.stop if (at := text.find(s)) >= 0]
        return min(ends)[2] if ends else None
