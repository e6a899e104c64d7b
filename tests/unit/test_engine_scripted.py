"""The scripted engine behaves like an engine: exact ids and log-probs, budget, stops."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from coterie.engines.scripted import Answer, ScriptedEngine
from coterie.errors import UserError
from coterie.types import Sampling, StopReason


class Letters:
    eos_ids = frozenset({0})

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in ids if i)


LETTERS = Letters()


def test_a_table_answers_by_what_the_prompt_contains() -> None:
    engine = ScriptedEngine(LETTERS, {"2+2": ["4", Answer("5", logprob=-2.0)], "2+2=": ["yes"]})
    prompts = [LETTERS.encode("what is 2+2?"), LETTERS.encode("is 2+2=4?")]
    out = {(i, j): s for i, j, s in engine.generate(prompts, [3, 1], Sampling(8), [0, 1])}
    assert [LETTERS.decode(out[0, j].token_ids.tolist()) for j in range(3)] == ["4", "5", "4"]
    assert out[0, 0].token_ids.tolist() == [ord("4"), 0]
    assert out[0, 1].logprobs.tolist() == [-2.0, -2.0]
    assert out[0, 0].stop_reason is StopReason.EOS
    assert LETTERS.decode(out[1, 0].token_ids.tolist()) == "yes"
    assert engine.requests[0][2] == (0, 1)


def test_a_function_sees_prompt_and_sample_index() -> None:
    engine = ScriptedEngine(LETTERS, lambda prompt, j: f"{prompt}{j}")
    out = [LETTERS.decode(s.token_ids.tolist()) for _, _, s in engine.generate([[65]], 2, Sampling(8), [0])]
    assert out == ["A0", "A1"]


def test_budget_and_stop_strings_hold() -> None:
    engine = ScriptedEngine(LETTERS, lambda prompt, j: Answer("ab", eos=False))
    (_, _, cut) = next(engine.generate([[65]], 1, Sampling(5), [0]))
    assert (LETTERS.decode(cut.token_ids.tolist()), cut.stop_reason) == ("ababa", StopReason.LENGTH)
    (_, _, stopped) = next(engine.generate([[65]], 1, Sampling(5, stop=("ba",)), [0]))
    assert (LETTERS.decode(stopped.token_ids.tolist()), stopped.stop_string) == ("aba", "ba")


def test_a_prompt_without_answer_is_an_error() -> None:
    with pytest.raises(UserError, match="no answer"):
        list(ScriptedEngine(LETTERS, {"x": ["y"]}).generate([[65]], 1, Sampling(5), [0]))
    with pytest.raises(UserError, match="no tokens"):
        ScriptedEngine(LETTERS, {"x": ["y"]}).generate([[]], 1, Sampling(5), [0])
