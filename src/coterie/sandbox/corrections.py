"""Conditions that some library scorers forget (reasoning-gym 0.1.25): a full score also needs these.

- ``game_of_life_halting`` compares truth values of texts, and every text that is not empty is true: anything is right where
  the answer is "True".
- ``puzzle24`` accepts any four numbers in range, not only the given ones, and cuts 24.9 to 24.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from coterie.tasks.verifiers import normalise

Entry = dict[str, Any]


def _same_truth_value(answer: str, entry: Entry) -> bool:
    return normalise(answer).lower() == str(entry["answer"]).lower()


def _given_numbers_make_24(answer: str, entry: Entry) -> bool:
    from sympy.parsing.sympy_parser import parse_expr

    used = sorted(int(n) for n in re.findall(r"\d+", answer))
    return used == sorted(entry["metadata"]["numbers"]) and bool(parse_expr(answer) == 24)


ALSO: dict[str, Callable[[str, Entry], bool]] = {
    "game_of_life_halting": _same_truth_value,
    "puzzle24": _given_numbers_make_24,
}
