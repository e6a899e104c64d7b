"""Text to token ids and back, for one tokenizer: the only place where either happens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

_PROBE = "coterie-probe"  # any text that no chat template prints by itself


class PromptEncoder:
    """Encodes prompts and decodes answers with one Hugging Face tokenizer.

    ``eos_ids`` are all tokens that end an answer: the tokenizer's own end token, those passed in (a checkpoint's
    generation config names some), and the marker with which the chat template closes an assistant turn. ``end_id`` is the
    one to end a written answer with (the turn's marker if there is one); None if the tokenizer has none.
    ``tokenizer_hash`` is equal for two tokenizers exactly when an id means the same to both.
    """

    def __init__(self, tokenizer: Any, system_prompt: str = "", *, eos_ids: Iterable[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.system_prompt = system_prompt
        own = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
        turn_end = tuple(self._turn_end())
        self.eos_ids: frozenset[int] = frozenset((*own, *eos_ids, *turn_end))
        self.end_id: int | None = next(iter((*turn_end, *own, *sorted(self.eos_ids))), None)
        pad = tokenizer.pad_token_id
        self.pad_id: int = int(pad) if pad is not None else min(self.eos_ids, default=0)
        self.tokenizer_hash: str = _hash(tokenizer, self.eos_ids)
        special = set(tokenizer.all_special_ids)
        self._dropped = self.eos_ids | ({self.pad_id} & special)

    def prompt_ids(self, prompt: str, system: str | None = None) -> list[int]:
        """Ids of a whole prompt, ready for the first sampled token; never cut (the caller refuses what is too long).

        With a chat template: system message (``system``, else the encoder's own; none if empty), user message,
        generation prompt. Without one: the plain text, and system messages are ignored. If the tokenizer begins texts
        with BOS, there is exactly one, whether the template prints it or not (huggingface/open-r1 pull 462).
        """
        if not self.tokenizer.chat_template:
            return self._one_bos(self.encode(prompt))
        message = self.system_prompt if system is None else system
        messages = [{"role": "system", "content": message}] if message else []
        messages.append({"role": "user", "content": prompt})
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self._one_bos(self.encode(text))

    def encode(self, text: str) -> list[int]:
        """Ids of ``text`` and nothing else: no BOS, no EOS."""
        return [int(i) for i in self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``. End and pad markers are removed; all other special tokens (``<think>``) are kept, because
        rewards and extraction read them (huggingface/trl issue 2897)."""
        kept = [k for i in ids if (k := int(i)) not in self._dropped]
        # The library's own decoder where there is one: transformers checks every id on the way, which takes longer.
        fast = getattr(self.tokenizer, "backend_tokenizer", None)
        plain = partial(self.tokenizer.decode, clean_up_tokenization_spaces=False)
        text: str = (plain if fast is None else fast.decode)(kept, skip_special_tokens=False)
        return text

    def _one_bos(self, ids: Sequence[int]) -> list[int]:
        bos = self.tokenizer.bos_token_id
        if bos is None or not self._adds_bos():
            return list(ids)
        start = 0
        while start < len(ids) and ids[start] == bos:
            start += 1
        return [int(bos), *ids[start:]]

    def _adds_bos(self) -> bool:
        ids = self.tokenizer("a", verbose=False)["input_ids"]
        return bool(ids) and ids[0] == self.tokenizer.bos_token_id

    def _turn_end(self) -> list[int]:
        """The first special token that the chat template prints after an assistant's words."""
        if not self.tokenizer.chat_template:
            return []
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}]
        text: str = self.tokenizer.apply_chat_template(turns, tokenize=False)
        special = {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
        tail = self.encode(text.rpartition(_PROBE)[2])
        return [i for i in tail if i in special][:1]


def _hash(tokenizer: Any, eos_ids: Iterable[int]) -> str:
    vocabulary = sorted((int(i), t) for t, i in tokenizer.get_vocab().items())
    data = json.dumps([vocabulary, sorted(eos_ids)], ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(data.encode()).hexdigest()[:16]
