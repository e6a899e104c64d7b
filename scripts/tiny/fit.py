"""Training: batches of worked answers, and the optimiser's loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tiny.data import Item
from tiny.net import hidden_states
from tiny.worked import answer


@dataclass(frozen=True)
class Plan:
    """What is trained, and how long. ``slip``: share of answers with a wrong step, per task, in the noisy last part."""

    steps: int
    rows: int
    lr: float
    slip: dict[str, float]
    weight: dict[str, float]
    clean: float = 0.6  # share of the steps before answers begin to slip
    warmup: int = 100
    seed: int = 0


def batches(
    plan: Plan, pool: dict[str, list[Item]], tokenizer: PreTrainedTokenizerFast
) -> Iterator[tuple[Tensor, Tensor]]:
    """``ids [B, T]`` padded on the right, and ``labels [B, T]`` (the next token; -100 at prompt and padding).

    Rows are drawn for 16 steps at a time and sorted by length, so that little is padding.
    """
    rng = Random(f"tiny/{plan.seed}")
    encode = tokenizer.backend_tokenizer.encode
    prompts = {task: [encode(item["question"]).ids for item in items] for task, items in pool.items()}
    tasks, weights = list(pool), [plan.weight[t] for t in pool]
    step = 0
    while step < plan.steps:
        noisy = step >= plan.clean * plan.steps
        rows = []
        for task in rng.choices(tasks, weights, k=16 * plan.rows):
            i = rng.randrange(len(pool[task]))
            text = answer(task, pool[task][i], rng, plan.slip[task] if noisy else 0.0)
            rows.append((prompts[task][i], [*encode(text).ids, tokenizer.eos_token_id]))
        rows.sort(key=lambda r: len(r[0]) + len(r[1]))
        order = list(range(16))
        rng.shuffle(order)
        for k in order[: plan.steps - step]:
            yield collate(rows[k * plan.rows : (k + 1) * plan.rows])
        step += 16


def collate(rows: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    longest = max(len(p) + len(a) for p, a in rows)
    ids, labels = torch.zeros(len(rows), longest, dtype=torch.long), torch.full((len(rows), longest), -100)
    for i, (p, a) in enumerate(rows):
        ids[i, : len(p) + len(a)] = torch.tensor(p + a)
        labels[i, len(p) - 1 : len(p) + len(a) - 1] = torch.tensor(a)
    return ids, labels


def fit(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    pool: dict[str, list[Item]],
    plan: Plan,
    save: Callable[[int], None],
) -> None:
    """Train in place: AdamW, linear warm-up, cosine to a tenth; ``save(step)`` every 500 steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.lr, betas=(0.9, 0.98), weight_decay=0.05, fused=True)
    start, seen = time.monotonic(), 0.0
    for step, (ids, labels) in enumerate(batches(plan, pool, tokenizer)):
        progress = max(0, step - plan.warmup) / max(1, plan.steps - plan.warmup)
        lr = plan.lr * min(1.0, (step + 1) / plan.warmup) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        trained = labels != -100  # [B, T]
        h = hidden_states(model, ids)[trained]  # [N, width]
        loss = F.cross_entropy(h @ model.model.embed_tokens.weight.T, labels[trained])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        value = float(loss.detach())
        seen = value if step == 0 else 0.98 * seen + 0.02 * value
        if step % 100 == 99:
            print(f"step {step + 1}/{plan.steps}  loss {seen:.3f}  {time.monotonic() - start:.0f} s", flush=True)
        if step % 500 == 499:
            save(step + 1)
