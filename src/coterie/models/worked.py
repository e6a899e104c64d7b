"""Worked answers, one function a task: ``(item, hand) -> (work, final answer)``.

``item`` is a reasoning-gym entry. With a hand that does not slip the final answer is right; tests check that with the
library's own scorer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from random import Random
from typing import Any

from coterie.errors import UserError
from coterie.models import tiny_tasks
from coterie.models.hand import Hand
from coterie.tasks.base import parse_id
from coterie.types import Problem

Item = dict[str, Any]


def chain_sum(item: Item, hand: Hand) -> tuple[str, str]:
    """38-57=-19,-19-10=-29"""
    first, *rest = item["metadata"]["expression"].split()
    total, work = int(first), []
    for op, term in zip(rest[::2], rest[1::2], strict=True):
        result = hand.number(total + int(term) if op == "+" else total - int(term))
        work.append(f"{total}{op}{term}={result}")
        total = result
    return ",".join(work), str(total)


def products(item: Item, hand: Hand) -> tuple[str, str]:
    """3*7=21,21*4=84"""
    total, *rest = (int(x) for x in item["metadata"]["expression"].split(" * "))
    work = []
    for factor in rest:
        result = hand.number(total * factor)
        work.append(f"{total}*{factor}={result}")
        total = result
    return ",".join(work), str(total)


EQUATION = re.compile(r"(?:(\d+) - )?(?:(\d+)\*)?[a-z](?: ([+-]) (\d+))? = (-?\d+)")


def simple_equations(item: Item, hand: Hand) -> tuple[str, str]:
    """3*x + 5 = 20: 20-5=15,15/3=5"""
    match = EQUATION.fullmatch(item["metadata"]["equation"])
    assert match, item["metadata"]["equation"]
    before, factor, op, after, right = match.groups()
    value, work = int(right), []
    if before or after:
        left, sign, term = (int(before), "-", value) if before else (value, "-" if op == "+" else "+", int(after))
        value = hand.number(left - term if sign == "-" else left + term)
        work.append(f"{left}{sign}{term}={value}")
    if factor:
        result = hand.number(value // int(factor))
        work.append(f"{value}/{factor}={result}")
        value = result
    return ",".join(work), str(value)


def spell_backward(item: Item, hand: Hand) -> tuple[str, str]:
    """sun: s1u2n3"""
    letters = [hand.choice(c, "abcdefghijklmnopqrstuvwxyz") for c in item["metadata"]["word"]]
    work = "".join(f"{c}{i}" for i, c in enumerate(letters, 1))
    back = letters[::-1]
    at = hand.rng.randrange(len(back) - 1)
    swapped = [*back[:at], back[at + 1], back[at], *back[at + 2 :]]
    return work, "".join(hand.step(back, lambda: swapped))


def letter_counting(item: Item, hand: Hand) -> tuple[str, str]:
    """The count in each word, then the sum: 2+0+1=3"""
    letter, words = item["metadata"]["target_letter"], item["metadata"]["span"]
    counts = [hand.number(word.lower().count(letter), low=0) for word in words]
    total = hand.number(sum(counts), low=0)
    return "+".join(map(str, counts)) + f"={total}", str(total)


def word_sorting(item: Item, hand: Hand) -> tuple[str, str]:
    """The first letters in order, then the words."""
    order = list(item["metadata"]["sorted_words"])

    def other(words: list[str]) -> list[str]:
        shuffled = hand.rng.sample(words, len(words))
        return shuffled if shuffled != words else [*words[1:], words[0]]

    order = hand.step(order, lambda: other(order))
    work = "".join(word[0] for word in order)
    final = hand.step(order, lambda: other(order))
    return work, ", ".join(final)


def gcd(item: Item, hand: Hand) -> tuple[str, str]:
    """The chain of remainders: 84,36,12,0"""
    a, b = sorted(item["metadata"]["numbers"], reverse=True)
    chain = [a, b]
    while b:
        a, b = b, hand.number(a % b, low=0, high=b - 1)
        chain.append(b)
    return ",".join(map(str, chain)), str(a)


def prime_factorization(item: Item, hand: Hand) -> tuple[str, str]:
    """84/2=42/2=21/3=7"""
    n = item["metadata"]["number"]
    work = str(n)
    factors: list[int] = []
    while True:
        divisor = next((d for d in range(2, n) if d * d <= n and n % d == 0), None)  # None: n is prime, stop
        divisor = hand.choice(divisor, [d for d in (2, 3, 5, 7, None) if d is None or d < n])
        if divisor is None:
            return work, "×".join(map(str, [*factors, n]))
        factors.append(divisor)
        n = hand.number(max(2, n // divisor), low=2, high=max(2, n // divisor + 10))
        work += f"/{divisor}={n}"


def count_bits(item: Item, hand: Hand) -> tuple[str, str]:
    """Halve down to 1; a plus after each odd number: 37+18,9+4,2,1+"""
    n, work, ones = item["metadata"]["number"], "", 0
    while True:
        odd = hand.choice(n % 2, (0, 1))
        ones += odd
        work += f"{n}{'+' if odd else ','}"
        if n <= 1:
            return work, str(hand.number(ones, low=0))
        n = hand.number(n // 2, low=1, high=n - 1)


RELATIONS = (
    "mother",
    "father",
    "sister",
    "brother",
    "daughter",
    "son",
    "wife",
    "husband",
    "grandmother",
    "grandfather",
    "mother-in-law",
    "father-in-law",
)


@cache
def _men() -> frozenset[str]:
    """The men's names of the task's own parameters: the problem itself does not always say who is one."""
    return frozenset(tiny_tasks("logic")["family_relationships"].params["male_names"])


def family_relationships(item: Item, hand: Hand) -> tuple[str, str]:
    """Sex and generation of the two people (m1,f3), then the relation."""
    story, meta = item["question"].split("\n\n")[0], item["metadata"]
    couples = re.findall(r"(\w+) is married to (\w+)\.", story)
    called = re.findall(r"called ([^.]*)\.", story)
    children = {name for names in called for name in re.split(r", | and ", names)}
    married = {name: other for a, b in couples for name, other in ((a, b), (b, a))}

    def code(name: str) -> tuple[str, int]:
        spouse = married.get(name)
        generation = 3 if spouse is None else 2 if name in children or spouse in children else 1
        return ("m" if name in _men() else "f"), generation

    codes = [(sex, generation) for sex in "mf" for generation in (1, 2, 3)]
    p, q = (hand.choice(code(meta[k]), codes) for k in ("person1", "person2"))
    relation = hand.choice(_relation(p, q) or hand.rng.choice(RELATIONS), RELATIONS)
    return f"{p[0]}{p[1]},{q[0]}{q[1]}", relation


def _relation(p: tuple[str, int], q: tuple[str, int]) -> str | None:
    """What p is to q (the library answers with the other person's word for in-laws)."""
    step = q[1] - p[1]
    if p == ("f", 2) and step == -1:
        return "mother-in-law" if q[0] == "f" else "father-in-law"
    pairs = {0: ("sister", "brother") if p[1] == 3 else ("wife", "husband"), 1: ("mother", "father")}
    pairs |= {2: ("grandmother", "grandfather"), -1: ("daughter", "son")}
    return pairs[step][0 if p[0] == "f" else 1] if step in pairs else None


def ab(item: Item, hand: Hand) -> tuple[str, str]:
    """For each token that faces left: what still faces right behind it, and itself (small) if it passed them all."""
    program = item["question"].split("program:\n\n")[1].split("\n")[0].split()
    stack, out, work = "", "", []
    for token in program:
        if token[1] == "#":
            stack += token[0]
            continue
        at = stack.rfind(token[1])  # the nearest equal one annihilates it; it passes the others
        right = (stack, token[1].lower()) if at < 0 else (stack[:at] + stack[at + 1 :], "")
        stack, passed = hand.step(right, partial(_ab_slip, hand.rng, stack, token[1], right))
        out += passed
        work.append(stack + passed)
    final = [f"#{c.upper()}" for c in out] + [f"{c}#" for c in stack]
    return ",".join(work), " ".join(final)


def _ab_slip(rng: Random, stack: str, letter: str, right: tuple[str, str]) -> tuple[str, str]:
    options = [(stack, letter.lower()), (stack, "")]
    options += [(stack[:i] + stack[i + 1 :], "") for i in range(len(stack))]
    return rng.choice([o for o in options if o != right])


SIDES = {"top": "t", "right": "r", "front": "f", "left": "l", "back": "k", "bottom": "b"}  # and how work writes them
CYCLES = {  # side brought to the top -> where each side's colour comes from
    "front": {"top": "front", "front": "bottom", "bottom": "back", "back": "top"},
    "right": {"top": "right", "right": "bottom", "bottom": "left", "left": "top"},
    "back": {"top": "back", "back": "bottom", "bottom": "front", "front": "top"},
    "left": {"top": "left", "left": "bottom", "bottom": "right", "right": "top"},
    "bottom": {"top": "bottom", "bottom": "top", "front": "back", "back": "front"},
}


def color_cube_rotation(item: Item, hand: Hand) -> tuple[str, str]:
    """Where the asked side was before each rotation, last first: b<k<t"""
    meta = item["metadata"]
    side = meta["target_side"]
    work = [SIDES[side]]
    for rotation in reversed(meta["rotations"]):
        side = hand.choice(CYCLES[rotation].get(side, side), list(SIDES))
        work.append(SIDES[side])
    colors = meta["initial_state"]
    return "<".join(work), hand.choice(colors[side], list(colors.values()))


WORKED: dict[str, Callable[[Item, Hand], tuple[str, str]]] = {
    "chain_sum": chain_sum,
    "products": products,
    "simple_equations": simple_equations,
    "spell_backward": spell_backward,
    "letter_counting": letter_counting,
    "word_sorting": word_sorting,
    "family_relationships": family_relationships,
    "ab": ab,
    "color_cube_rotation": color_cube_rotation,
    "gcd": gcd,
    "prime_factorization": prime_factorization,
    "count_bits": count_bits,
}


def answer(task: str, item: Item, rng: Random, slip: float) -> str:
    """``work<answer>final``; with probability ``slip`` one step of it, chosen at random, is wrong."""
    write = WORKED[task]
    hand = Hand(rng)
    work, final = write(item, hand)
    if hand.steps and rng.random() < slip:
        work, final = write(item, Hand(rng, rng.randrange(hand.steps)))
    return f"{work}<answer>{final}"


def worked_answer(problem: Problem, seed: int) -> str:
    """A right worked answer to a problem of one of these tasks: what `sft.answers` names to imitate.

    Raises:
        UserError: another task.
    """
    task = parse_id(problem.id).name
    if task not in WORKED:
        raise UserError(f"{task}: no worked answers are known; there are some for {', '.join(WORKED)}")
    return answer(task, problem.metadata["entry"], Random(seed), slip=0.0)
