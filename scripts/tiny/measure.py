"""Pass rates on held-out problems."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tiny.data import Source
from tiny.net import sample

NEW_TOKENS = 64


def pass_rates(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    source: Source,
    problems: list[dict[str, Any]],
    n: int = 8,
) -> dict[str, float]:
    """pass@1 (mean over all samples at temperature 1), pass@n, greedy, and answer lengths in tokens."""
    generator = torch.Generator().manual_seed(0)
    prompts = [tokenizer(p["question"])["input_ids"] for p in problems]
    eos = tokenizer.eos_token_id
    answers = sample(model, [p for p in prompts for _ in range(n)], NEW_TOKENS, generator, eos)
    best = sample(model, prompts, NEW_TOKENS, generator, eos, greedy=True)

    def right(i: int, ids: list[int]) -> bool:
        return ids[-1] == eos and source.right(problems[i], tokenizer.decode(ids[:-1]))

    hits = [[right(i, a) for a in answers[i * n : i * n + n]] for i in range(len(problems))]
    lengths = sorted(map(len, answers))
    return {
        "pass@1": sum(map(sum, hits)) / (n * len(problems)),
        f"pass@{n}": sum(map(any, hits)) / len(problems),
        "greedy": sum(right(i, a) for i, a in enumerate(best)) / len(problems),
        "informative": sum(0 < sum(h) < n for h in hits) / len(problems),
        "prompt": statistics.median(map(len, prompts)),
        "answer_median": lengths[len(lengths) // 2],
        "answer_max": lengths[-1],
    }
