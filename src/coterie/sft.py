"""Supervised training on worked answers to the same tasks: the arm that reinforcement learning is compared with."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from coterie.batching import collate, micro_batches
from coterie.errors import UserError
from coterie.importing import load_function
from coterie.prompting import PromptEncoder
from coterie.rng import derive
from coterie.trainer import Trainer, step_metrics
from coterie.types import Group, Problem, Segment, Source, StopReason, Trajectory

Answers = Callable[[Problem, int], str]


def reference_answer(problem: Problem, seed: int) -> str:
    """The bare reference answer, tagged as the extraction rule expects.

    Raises:
        UserError: the task has no single reference answer.
    """
    if problem.reference is None:
        raise UserError(
            f"sft: {problem.task} has no reference answer to imitate; leave the task out, or give worked answers with "
            "sft.answers = 'module:function'"
        )
    return f"<answer>{problem.reference}</answer>"


def worked_answers(name: str) -> Answers:
    """What ``sft.answers`` names.

    Raises:
        UserError: no such file, module or function.
    """
    try:
        return reference_answer if name == "reference" else load_function(name)
    except UserError as e:
        raise UserError(f"sft.answers: {e}") from e


class SupervisedTrainer(Trainer):
    """The same node with another step: cross-entropy on worked answers, a mean over their tokens."""

    def train_step(self) -> tuple[dict[str, float], list[Group]]:
        start = time.perf_counter()
        cfg = self.cfg
        answers = worked_answers(cfg.sft.answers)
        problems = self.tasks.draw(f"{cfg.seed}/sft", self.step, cfg.sft.rows)
        groups = [
            self._example(p, answers(p, derive(cfg.seed, "sft", self.step, i)), i) for i, p in enumerate(problems)
        ]
        batch = collate(groups, None, me=self.node.author)
        total = 0.0
        for part in micro_batches(batch, cfg.optim.token_budget):
            logprobs = self.policy.logprobs(part).logprobs  # [B, T]
            loss = -logprobs[part.loss_mask].sum() / max(batch.trained, 1)
            self.policy.backward(loss)
            total += float(loss.detach())
        done = self.policy.step(self._lr())
        self.step += 1
        seconds = time.perf_counter() - start
        metrics = {
            "sft/loss": total,
            "sft/tokens": float(batch.trained),
            "time/step_s": seconds,
            "time/update_s": seconds,
        }
        return metrics | step_metrics(done, self._lr()), groups

    def _example(self, problem: Problem, text: str, i: int) -> Group:
        return Group(
            f"sft-{self.step}-{i}",
            problem,
            self.node.author,
            self.step,
            self.policy.encoder.tokenizer_hash,
            (as_trajectory(self.policy.encoder, problem.prompt, text),),
        )


def as_trajectory(encoder: PromptEncoder, prompt: str, text: str) -> Trajectory:
    """A given text as a finished answer, end token included, log-probs unknown."""
    prompt_ids = encoder.prompt_ids(prompt)
    answer_ids = encoder.encode(text) + ([] if encoder.end_id is None else [encoder.end_id])
    p, t = len(prompt_ids), len(answer_ids)
    return Trajectory(
        token_ids=np.array([*prompt_ids, *answer_ids], np.int32),
        source=np.repeat(np.array([Source.CONTEXT, Source.POLICY], np.uint8), [p, t]),
        behavior_logprobs=np.full(p + t, np.nan, np.float32),
        prompt_length=p,
        segments=(Segment(Source.POLICY, text),),
        stop_reason=StopReason.EOS,
    )
