"""Making a helper's words safe to stand inside a trajectory.

Helpers write text that nobody checked. It must not open or close our tags, end the policy's turn, carry a hidden
reasoning block, hand over the final answer, or drive the terminal on which transcripts are shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

REMOVED = "[removed]"

_THINK_TAG = re.compile(r"</?think>", re.IGNORECASE)
_THINK = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL | re.IGNORECASE)
_ANSWER = re.compile(r"<answer>.*?(?:</answer>|\Z)", re.DOTALL | re.IGNORECASE)
_STRAY = re.compile(r"</?(?:answer|think)>", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def one_line(text: str) -> str:
    """Foreign text for a log line: no line breaks, nothing that drives a terminal."""
    return _CONTROL.sub("", " ".join(text.split()))


def strip_think(text: str) -> str:
    """``text`` without reasoning blocks. A block never closed runs to the end; one never opened began in the prompt."""
    first = _THINK_TAG.search(text)
    if first is not None and first.group().startswith("</"):
        text = text[first.end() :]
    return _THINK.sub("", text)


def sanitise(text: str, forbidden: Sequence[str], *, cut_answers: bool) -> str:
    """``text`` without think blocks, control characters and anything in ``forbidden`` (our tags, special tokens).

    Equal to ``text`` exactly if nothing had to be changed: only then are a helper's own ids and log-probs still those of
    the words. Removing one thing can put another together (``<ver<think></think>ify>``), so it repeats until nothing
    changes; every pass shortens the text or takes a ``<`` out of it.
    """
    while True:
        clean = _once(text, forbidden, cut_answers)
        if clean == text:
            return text
        text = clean


def _once(text: str, forbidden: Iterable[str], cut_answers: bool) -> str:
    text = _CONTROL.sub("", text.replace("\r\n", "\n"))
    text = strip_think(text)
    if cut_answers:
        text = _STRAY.sub("", _ANSWER.sub(REMOVED, _cut_boxed(text)))
    for tag in forbidden:
        text = re.sub(re.escape(tag), lambda m: _harmless(m.group()), text, flags=re.IGNORECASE)
    return text


def _harmless(tag: str) -> str:
    """``<verify>`` -> ``(verify)``, ``v(`` -> ``v``: readable, and no tag any more."""
    if tag.startswith("<") and tag.endswith(">") and len(tag) > 2:
        inner = tag[1:-1].strip("|<>")
        return f"({inner})" if inner else ""
    return re.sub(r"[^\w\s]", "", tag)


def _cut_boxed(text: str) -> str:
    r"""Replace every ``\boxed{..}`` (braces nested to any depth; to the end of the text if never closed)."""
    out, rest = "", text
    while (at := re.search(r"\\f?boxed\s*\{", rest)) is not None:
        depth, end = 1, at.end()
        while end < len(rest) and depth:
            depth += {"{": 1, "}": -1}.get(rest[end], 0)
            end += 1
        out, rest = out + rest[: at.start()] + REMOVED, rest[end:]
    return out + rest
