"""Ends of rows: end tokens, stop strings that span tokens, the budget; nothing appended."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer, models
from tokenizers.decoders import ByteLevel
from tokenizers.pre_tokenizers import ByteLevel as ByteLevelSplit

from coterie.engines.stopping import Stopping
from coterie.types import StopReason

PIECES = ["<", "/", "ans", "wer", ">", "8", " ", "</", "answer>", "\n", "wer> Q", "é"]
EOS = 99


def _decode(ids: Sequence[int]) -> str:
    return "".join(PIECES[i] for i in ids if i != EOS)


def _run(ids: list[int], stop: tuple[str, ...], budget: int = 100) -> tuple[int, StopReason, str | None] | None:
    stopping = Stopping(frozenset({EOS}), stop, budget, _decode)
    for t in range(1, len(ids) + 1):
        why = stopping.check(ids[:t])
        if why is not None:
            return t, *why
    return None


def test_eos_ends_and_is_kept() -> None:
    assert _run([5, EOS, 5], ()) == (2, StopReason.EOS, None)


def test_ro07_truncation_is_a_flag_not_a_token() -> None:
    assert _run([5, 5, 5, 5], (), budget=3) == (3, StopReason.LENGTH, None)


@pytest.mark.parametrize("ids", [[5, 0, 1, 2, 3, 4], [5, 7, 8], [5, 0, 1, 2, 10], [7, 2, 3, 4]])
def test_ro08_a_stop_string_ends_with_the_token_that_completes_it(ids: list[int]) -> None:
    assert _run([*ids, 5, 5], ("</answer>",)) == (len(ids), StopReason.STOP, "</answer>")


def test_a_stop_string_is_found_however_long_the_answer() -> None:
    ids = [5, 6] * 40 + [7, 8]
    assert _run(ids, ("\n\n\n", "</answer>")) == (len(ids), StopReason.STOP, "</answer>")


def test_almost_a_stop_string_does_not_end() -> None:
    assert _run([7, 2, 3, 6, 4], ("</answer>",)) is None


def test_white_space_stops() -> None:
    assert _run([5, 9, 5, 9, 9, 5], ("\n\n",)) == (5, StopReason.STOP, "\n\n")


def test_of_two_stops_the_one_that_ends_first_is_named() -> None:
    assert _run([5, 0, 1, 2, 10], ("Q", "</answer>")) == (5, StopReason.STOP, "</answer>")
    assert _run([5, 10], ("> Q", "Q")) == (2, StopReason.STOP, "> Q")  # the longer one on a tie


def test_ro08_byte_tokens_of_one_character() -> None:
    """A byte-level BPE may split a character: its last byte completes the stop string."""
    letters = sorted(ByteLevelSplit.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevelSplit(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    ids = tokenizer.encode("so é→!").ids
    stopping = Stopping(frozenset(), ("é→",), 100, lambda x: tokenizer.decode(list(x)))
    ends = [t for t in range(1, len(ids) + 1) if stopping.check(ids[:t])]
    assert ends[0] == len("so é→".encode())


def test_most_tokens_cost_no_decoding() -> None:
    calls = 0

    def counting(ids: Sequence[int]) -> str:
        nonlocal calls
        calls += 1
        return _decode(ids)

    stopping = Stopping(frozenset({EOS}), ("</answer>",), 10**6, counting)
    ids = [5, 2, 3, 1] * 50
    for t in range(1, len(ids) + 1):
        assert stopping.check(ids[:t]) is None
    assert calls <= 4  # once for each distinct token
