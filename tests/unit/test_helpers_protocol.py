"""Finding a question in the policy's words."""

from __future__ import annotations

import pytest

from coterie.helpers.protocol import InvalidQuery, Query, Tags, answered, parse_query

TAGS = (Tags("verify", "<verify>", "</verify>"), Tags("knowledge", "<knowledge>", "</knowledge>"))
SHORT = (Tags("verify", "v(", ")"), Tags("knowledge", "k(", ")"))


@pytest.mark.parametrize(
    ("text", "stop", "tags", "found"),
    [
        ("so <verify>1+1=2</verify>", "</verify>", TAGS, Query("verify", "1+1=2")),
        ("<verify> 1 </verify> \n", "</verify>", TAGS, Query("verify", "1")),  # the token ran on after the tag
        ("<verify>a<verify>b</verify>", "</verify>", TAGS, Query("verify", "b")),  # the last one opened counts
        ("<knowledge>a<verify>b</verify>", "</verify>", TAGS, Query("verify", "b")),
        ("v(1+1)", ")", SHORT, Query("verify", "1+1")),
        ("v(x k(y)", ")", SHORT, Query("knowledge", "y")),  # roles may share an end tag
        ("no tag</verify>", "</verify>", TAGS, InvalidQuery("verify", "no start tag")),
        ("(a)", ")", SHORT, InvalidQuery("", "no start tag")),
        ("<knowledge>a</verify>", "</verify>", TAGS, InvalidQuery("verify", "<knowledge> closed by </verify>")),
        ("<verify> \n</verify>", "</verify>", TAGS, InvalidQuery("verify", "empty question")),
    ],
)
def test_parse(text: str, stop: str, tags: tuple[Tags, ...], found: Query | InvalidQuery) -> None:
    assert parse_query(text, stop, tags) == found


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("<answer>4</answer>", True),
        (r"so \boxed{\frac{1}{2}} it is", True),
        ("<answer>4", False),  # may still be speaking of the tag
        (r"write \boxed{ when done", False),
        ("", False),
    ],
)
def test_answered(text: str, want: bool) -> None:
    assert answered(text) is want
