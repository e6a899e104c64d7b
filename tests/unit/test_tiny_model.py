"""The shipped model `tiny`: it loads without network, its tokenizer loses nothing, and it can do its tasks."""

from __future__ import annotations

import string
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from coterie.models import DOMAINS, TINY, tiny_tasks
from coterie.tasks.base import split_of_text

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from tiny.data import Source, all_sources
from tiny.net import check_same, make_model, sample
from tiny.tokens import PAIRS, make_tokenizer

from coterie.models.worked import answer

TASKS = sorted(tiny_tasks())


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(TINY)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(TINY)


@pytest.fixture(scope="module")
def items() -> dict[str, tuple[Source, list[dict[str, Any]]]]:
    return {name: (source, source.items("train", 60, "test")) for name, source in all_sources().items()}


def test_four_domains_hold_every_task_once() -> None:
    listed = [name for names in DOMAINS.values() for name in names]
    assert len(DOMAINS) == 4
    assert sorted(listed) == TASKS
    assert list(tiny_tasks("logic")) == list(DOMAINS["logic"])


def test_model_is_small_tied_float32(model: LlamaForCausalLM) -> None:
    assert 8e5 <= sum(p.numel() for p in model.parameters()) <= 1.2e6
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert sum(f.stat().st_size for f in TINY.iterdir()) < 8e6


def test_special_tokens(tokenizer: PreTrainedTokenizerFast, model: LlamaForCausalLM) -> None:
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert tokenizer.bos_token is None
    assert tokenizer.chat_template is None
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert model.config.vocab_size == len(tokenizer)
    for mark in ("<answer>", "</answer>"):
        assert len(tokenizer.encode(mark, add_special_tokens=False)) == 1
        assert tokenizer.decode(tokenizer.encode(f"1{mark}2"), skip_special_tokens=True) == f"1{mark}2"


def test_every_printable_character_is_known(tokenizer: PreTrainedTokenizerFast) -> None:
    for character in string.printable[:95] + "\n×":
        ids = tokenizer.encode(character)
        assert len(ids) == 1
        assert ids != [tokenizer.unk_token_id]
        assert tokenizer.decode(ids) == character
    assert tokenizer.encode("€") == [tokenizer.unk_token_id]


@pytest.mark.parametrize("task", TASKS)
def test_round_trip_and_length_of_prompts_and_answers(
    task: str, tokenizer: PreTrainedTokenizerFast, items: dict[str, tuple[Source, list[dict[str, Any]]]]
) -> None:
    source, found = items[task]
    rng = Random(0)
    for item in found:
        right, slipped = answer(task, item, rng, 0.0), answer(task, item, rng, 1.0)
        assert source.right(item, right), right
        prompt = tokenizer.encode(item["question"])
        assert len(prompt) <= 40
        for text in (right, slipped):
            ids = tokenizer.encode(text)
            assert tokenizer.unk_token_id not in ids
            assert len(ids) + 1 <= 64
            assert tokenizer.decode(ids) == text
            assert tokenizer.encode(item["question"] + text) == prompt + ids  # nothing merges across the border
        assert tokenizer.decode(prompt) == item["question"]
    wrong = sum(not source.right(item, answer(task, item, rng, 1.0)) for item in found)
    assert wrong > len(found) / 2  # a slip usually costs the answer


@pytest.mark.parametrize("task", TASKS)
def test_problems_are_those_of_the_split(task: str, items: dict[str, tuple[Source, list[dict[str, Any]]]]) -> None:
    source, found = items[task]
    assert {split_of_text(item["question"]) for item in found} == {"train"}
    assert {split_of_text(item["question"]) for item in source.items("eval", 5, "test")} == {"eval"}


def test_slim_forward_pass_equals_the_library(model: LlamaForCausalLM) -> None:
    ids = torch.arange(3 * 50).view(3, 50) % model.config.vocab_size  # [B, T]
    assert check_same(model, ids) < 1e-4


def test_another_size_and_tokenizer(items: dict[str, tuple[Source, list[dict[str, Any]]]]) -> None:
    """Two digits a token: other ids and other cuts, the same text; the slim pass holds at any size."""
    other = make_tokenizer(["What is ", *PAIRS])
    assert other.tokenize("105-7=98<answer>98") == ["10", "5", "-", "7", "=", "98", "<answer>", "98"]
    rng = Random(0)
    for task in ("gcd", "products"):
        for item in items[task][1]:
            text = answer(task, item, rng, 0.0)
            assert other.decode(other.encode(text)) == text
    small = make_model(other, layers=2, width=32)
    assert check_same(small, torch.arange(80).view(2, 40) % len(other)) < 1e-4
    prompts = [other.encode("What is 12"), other.encode("12 + 3 = ")]
    made = [
        sample(small, some, 5, torch.Generator(), other.eos_token_id, greedy=True) for some in ([prompts[0]], prompts)
    ]
    assert made[0][0] == made[1][0], "an answer depends on its neighbour in the batch"


def test_model_answers_held_out_problems_of_every_task_sometimes(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    items: dict[str, tuple[Source, list[dict[str, Any]]]],
) -> None:
    generator = torch.Generator().manual_seed(0)
    rates = {}
    for task, (source, _) in items.items():
        held_out = source.items("eval", 12, "test")
        prompts = [tokenizer.encode(item["question"]) for item in held_out for _ in range(8)]
        texts = [tokenizer.decode(a[:-1]) for a in sample(model, prompts, 64, generator, tokenizer.eos_token_id)]
        hits = [source.right(held_out[i // 8], text) for i, text in enumerate(texts)]
        rates[task] = sum(hits) / len(hits)
    assert all(rate > 0.03 for rate in rates.values()), rates
    assert sum(0.1 <= rate <= 0.6 for rate in rates.values()) >= 8, rates
