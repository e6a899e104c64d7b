"""The table of extraction cases (known faults RW-08, 15-22, 26, 27; RO-09, RO-11), and that extraction is linear."""

from __future__ import annotations

import signal

import pytest

from coterie.tasks.extract import extract_answer, extract_code, well_formed

CASES = {
    # tags (RW-08)
    "<answer>5</answer>": "5",
    "<answer>5": "5",
    "38-57=-19,-19-10=-29<answer>-29": "-29",
    "<ANSWER> 5 </Answer>": "5",
    "<answer></answer>": None,
    "<answer><answer>5</answer>": "5",
    "<answer><answer>5</answer></answer>": "5",
    "<answer>4</answer> no: <answer>5</answer>": "5",
    "<answer>5</answer><answer></answer>": "5",
    "<answer>a\nb</answer>": "a\nb",
    r"\boxed{4} <answer>5</answer>": "5",
    r"<answer>5</answer> \boxed{4}": "5",
    # boxes (RW-16 to RW-19)
    r"\boxed{\frac{1}{3}}": r"\frac{1}{3}",
    r"\fbox{7}": "7",
    r"so \boxed 4 and then \boxed{5}": "5",
    r"so \boxed{5} and then \boxed 4$": "4",
    r"<answer>\boxed{42}</answer>": "42",
    r"<answer>$\boxed{42}$</answer>": "42",
    r"\boxed{\boxed{5}}": "5",
    r"\boxed{\{1, 2\}}": r"\{1, 2\}",
    r"\boxed{3} then \boxed{4": "3",
    r"\boxed{": None,
    # other marks (RW-15, RW-22)
    "48 / 2 = 24\n#### 24": "24",
    "#### 1\n#### 2\n": "2",
    "The answer is $1,234.00": "$1,234.00",
    "The answer is 3.14. I am sure.": "3.14",
    "Long text.\nFinal Answer: **73**": "73",
    "**Final Answer:** 73": "73",
    "the answer is 4. Wait. The answer is 5": "5",
    "I think 42": None,
    "12": "12",
    " -3.\n": "-3",
    "olleh": "olleh",
    "12 13": None,
    "</b>": None,
    "": None,
    # hedging (RW-26): the whole text, which equals no single answer
    "<answer>A or B or C</answer>": "A or B or C",
    # run-on text (RO-09)
    "answer is 8. Q: 2+2? answer is 4": "8",
    "answer: 8. Q: 2+2? answer: 4": "8",
    "<answer>8</answer> Question: 2+2? <answer>4</answer>": "8",
    "<answer>8\nQ: 2+2? <answer>4": "8",
    r"\boxed{8} User: and 2+2? \boxed{4}": "8",
    "Q: 2+2? <answer>4</answer>": "4",
    # thoughts (RO-11)
    "<think>maybe <answer>3</answer></think><answer>4</answer>": "4",
    "2+2=4</think><answer>4</answer>": "4",
    "<think>so <answer>4</answer>": None,
    "<think>a</think>\\boxed{1}<think>b</think>\\boxed{2}": "2",
}


@pytest.mark.parametrize("text", CASES)
def test_case(text: str) -> None:
    assert extract_answer(text) == CASES[text]


def test_rw21_an_answer_far_from_the_end_is_found() -> None:
    assert extract_answer(r"\boxed{5}" + " remark" * 5000) == "5"


@pytest.mark.parametrize(
    "piece",
    [
        r"\boxed{",
        r"\boxed ",
        "<answer>",
        "<think>",
        "</think>",
        "{",
        "#### ",
        "answer is ",
        "Q: ",
        "$",
        "```python\n",
        "\\",
    ],
)
def test_rw20_pathological_texts_do_not_hang(piece: str) -> None:
    """50,000 repetitions: at once if the time is linear in the length; with a quadratic rule, hours."""

    def hang(signum: int, frame: object) -> None:
        raise AssertionError("extraction hangs")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(60)
    try:
        extract_answer(piece * 50_000)
        extract_code(piece * 50_000)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("<think>a</think><answer>b</answer>", True),
        ("2+2=4</think><answer>4</answer>", True),  # RO-11: the template opened the thought
        ("<think></think><answer>b</answer>", False),  # RW-27
        ("<think>a</think><think>b</think><answer>c</answer>", False),
        ("<think>a</think><answer></answer>", False),
        ("<think>a</think><answer>b</answer> more", False),
        ("<think>a</think><answer>b</answer><answer>b</answer>", False),
        ("<answer>b</answer>", False),
        ("b", False),
    ],
)
def test_rw27_format_wants_exactly_one_block_each(text: str, good: bool) -> None:
    assert well_formed(text) is good


def test_code_is_taken_from_the_tag_or_the_last_fence() -> None:
    assert extract_code("```python\nx = 1\n```\nbetter:\n```py\nx = 2\n```") == "x = 2\n"
    assert extract_code("```\nx = 1\n```<answer>x = 3</answer>") == "x = 3"
    assert extract_code("<answer>```python\nx = 4\n```</answer>") == "x = 4\n"
    assert extract_code("x = 5") is None
