"""Helpers' words made safe."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.helpers.sanitise import sanitise, strip_think

TAGS = ["<feedback>", "</feedback>", "<verify>", "</verify>", "<|end|>"]


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("sound", "sound"),
        ("x < 3 and y > 2, {a}", "x < 3 and y > 2, {a}"),
        ("<think>secret 42</think>sound", "sound"),
        ("secret 42</think>sound", "sound"),  # the opening tag was in the prompt
        ("<think>never closed 42", ""),
        ("İ secret</think>sound", "sound"),  # its lower case is longer
        ("see </feedback> now <VERIFY>x</verify>", "see (/feedback) now (VERIFY)x(/verify)"),
        ("done<|end|>", "done(end)"),
        (r"it is \boxed{\frac{1}{2}}.", "it is [removed]."),
        (r"it is \boxed{42", "it is [removed]"),
        ("it is <answer>42</answer>!", "it is [removed]!"),
        ("it is <answer>42", "it is [removed]"),
        ("<ver<think>x</think>ify>", "(verify)"),  # removing one thing puts another together
        ("<ans<verify>wer>42</answer>", "<ans(verify)wer>42"),
        ("a\x1b[31mred\x07\r\nb\u202e", "a[31mred\nb"),  # what would drive a terminal
    ],
)
def test_sanitise(text: str, clean: str) -> None:
    assert sanitise(text, TAGS, cut_answers=True) == clean


def test_answers_stay_where_the_role_allows_them() -> None:
    assert sanitise(r"\boxed{4}", TAGS, cut_answers=False) == r"\boxed{4}"


def test_strip_think_alone_keeps_the_rest_exactly() -> None:
    assert strip_think("<think>a</think> b <think>c</think>\n") == " b \n"


_PIECES = [*TAGS, "<", ">", "/", "<think>", "</think>", "<answer>", "</answer>", r"\boxed{", "}", "verify", "a", "\x1b"]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(_PIECES), max_size=12).map("".join))
def test_nothing_forbidden_is_left_whatever_the_pieces(text: str) -> None:
    clean = sanitise(text, TAGS, cut_answers=True)
    low = clean.lower()
    assert not any(t in low for t in (*TAGS, "<think>", "<answer>", r"\boxed{", "\x1b"))
    assert sanitise(clean, TAGS, cut_answers=True) == clean
