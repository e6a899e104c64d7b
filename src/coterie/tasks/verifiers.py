"""Verifiers that only compare texts and numbers. They run in the trainer; everything else runs in scoring workers.

Normalisation, applied to answer and reference alike: surrounding white space, ``$...$``, ``**``, backquotes and one final
full stop go; runs of white space become one space; spaces after commas go; the minus sign U+2212 becomes ``-``; a currency
sign before a number and thousands commas in a number go. Case matters.

Numbers (``numeric``): integers, decimals, ``a/b``, ``1e-3``, ``\\frac{a}{b}``, with sign, thousands commas, currency sign. A
percent sign always means "divided by 100": ``28%`` is right for 0.28 and wrong for 28. An integer or fraction as reference asks
for the exact value; a decimal one allows a relative error of 1e-9 (for the rounding of floats), whatever its size.
"""

from __future__ import annotations

import re
from fractions import Fraction

from coterie.tasks.extract import well_formed

REL_TOL = Fraction(1, 10**9)
_MAX_DIGITS = 400  # of a number's text and of its exponent: keeps exact arithmetic cheap
_SPACE = re.compile(r"\s+")
_COMMA = re.compile(r" ?, ?")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?%?")
_CURRENCY = re.compile(r"([+-]?)[$€£](?=[\d.])")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_FRAC = re.compile(r"([+-]?)\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")


class BadReference(ValueError):
    """The reference itself cannot be read by the verifier: the problem is skipped and counted, not scored."""


def normalise(text: str) -> str:
    """One spelling for texts that mean the same answer (rules in the module's docstring)."""
    out = _COMMA.sub(",", _SPACE.sub(" ", text.replace("\u2212", "-")).strip())
    before = None
    while out != before:
        before = out
        for mark in ("$", "**", "`"):
            if out.startswith(mark) and out.endswith(mark) and len(out) > 2 * len(mark):
                out = out[len(mark) : -len(mark)].strip()
        if out.endswith(".") and not out.endswith(".."):
            out = out[:-1].rstrip()
    out = _CURRENCY.sub(r"\1", out, count=1)
    return out.replace(",", "") if _THOUSANDS.fullmatch(out) else out


def exact(answer: str, reference: str) -> float:
    """1 if both are the same text after normalisation, else 0."""
    return float(normalise(answer) == normalise(reference))


def numeric(answer: str, reference: str) -> float:
    """1 if both are the same number (rules in the module's docstring), else 0.

    Raises:
        BadReference: the reference is not a number.
    """
    gold = parse_number(reference)
    if gold is None:
        raise BadReference(f"reference {reference[:80]!r} is not a number")
    value = parse_number(answer)
    if value is None:
        return 0.0
    return float(same_number(value, gold, tolerant="." in reference or "e" in reference.lower()))


def same_number(value: Fraction, gold: Fraction, *, tolerant: bool) -> bool:
    return value == gold or (tolerant and abs(value - gold) <= REL_TOL * abs(gold))


def parse_number(text: str) -> Fraction | None:
    """The exact value of a number's text, or None if it is not one number."""
    clean = normalise(text).replace("\\%", "%").replace(" %", "%")
    if len(clean) > _MAX_DIGITS:
        return None
    scale = Fraction(1)
    if clean.endswith("%"):
        clean, scale = clean[:-1], Fraction(1, 100)
    frac = _FRAC.fullmatch(clean)
    top, slash, bottom = (frac.group(1) + frac.group(2), "/", frac.group(3)) if frac else clean.partition("/")
    value = _decimal(top.strip())
    below = _decimal(bottom.strip()) if slash else Fraction(1)
    return None if value is None or not below else value / below * scale


def format_ok(text: str) -> float:
    """1 if the whole response is one thought and one answer, each closed and not empty."""
    return float(well_formed(text))


def _decimal(text: str) -> Fraction | None:
    if not _NUMBER.fullmatch(text) or not text.isascii():
        return None
    _, _, exponent = text.lower().partition("e")
    if exponent and abs(int(exponent)) > _MAX_DIGITS:
        return None
    return Fraction(text)
