"""The tokenizer of `tiny`: one token a character, and one a fixed phrase of the tasks' prompts.

`PAIRS` added to the phrases make another one, which cuts answers elsewhere.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<eos>", "<unk>"]  # ids 0, 1, 2
MARKS = ["<answer>", "</answer>"]
CHARACTERS = sorted(set(string.printable[:95] + "\n×÷≤≥→∧∨¬"))
PAIRS = [str(n) for n in range(10, 100)]  # two digits as one token
ATOM = re.compile(r"#?[A-Za-z]+#?|\s+|.", re.DOTALL)


def fixed_phrases(prompts: Sequence[str], share: float) -> list[str]:
    """Runs of words that stand in at least ``share`` of the prompts, as long as possible.

    Words and marks are joined pair by pair, the pair found in the most prompts first, until none is frequent enough.
    """
    rows = [ATOM.findall(p) for p in prompts]
    while True:
        pairs = Counter(pair for row in rows for pair in set(pairwise(row)))
        best, count = max(pairs.items(), key=lambda pc: (pc[1], pc[0])) if pairs else (("", ""), 0)
        if count < share * len(prompts):
            break
        rows = [_join(row, best) for row in rows]
    words = Counter(word for row in rows for word in set(row))
    return sorted(w for w, n in words.items() if len(w) > 1 and n >= share * len(prompts))


def _join(row: list[str], pair: tuple[str, str]) -> list[str]:
    out: list[str] = []
    i = 0
    while i < len(row):
        if i + 1 < len(row) and (row[i], row[i + 1]) == pair:
            out.append(row[i] + row[i + 1])
            i += 2
        else:
            out.append(row[i])
            i += 1
    return out


def make_tokenizer(phrases: Sequence[str]) -> PreTrainedTokenizerFast:
    """A word-level tokenizer that cuts text into phrases (the longest first) and single characters."""
    words = sorted(set(phrases) | set(MARKS), key=lambda w: (-len(w), w))
    vocabulary = [*SPECIAL, *MARKS, *CHARACTERS, *(w for w in words if w not in MARKS)]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocabulary)}, unk_token="<unk>"))
    pattern = "|".join(re.escape(w) for w in words) + r"|[\s\S]"
    core.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )
