"""Shared by the tests of helpers: a small byte-level tokenizer, a small random model saved to disk, and two engines."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from coterie.config import HelperConfig, HelpersConfig
from coterie.engines.stopping import Stopping
from coterie.helpers.prompts import load_form
from coterie.helpers.roles import HelperSet
from coterie.helpers.scripted import ScriptedHelper
from coterie.prompting import PromptEncoder
from coterie.types import Sample, Sampling

SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
_CORPUS = [
    "hello he llo the helper says 12 + 34 = 46, so the next step is to add 5",
    "What is 17 + 25? <verify>17 + 25 = 42</verify>\n<feedback>\nsound\n</feedback>\n",
    "<knowledge>gcd</knowledge> <reasoning>how</reasoning> <answer>42</answer> <think>hm</think>",
    "[limit reached] [helper unavailable] [cut] You check work. Reply with one verdict.",
]
# Like Qwen3's: an assistant turn loses its <think> block once another turn follows (AG-04).
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@functools.cache
def tokenizer(chat: bool = True) -> Any:
    """Byte-level BPE of about 400 tokens and one for ">\\n"; pad is the end token, on purpose."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(_CORPUS * 3, trainer)
    bpe.add_tokens([AddedToken(">\n", normalized=False)])  # as in many vocabularies: it reaches beyond the end of a tag
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|end|>",
        pad_token="<|end|>",
        additional_special_tokens=SPECIAL[1:],
        chat_template=TEMPLATE if chat else None,
    )


@functools.cache
def encoder(chat: bool = True) -> PromptEncoder:
    return PromptEncoder(tokenizer(chat))


def save_model(folder: Path, seed: int = 0, context: int = 2048) -> Path:
    """A random Llama with the kit's tokenizer, as a Hugging Face folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    end = encoder().pad_id
    config = LlamaConfig(
        vocab_size=len(tokenizer()),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # far from flat, so that wrong log-probs show
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(4.0)
    model.save_pretrained(str(folder))
    tokenizer().save_pretrained(str(folder))
    return folder


def config(roles: dict[str, dict[str, Any]], **values: Any) -> HelpersConfig:
    """A helpers section; times short enough for tests."""
    quick = {"tries": 1, "timeout_s": 5.0, "feedback_tokens": 16, "reserve": 0.1, **values}
    return HelpersConfig(roles={k: HelperConfig(**v) for k, v in roles.items()}, **quick)


def scripted(
    functions: dict[str, Callable[..., str]], response: int = 200, chat: bool = True, limit: int = 2, **values: Any
) -> HelperSet:
    """A helper set whose roles are Python functions."""
    cfg = config({r: {"backend": "scripted", "call": "x:y", "limit": limit} for r in functions}, **values)
    helpers = {r: ScriptedHelper(f"script-{r}", f) for r, f in functions.items()}
    return HelperSet(cfg, encoder(chat), response, helpers, load_form(cfg.form, cfg.prompts))


class ScriptEngine:
    """Writes what ``script(text so far)`` says, one byte a token: never how the tokenizer would write it.

    The script is shown the question and the response so far, not the system prompt (which speaks of the tags itself).
    ``sent`` holds every row (prompt, sampled ids, log-probs). Rows finish in reverse order.
    """

    def __init__(self, script: Callable[[str], str], *, pieces: bool = True) -> None:
        self.script = script
        self.pieces = pieces
        self.sent: list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]] = []
        self.streams: list[tuple[int, int]] = []  # (seed, sample) of every row

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int | Sequence[int], sampling: Sampling, seeds: Sequence[int]
    ) -> Iterator[tuple[int, int, Sample]]:
        counts = [n] * len(prompts) if isinstance(n, int) else list(n)
        e = encoder()
        stopping = Stopping(e.eos_ids, sampling.stop, sampling.max_new_tokens, e.decode)
        for i in reversed(range(len(prompts))):
            for j in reversed(range(counts[i])):
                self.streams.append((seeds[i], j))
                text = self.script(_after_system(e.tokenizer.decode(list(prompts[i]))))
                yield i, j, self._sample(tuple(prompts[i]), self.ids(text), stopping)

    def ids(self, text: str) -> list[int]:
        """``~`` is the end token."""
        e = encoder()
        parts = text.split("~")
        out: list[int] = []
        for k, part in enumerate(parts):
            singles = [i for c in part for i in e.encode(c)]
            out += singles if self.pieces else e.encode(part)
            if k < len(parts) - 1:
                out.append(min(e.eos_ids))
        return out

    def _sample(self, prompt: tuple[int, ...], written: list[int], stopping: Stopping) -> Sample:
        ids: list[int] = []
        ended = None
        while ended is None:
            ids.append(written[len(ids) % len(written)])
            ended = stopping.check(ids)
        logprobs = np.array([-0.001 * (len(self.sent) + 1) - 0.1 * k for k in range(len(ids))], np.float32)
        self.sent.append((prompt, tuple(ids), tuple(float(p) for p in logprobs)))
        return Sample(np.array(ids, np.int32), logprobs, *ended)


def _after_system(text: str) -> str:
    return text.partition("<|user|>")[2] or text
