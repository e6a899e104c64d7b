"""The loop: roll out, share, verify, collate, one loss, one step. Without helpers and peers this *is* GRPO.

groups  = rollout(policy, problems, ...)      helper turns happen here
exchange.publish(groups)                      share
peers   = exchange.collect(...)               own problem definitions, own verifier, own key checks
batch   = collate(own + peers, advantages)
loss    = policy_loss(policy.logprobs(batch), batch)
policy.step(loss)
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from coterie.advantages import group_advantages
from coterie.batching import Batch, collate, micro_batches
from coterie.config import Config, LossConfig
from coterie.critic import critic_loss, critic_metrics, plain_rewards, start_values, with_gae
from coterie.engines.base import Engine
from coterie.errors import UserError
from coterie.evaluation import Evaluation, evaluate
from coterie.forward import TokenStats
from coterie.helpers.metrics import helper_metrics
from coterie.helpers.mixing import CollapseGuard, too_many_failed
from coterie.helpers.modes import Mode
from coterie.helpers.roles import HelperSet
from coterie.loss_metrics import LossOutput, loss_metrics
from coterie.losses import kl_estimate, policy_loss, share_scale, zero_advantages_are_silent
from coterie.policy import Policy, StepResult
from coterie.rng import derive
from coterie.rollout import Rollout, prompt_tokens, rollout, rollout_metrics, training_sampling
from coterie.swarm.node import Node, SoloNode
from coterie.tasks.extract import extract_answer
from coterie.tasks.scoring import Scorer
from coterie.tasks.taskset import TaskSet
from coterie.types import Group, Problem

_LOOK = 64  # problems looked at before a run is stopped because no prompt fits


@dataclass
class Trainer:
    """One node. ``train_step`` is the loop's body; whoever owns the trainer decides when to evaluate and to save."""

    cfg: Config
    policy: Policy
    engine: Engine
    tasks: TaskSet
    scorer: Scorer
    node: Node = field(default_factory=SoloNode)
    helpers: HelperSet | None = None
    step: int = 0
    tokens: int = 0  # generated so far (supervised: trained on)

    def __post_init__(self) -> None:
        self.guard = CollapseGuard(self.cfg.helpers.collapse_steps)

    def train_step(self) -> tuple[dict[str, float], list[Group]]:
        """One round of the loop. Returns its metrics and the node's own groups."""
        start, cpu = time.perf_counter(), time.process_time()
        result = self._own_groups()
        rolled = time.perf_counter()
        self.node.publish(result.groups)
        peers = self.node.collect(self.step)
        shared = time.perf_counter()
        own = self._select_own(result.groups)
        self.engine.release()  # its copy of the weights is about to be out of date, and the update needs the memory
        metrics = rollout_metrics(result, self.cfg.rollout.group_size) | self.node.metrics()
        if self.helpers is not None:
            metrics |= self._helper_metrics(self.helpers, result.groups)
        metrics |= {"update/own_groups": float(len(own)), "update/peer_groups": float(len(peers))}
        metrics["update/mix_reward"] = mean_reward(own + peers)
        metrics |= self._update(self._batch(own + peers))
        end = time.perf_counter()
        metrics |= {
            "time/cpu_s": time.process_time() - cpu,
            "time/rollout_s": rolled - start,
            "time/share_s": shared - rolled,
            "time/update_s": end - shared,
            "time/step_s": end - start,
            "time/tokens_per_s": metrics["tokens/generated"] / (rolled - start),
        }
        self.step += 1
        return metrics, result.groups

    def _own_groups(self) -> Rollout:
        """Roll out this step's problems; with ``rollout.resample``, replace groups without signal, a bounded number of times."""
        cfg = self.cfg.rollout
        kept: list[Group] = []
        rounds: list[Rollout] = []
        for attempt in range(cfg.resample + 1):
            need = cfg.problems - len(kept)
            stream = str(self.cfg.seed) if attempt == 0 else f"{self.cfg.seed}/again{attempt}"
            problems = self.tasks.draw(stream, self.step, need)
            seed = derive(self.cfg.seed, "rollout", self.step, attempt)
            rounds.append(
                rollout(
                    self.engine,
                    self.policy.encoder,
                    problems,
                    cfg,
                    self.scorer,
                    author=self.node.author,
                    version=self.step,
                    seed=seed,
                    helpers=self.helpers,
                )
            )
            if rounds[-1].too_long == need:
                self._stop_if_all_too_long(problems)
            kept += [g for g in rounds[-1].groups if g.informative]
            if not cfg.resample or len(kept) >= cfg.problems:
                break
        return rounds[0] if len(rounds) == 1 else _joined(rounds)

    def _stop_if_all_too_long(self, problems: Sequence[Problem]) -> None:
        """Every prompt of a round was dropped: chance, or no prompt of this config fits? Looks at ``_LOOK`` more.

        Raises:
            UserError: none of them fits either, so the run would train on nothing for ever.
        """
        limit = self.cfg.rollout.max_prompt_tokens
        looked = [*problems, *self.tasks.draw(f"{self.cfg.seed}/too-long", self.step, _LOOK)]
        lengths = [prompt_tokens(p, self.policy.encoder, self.helpers) for p in looked]
        if min(lengths) > limit:
            raise UserError(
                f"step {self.step}: every prompt is longer than rollout.max_prompt_tokens = {limit} and would be dropped "
                f"({len(lengths)} tried, the shortest has {min(lengths)} tokens): raise it, or choose task parameters "
                "that make shorter prompts"
            )

    def _helper_metrics(self, helpers: HelperSet, groups: list[Group]) -> dict[str, float]:
        found = helper_metrics(groups, feedback_tag=helpers.form.open.strip(), extract=extract_answer)
        return found | self.guard.update(groups)

    def _select_own(self, groups: list[Group]) -> list[Group]:
        """Own groups for the update, ``rollout.problems`` at most: without those that lost too much to helper failures and,
        where asked, with the peers' filter applied, so that filter and sharing can be told apart."""
        kept = [g for g in groups if not too_many_failed(g.trajectories, self.cfg.helpers.max_failed)]
        if self.cfg.swarm.own_selection == "informative":
            kept = [g for g in kept if g.informative]
        return kept[: self.cfg.rollout.problems]

    def _batch(self, groups: Sequence[Group]) -> Batch:
        """The step's batch. Rows without signal are left out where every term of the loss is a multiple of the advantage.

        PPO lays out the rewards first: what they say about each token is known once the value head has seen the rows.
        """
        cfg = self.cfg
        ppo = cfg.advantage.kind == "gae"
        batch = collate(
            groups,
            plain_rewards(groups) if ppo else group_advantages(groups, cfg.advantage.kind, cfg.advantage.baseline),
            me=self.node.author,
            max_new_tokens=cfg.rollout.max_new_tokens,
            mask_truncated=cfg.loss.mask_truncated,
            drop_zero_advantages=not ppo and zero_advantages_are_silent(cfg.loss),
        )
        if not ppo:
            return batch
        return with_gae(batch, start_values(self.policy, batch, cfg.optim.token_budget), cfg.advantage)

    def _update(self, batch: Batch) -> dict[str, float]:
        """``optim.updates`` optimiser steps on ``batch``; micro-batches change memory and speed, never the result."""
        cfg = self.cfg
        if batch.trained == 0:
            return {"policy/nothing_to_train": 1.0, "policy/skipped": 0.0}
        parts, real = self._parts(batch)
        old: dict[int, TokenStats] = {}  # log-probs and values at the start of the update, kept over all its steps
        metrics: dict[str, float] = {}
        loss_cfg, capped = self._capped(parts, real)
        for _ in range(cfg.optim.updates):
            outputs, critic, computed = [], [], []
            for i, part in enumerate(parts):
                stats = self.policy.logprobs(part)
                computed.append((stats.layout, stats.tokens))
                reference = self.policy.reference_logprobs(part) if cfg.loss.kl_coef > 0 else None
                at_start = old.setdefault(i, stats.detach())
                outputs.append(policy_loss(stats, part, loss_cfg, at_start.logprobs, reference))
                loss = outputs[-1].loss
                if part.returns is not None:
                    critic.append(critic_loss(stats, at_start, part, cfg))
                    loss = loss + critic[-1].loss
                self.policy.backward(loss if i < real else 0.0 * loss)
            done = self.policy.step(self._lr())
            metrics = loss_metrics(self._all(outputs[:real])) | critic_metrics(critic)
            metrics |= layout_metrics(self._all_computed(computed[:real]))
        metrics["policy/nothing_to_train"] = 0.0
        return metrics | capped | step_metrics(done, self._lr())

    def _parts(self, batch: Batch) -> tuple[list[Batch], int]:
        """The micro-batches to compute here, and how many of them count (:mod:`coterie.distributed` deals them out)."""
        parts = micro_batches(batch, self.cfg.optim.token_budget)
        return parts, len(parts)

    def _all(self, outputs: list[LossOutput]) -> list[LossOutput]:
        """The outputs of all micro-batches, wherever they were computed."""
        return outputs

    def _all_computed(self, computed: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """Layout and tokens of all micro-batches, wherever they were computed."""
        return computed

    def _capped(self, parts: Sequence[Batch], real: int) -> tuple[LossConfig, dict[str, float]]:
        """The loss with helpers' tokens scaled down to ``ext_grad_share_cap``, measured over the whole batch, so that it does
        not depend on how the batch is cut; and the factor, as a metric."""
        cfg = self.cfg.loss
        if not cfg.ext_grad_share_cap or not any(part.normalizers.helper for part in parts):
            return cfg, {}
        plain = cfg.model_copy(update={"kl_coef": 0.0})
        outputs = []
        for part in parts:
            with torch.no_grad():
                stats = self.policy.logprobs(part)
            leaf = replace(stats, logprobs=stats.logprobs.requires_grad_())
            outputs.append(policy_loss(leaf, part, plain, stats.logprobs.detach()))
        share = loss_metrics(self._all(outputs[:real])).get("loss/helper/gradient_share", 0.0)
        scale = share_scale(share, cfg.ext_grad_share_cap)
        return cfg.model_copy(update={"lambda_ext": cfg.lambda_ext * scale}), {"loss/helper_scale": scale}

    @property
    def finished(self) -> bool:
        """Whether the run has had its steps, or its tokens."""
        return self.step >= self.cfg.steps or 0 < self.cfg.tokens <= self.tokens

    def _lr(self) -> float:
        warmup = self.cfg.optim.warmup_steps
        return self.cfg.optim.lr * min(1.0, (self.step + 1) / warmup if warmup else 1.0)

    def held_out(self) -> dict[str, float]:
        """Metrics of the plain mode, and the accuracy of each further mode of ``eval.modes``."""
        plain = self.evaluate()
        out = plain.metrics(self.cfg.eval.ks)
        for mode in self.cfg.eval.modes:
            accuracy = self.evaluate(mode).accuracy()
            if math.isfinite(accuracy):
                out[f"eval_{mode}/accuracy"] = accuracy
                out[f"eval_{mode}/gap"] = accuracy - plain.accuracy()
        return out

    def evaluate(self, mode: Mode = "plain") -> Evaluation:
        """Held-out accuracy at the training temperature; the same problems and draws at every call."""
        cfg = self.cfg
        problems = self.tasks.eval_problems(cfg.eval.problems)
        return evaluate(
            self.engine,
            self.policy.encoder,
            problems,
            cfg.eval.samples,
            training_sampling(cfg.rollout),
            self.scorer,
            seed=0,
            mode=mode,
            helpers=self.helpers,
        )

    @torch.no_grad()
    def kl_to_start(self, groups: Sequence[Group]) -> float:
        """k3 estimate of KL(policy || start model), mean over the groups' sampled tokens, in nats; always finite."""
        advantages = [[1.0] * len(g.trajectories) for g in groups]
        batch = collate(groups, advantages, me=self.node.author)
        total, count = 0.0, 0
        for part in micro_batches(batch, self.cfg.optim.token_budget):
            now, start = self.policy.logprobs(part).logprobs, self.policy.reference_logprobs(part)  # [B, T]
            mask = part.loss_mask.to(now.device)  # [B, T]
            total += float((kl_estimate(now, start, "k3") * mask).sum())
            count += int(mask.sum())
        return total / count if count else 0.0


def mean_reward(groups: Sequence[Group]) -> float:
    """Mean reward of all answers trained on, whoever wrote them: a biased figure (the groups have passed filters)."""
    rewards = [r for g in groups for r in g.valid_rewards]
    return sum(rewards) / len(rewards) if rewards else 0.0


def layout_metrics(computed: Sequence[tuple[str, int]]) -> dict[str, float]:
    """Share of the micro-batches (layout, tokens) computed in each layout, and tokens that went through the layers."""
    layouts = [layout for layout, _ in computed]
    shares = {f"update/layout/{name}": layouts.count(name) / len(layouts) for name in sorted(set(layouts))}
    return shares | {"update/computed_tokens": float(sum(tokens for _, tokens in computed))}


def step_metrics(done: StepResult, lr: float) -> dict[str, float]:
    """Metrics of an optimiser step; a norm that is not finite is left out (the step was skipped, and says so)."""
    out = {"policy/lr": lr, "policy/skipped": float(done.skipped is not None)}
    return out | ({"policy/grad_norm": done.grad_norm} if math.isfinite(done.grad_norm) else {})


def _joined(rounds: Sequence[Rollout]) -> Rollout:
    """Informative groups first; groups without signal only fill what is missing (they still count in the metrics)."""
    groups = sorted((g for r in rounds for g in r.groups), key=lambda g: not g.informative)
    outcomes: dict[str, int] = {}
    for r in rounds:
        for kind, n in r.outcomes.items():
            outcomes[kind] = outcomes.get(kind, 0) + n
    return Rollout(groups, sum(r.too_long for r in rounds), outcomes)
