"""Coterie's side of ``coterie bench round``, in a process of its own so that its peak memory is its own.

``python -m coterie.bench.own_side CASE.json``: JSON lines on stdin and stdout, as in :mod:`coterie.bench.trl_side`.
``prepare`` samples the fixed batch, ``round`` and ``half`` sample and train (all or half of the groups informative),
``update`` trains on the fixed batch, ``gemm`` measures the machine.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.advantages import group_advantages
from coterie.batching import Batch, collate, micro_batches
from coterie.config import LossConfig, ModelConfig, OptimConfig, RolloutConfig, ScoringConfig
from coterie.cpu_linear import product
from coterie.engines.torch import TorchEngine
from coterie.loss_metrics import loss_metrics
from coterie.losses import policy_loss
from coterie.packing import pack
from coterie.policy import Policy
from coterie.rollout import rollout
from coterie.tasks.scoring import Scorer
from coterie.types import Group, Problem, Source

ME = "bench"


class Side:
    def __init__(self, case: dict[str, Any], scorer: Scorer) -> None:
        torch.set_num_threads(case["threads"])
        self.case, self.scorer = case, scorer
        self.policy = Policy.load(
            ModelConfig(name=case["model"]),
            optim=OptimConfig(token_budget=case["token_budget"], activation_checkpointing=case["recompute"]),
        )
        self.cfg = RolloutConfig(
            problems=len(case["problems"]),
            group_size=case["group_size"],
            max_new_tokens=case["max_new_tokens"],
            max_prompt_tokens=4096,
        )
        self.engine = TorchEngine(self.policy, self.cfg.token_budget)
        self.problems = [Problem(**p) for p in case["problems"]]
        self.round = 0
        self.fixed: tuple[Batch, list[Tensor], dict[str, Any]] | None = None

    def prepare(self) -> dict[str, Any]:
        """Sample the batch that both sides train on; old log-probs lie off the current ones, so ratios differ from 1."""
        groups = self._rolled()
        advantages = [[1.0 if j % 2 else -0.5 for j in range(len(g.trajectories))] for g in groups]
        batch = collate(groups, advantages, ME)
        parts = micro_batches(batch, self.case["token_budget"])
        noise = np.random.default_rng(0)
        shifted: dict[tuple[int, int], list[float]] = {}
        for i, g in enumerate(groups):
            for j, t in enumerate(g.trajectories):
                written = t.behavior_logprobs[t.prompt_length :]
                shifted[i, j] = (written + noise.uniform(-0.15, 0.15, len(written)).astype(np.float32)).tolist()
        rows = iter([shifted[i, j] for i, g in enumerate(groups) for j in range(len(g.trajectories))])
        olds = [_old(part, rows) for part in parts]
        flat = [(i, j, t) for i, g in enumerate(groups) for j, t in enumerate(g.trajectories)]
        shared = {
            "prompts": [t.token_ids[: t.prompt_length].tolist() for _, _, t in flat],
            "completions": [t.token_ids[t.prompt_length :].tolist() for _, _, t in flat],
            "old_logprobs": [shifted[i, j] for i, j, _ in flat],
            "advantages": [advantages[i][j] for i, j, _ in flat],
        }
        self.fixed = (batch, olds, shared)
        prompts = [self.policy.encoder.prompt_ids(p.prompt) for p in self.problems]
        return {"batch": shared, "prompt_tokens": sorted(map(len, prompts)), "cost": self._cost(batch)}

    def update(self) -> dict[str, Any]:
        assert self.fixed is not None
        batch, olds, _ = self.fixed
        start = _clocks()
        loss, norm = self._train(batch, olds)
        return _since(start) | {"loss": loss, "grad_norm": norm}

    def full(self, informative: float = 1.0) -> dict[str, Any]:
        """One whole round; rewards are set so that a share of the groups is informative."""
        start = _clocks()
        groups = self._rolled()
        rolled = _since(start)
        signal = round(len(groups) * informative)
        marked = [_rewarded(g, i < signal) for i, g in enumerate(groups)]
        batch = collate(marked, group_advantages(marked, "mean_std", "own_mode"), ME, drop_zero_advantages=True)
        self._train(batch, None)
        spent = _since(start)
        tokens = sum(int((t.source == Source.POLICY).sum()) for g in groups for t in g.trajectories)
        return spent | {"rollout_s": rolled["seconds"], "rollout_cpu_s": rolled["cpu_s"], "tokens": tokens}

    def gemm(self) -> dict[str, Any]:
        """Float32 GFLOP/s of one product of the size of SmolLM2's MLP, the best of several: MKL's and oneDNN's."""
        x, w = torch.randn(1024, 576), torch.randn(1536, 576)  # [N, in], [out, in]
        return {"mkl": _rate(lambda: F.linear(x, w)), "onednn": _rate(lambda: product(x, w))}

    def _rolled(self) -> list[Group]:
        self.round += 1
        result = rollout(
            self.engine, self.policy.encoder, self.problems, self.cfg, self.scorer, author=ME, version=self.round, seed=self.round
        )  # fmt: skip
        self.engine.release()  # as a step that changes the weights does
        return result.groups

    def _train(self, batch: Batch, olds: Sequence[Tensor] | None) -> tuple[float, float]:
        outputs = []
        for i, part in enumerate(micro_batches(batch, self.case["token_budget"])):
            stats = self.policy.logprobs(part)
            old = stats.logprobs.detach() if olds is None else olds[i]  # [B, T]
            outputs.append(policy_loss(stats, part, LossConfig(clip_high=0.2), old))
            self.policy.backward(outputs[-1].loss)
        done = self.policy.step(self.case["lr"])
        return loss_metrics(outputs)["loss/total"], done.grad_norm

    def _cost(self, batch: Batch) -> dict[str, float]:
        """Floating-point operations that the update cannot do without: products of weights (forward, and twice that
        backward) for packed tokens and trained positions, and attention over the pairs that see each other."""
        config = self.policy.model.config
        head = self.policy.model.get_output_embeddings().weight.numel()
        inner = sum(p.numel() for n, p in self.policy.model.named_parameters() if p.dim() == 2 and "proj" in n)
        packed = pack(batch)
        trained = len(packed.row)
        prompts, answers = packed.prompts, packed.responses  # [P], [R]
        own = (answers * (answers + 1) // 2 + answers * prompts[packed.prompt_of]).sum()
        pairs = int((prompts * (prompts + 1) // 2).sum() + own)
        width = config.num_attention_heads * self.policy.model.model.layers[0].self_attn.head_dim
        attention = 12 * config.num_hidden_layers * width * pairs
        return {
            "tflop": (6 * packed.tokens * inner + 6 * trained * head + attention) / 1e12,
            "packed_tokens": packed.tokens,
            "trained_tokens": trained,
            "padded_tokens": int(batch.lengths.max()) * len(batch),
        }


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(start: tuple[float, float]) -> dict[str, float]:
    """Wall and processor seconds (all threads of this process)."""
    return {"seconds": time.perf_counter() - start[0], "cpu_s": time.process_time() - start[1]}


def _old(part: Batch, rows: Any) -> Tensor:
    old = torch.zeros(part.input_ids.shape)  # [B, T]
    for b in range(len(part)):
        written = torch.tensor(next(rows))
        at = int(part.prompt_lengths[b])
        old[b, at : at + len(written)] = written
    return old


def _rewarded(group: Group, signal: bool) -> Group:
    rows = tuple(replace(t, reward=float(j % 2) if signal else 0.0) for j, t in enumerate(group.trajectories))
    return replace(group, trajectories=rows)


def _rate(work: Callable[[], Tensor]) -> float:
    times = []
    for _ in range(12):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 2 * 1024 * 1536 * 576 / min(times) / 1e9


def main(case: dict[str, Any], channel: Any) -> None:
    with Scorer(ScoringConfig()) as scorer:
        side = Side(case, scorer)
        commands: dict[str, Callable[[], dict[str, Any]]] = {
            "prepare": side.prepare,
            "update": side.update,
            "round": side.full,
            "half": lambda: side.full(0.5),
            "gemm": side.gemm,
        }
        _answer(channel, {"ready": True})
        for line in sys.stdin:
            command = json.loads(line)["do"]
            if command == "stop":
                break
            _answer(channel, commands[command]())


def _answer(channel: Any, values: dict[str, Any]) -> None:
    print("answer", {k: v for k, v in values.items() if k != "batch"}, file=sys.stderr, flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    channel.write(json.dumps(values | {"peak_mb": peak}) + "\n")
    channel.flush()


if __name__ == "__main__":
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes to stderr
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), replies)
