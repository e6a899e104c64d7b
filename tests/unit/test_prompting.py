"""Prompts in, text out: exactly one BOS, nothing cut, tags kept, end markers gone."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from coterie.prompting import PromptEncoder

PRINTS_BOS = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}" + (
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NO_BOS = PRINTS_BOS.removeprefix("{{ bos_token }}")
SPECIAL = ["<s>", "</s>", "<pad>", "<|user|>", "<|system|>", "<|assistant|>", "<|end|>"]


def tokenizer(
    *, adds_bos: bool = False, template: str | None = None, think: str = "special", pad: str = "<pad>"
) -> Any:
    """One character a token, plus the special ones; ``think``: whether ``<think>`` is special, plain or split up."""
    names = [*SPECIAL, "<think>", "</think>", *(chr(i) for i in range(10, 127))]
    raw = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.decoder = decoders.Fuse()
    raw.add_special_tokens(SPECIAL)
    tags = ["<think>", "</think>"]
    if think == "special":
        raw.add_special_tokens(tags)
    elif think == "plain":
        raw.add_tokens(tags)
    if adds_bos:
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tok = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token=pad)
    tok.chat_template = template
    return tok


@pytest.mark.parametrize("template", [None, PRINTS_BOS, NO_BOS], ids=["plain", "template prints", "template does not"])
def test_ro04_exactly_one_bos_when_the_tokenizer_adds_one(template: str | None) -> None:
    ids = PromptEncoder(tokenizer(adds_bos=True, template=template)).prompt_ids("hi")
    assert ids[0] == 0 and ids.count(0) == 1


def test_ro04_no_bos_is_invented() -> None:
    assert 0 not in PromptEncoder(tokenizer()).prompt_ids("hi")
    assert 0 not in PromptEncoder(tokenizer(template=NO_BOS)).prompt_ids("hi")
    assert PromptEncoder(tokenizer(template=PRINTS_BOS)).prompt_ids("hi").count(0) == 1


def test_encode_adds_nothing() -> None:
    encoder = PromptEncoder(tokenizer(adds_bos=True))
    assert encoder.decode(encoder.encode("a=b")) == "a=b" and len(encoder.encode("a=b")) == 3
    assert encoder.encode("") == []


def test_chat_template_with_system_message_and_generation_prompt() -> None:
    tok = tokenizer(template=NO_BOS)
    encoder = PromptEncoder(tok, "Be brief.")
    assert tok.decode(encoder.prompt_ids("hi")) == "<|system|>Be brief.<|end|><|user|>hi<|end|><|assistant|>"
    assert tok.decode(encoder.prompt_ids("hi", system="")) == "<|user|>hi<|end|><|assistant|>"
    assert tok.decode(encoder.prompt_ids("hi", system="Sing.")).startswith("<|system|>Sing.")


def test_ro06_ro05_prompts_are_never_cut_or_stripped() -> None:
    tok = tokenizer(template=NO_BOS)
    tok.model_max_length = 8
    tok.truncation_side = "left"
    ids = PromptEncoder(tok).prompt_ids("x" * 500)
    assert len(ids) == 503 and tok.decode(ids).startswith("<|user|>")


def test_eos_ids_are_the_tokenizers_the_configs_and_the_templates() -> None:
    tok = tokenizer(template=NO_BOS)
    end = tok.convert_tokens_to_ids("<|end|>")
    assert PromptEncoder(tok, eos_ids=(5,)).eos_ids == {1, 5, end}
    assert PromptEncoder(tokenizer()).eos_ids == {1}


@pytest.mark.parametrize("think", ["special", "plain", "split"])
def test_ro10_decoding_keeps_tags_and_drops_end_markers(think: str) -> None:
    tok = tokenizer(template=NO_BOS, think=think)
    encoder = PromptEncoder(tok)
    ids = encoder.encode("<think>2+2</think>4")
    ends = tok.convert_tokens_to_ids(["<|end|>", "</s>", "<pad>", "<pad>"])
    assert encoder.decode([*ids, *ends]) == "<think>2+2</think>4"


def test_decoding_keeps_spaces_before_punctuation() -> None:
    encoder = PromptEncoder(tokenizer())
    assert encoder.decode(encoder.encode("1 , 2 ! it 's")) == "1 , 2 ! it 's"


def test_pad_falls_back_to_an_end_token() -> None:
    tok = tokenizer()
    tok.pad_token = None
    assert PromptEncoder(tok).pad_id == 1


def test_hash_says_whether_ids_mean_the_same() -> None:
    a = PromptEncoder(tokenizer()).tokenizer_hash
    assert a == PromptEncoder(tokenizer(), "another system prompt").tokenizer_hash
    more = tokenizer()
    more.add_tokens(["<answer>"])
    assert a != PromptEncoder(more).tokenizer_hash
