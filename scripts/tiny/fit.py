"""Training: batches of worked answers, and the optimiser's loop."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from coterie.models.worked import answer
from tiny.data import Item
from tiny.net import hidden_states

CHUNK = 16  # steps whose rows are drawn at a time and sorted by length, so that little is padding


@dataclass(frozen=True)
class Plan:
    """What is trained, and how long: a part on right answers, then a noisy part in which some slip."""

    clean_steps: int
    noisy_steps: int
    rows: int  # answers per step
    lr: float  # of the embedding and the norms (AdamW)
    matrix_lr: float  # of the layers' matrices (Muon)
    slip: dict[str, float]  # share of a task's answers that have a wrong step, in the noisy part
    weight: dict[str, float]  # share of rows, relative to the other tasks
    warmup: int = 100
    seed: int = 0


def batches(
    plan: Plan, pool: dict[str, list[Item]], tokenizer: PreTrainedTokenizerFast, noisy: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """``ids [B, T]`` padded on the right, and ``labels [B, T]`` (the next token; -100 at prompt and padding)."""
    rng = Random(f"tiny/{plan.seed}/{noisy}")
    encode = tokenizer.backend_tokenizer.encode
    prompts = {task: [encode(item["question"]).ids for item in items] for task, items in pool.items()}
    tasks, weights = list(pool), [plan.weight[t] for t in pool]
    left = plan.noisy_steps if noisy else plan.clean_steps
    while left > 0:
        rows = []
        for task in rng.choices(tasks, weights, k=CHUNK * plan.rows):
            i = rng.randrange(len(pool[task]))
            text = answer(task, pool[task][i], rng, plan.slip[task] if noisy else 0.0)
            rows.append((prompts[task][i], [*encode(text).ids, tokenizer.eos_token_id]))
        rows.sort(key=lambda r: len(r[0]) + len(r[1]))
        order = rng.sample(range(CHUNK), min(CHUNK, left))
        for k in order:
            yield collate(rows[k * plan.rows : (k + 1) * plan.rows])
        left -= len(order)


def collate(rows: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    longest = max(len(p) + len(a) for p, a in rows)
    ids, labels = torch.zeros(len(rows), longest, dtype=torch.long), torch.full((len(rows), longest), -100)
    for i, (p, a) in enumerate(rows):
        ids[i, : len(p) + len(a)] = torch.tensor(p + a)
        labels[i, len(p) - 1 : len(p) + len(a) - 1] = torch.tensor(a)
    return ids, labels


class Trainer:
    """The optimisers and the step count; linear warm-up, then a cosine over both parts down to a twentieth.

    The matrices of the layers are trained with Muon (orthogonalised momentum), which needs fewer steps than AdamW here;
    the embedding and the norms with AdamW.
    """

    def __init__(self, model: LlamaForCausalLM, plan: Plan) -> None:
        matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if not any(p is m for m in matrices)]
        self.model, self.plan, self.step = model, plan, 0
        self.optimizers = {
            plan.matrix_lr: torch.optim.Muon(matrices, lr=plan.matrix_lr, weight_decay=0.05),
            plan.lr: torch.optim.AdamW(others, lr=plan.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
        }

    def run(self, data: Iterator[tuple[Tensor, Tensor]]) -> None:
        start, shown = time.monotonic(), 0.0
        for ids, labels in data:
            loss = self._update(ids, labels)
            shown = loss if shown == 0 else 0.98 * shown + 0.02 * loss
            if self.step % 100 == 0:
                print(f"step {self.step}  loss {shown:.3f}  {time.monotonic() - start:.0f} s", flush=True)

    def _update(self, ids: Tensor, labels: Tensor) -> float:
        plan, total = self.plan, self.plan.clean_steps + self.plan.noisy_steps
        progress = max(0, self.step - plan.warmup) / max(1, total - plan.warmup)
        scale = min(1.0, (self.step + 1) / plan.warmup) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))
        trained = labels != -100  # [B, T]
        h = hidden_states(self.model, ids)[trained]  # [N, width]
        loss = F.cross_entropy(h @ self.model.model.embed_tokens.weight.T, labels[trained])
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for peak, optimizer in self.optimizers.items():
            optimizer.param_groups[0]["lr"] = peak * scale
            optimizer.step()
        self.step += 1
        return float(loss.detach())

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "step": self.step,
            **{str(k): o.state_dict() for k, o in self.optimizers.items()},
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.step = state["step"]
        for peak, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state[str(peak)])
