"""The task family of experiments/helpers.toml: three letters are to be decoded with a table, and in an order, that the model
does not know. `tiny` can copy letters; nothing in its training says what they stand for.

    fgh                                         the problem
    /fgh:hgf,h=b,g=a,f=k<answer>bak             a worked answer: the order, letter by letter, the answer
    /fgh:hgf,h=b,g=a,f=k!bak?ok<answer>bak      the same with helpers, who write what follows `:`, `=` and `?`

`python experiments/cipher/cipher.py` writes the problems. `cold_start` teaches the form, in both prompts, with orders and
letters drawn at random: neither the table nor the order is in it.
"""

from __future__ import annotations

import json
import math
import random
from itertools import count, product
from pathlib import Path
from typing import Any

LETTERS = "abcdefghijkl"
LENGTH = 3
ERRS = 0.1  # share of a knowledge helper's replies that are wrong
BLOCK = "?"  # what the tagged prompt begins with (prompts.toml beside this file)
TABLE = dict(zip(LETTERS, random.Random(20).sample(LETTERS, len(LETTERS)), strict=True))


def order(word: str) -> str:
    """The order in which letters are to be decoded: from the last to the first."""
    return word[::-1]


def decoded(word: str) -> str:
    return "".join(TABLE[c] for c in order(word))


def knowledge(request: Any) -> tuple[str, float]:
    """What one letter stands for, and the log-prob of saying so: wrong in one case of ten."""
    return _said(request.query, random.Random(request.seed))


def _said(letter: str, rng: random.Random) -> tuple[str, float]:
    if rng.random() < ERRS:
        others = sorted(set(LETTERS) - {TABLE[letter]})
        return rng.choice(others), math.log(ERRS / len(others))
    return TABLE[letter], math.log(1 - ERRS)


def reasoning(request: Any) -> tuple[str, float]:
    """The next step: in which order to go through the letters of the problem."""
    return order(request.query), 0.0


def verify(request: Any) -> tuple[str, float]:
    """Whether the proposed answer is right: ok or no, nothing else."""
    return "ok" if request.query == decoded(request.question) else "no", 0.0


def worked(word: str, steps: str, letters: str) -> str:
    return f"/{word}:{steps}" + "".join(f",{c}={d}" for c, d in zip(steps, letters, strict=True))


def cold_start(problem: Any, seed: int) -> str:
    """A worked answer of the right form with random contents."""
    rng = random.Random(seed)
    word = problem.prompt[-LENGTH:]
    letters = "".join(rng.choices(LETTERS, k=LENGTH))
    text = worked(word, "".join(rng.sample(word, LENGTH)), letters)
    if problem.prompt.startswith(BLOCK) and rng.random() < 0.5:
        slip = rng.random() < 0.2
        shown = "".join(rng.choices(LETTERS, k=LENGTH)) if slip else letters
        text += f"!{shown}?{'no' if slip or rng.random() < 0.2 else 'ok'}"
    return f"{text}<answer>{letters}"


def helpers_words(problem: Any, seed: int) -> str:
    """What the helpers say, their slips included, as a worked answer to the plain prompt."""
    word, rng = problem.prompt, random.Random(seed)
    letters = "".join(_said(c, rng)[0] for c in order(word))
    return f"{worked(word, order(word), letters)}<answer>{letters}"


def helpers_right_words(problem: Any, seed: int) -> str:
    """The same, drawn until the answer is right: what is left of it after a check of the answers."""
    for i in count():
        text = helpers_words(problem, seed + i)
        if text.endswith(f"<answer>{decoded(problem.prompt)}"):
            return text
    raise AssertionError


def main() -> None:
    words = ["".join(w) for w in product(LETTERS, repeat=LENGTH)]
    here = Path(__file__).parent
    for name, block in (("plain", ""), ("tagged", f"{BLOCK}\n\n")):
        lines = [json.dumps({"prompt": block + w, "answer": decoded(w)}) for w in words]
        (here / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
