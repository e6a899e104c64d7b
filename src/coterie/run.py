"""A run on disk: build the parts, resume where it stopped, step, evaluate, log, save."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from coterie import distributed
from coterie.checkpoint import Checkpoint, load_latest, save_checkpoint
from coterie.config import Config, TrackingConfig
from coterie.console import RunConsole
from coterie.engines.base import Engine
from coterie.engines.torch import TorchEngine
from coterie.errors import CoterieError, UserError
from coterie.helpers.mixing import solo_count
from coterie.helpers.roles import build_helpers, check_roles
from coterie.merging.crosstime import UpdateLog
from coterie.models_io import context_of, locate
from coterie.policy import Policy
from coterie.rng import derive
from coterie.rundir import RunDir
from coterie.sft import SupervisedTrainer, worked_answers
from coterie.swarm.build import check_swarm, open_link, open_node, training_problems
from coterie.swarm.likelihood import own_logprobs
from coterie.swarm.memory import MemoryHub
from coterie.swarm.node import SwarmNode
from coterie.tasks.reasoning_gym import Records, record
from coterie.tasks.scoring import Scorer
from coterie.tasks.taskset import build_tasks
from coterie.tracking import Tracker, transcript
from coterie.trainer import Trainer
from coterie.types import Group

TRAINERS = {"rl": Trainer, "sft": SupervisedTrainer}


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    run_dir: Path
    steps: int
    metrics: dict[str, float]


def check(cfg: Config) -> None:
    """Refuse what cannot train, before anything is loaded.

    Raises:
        UserError: says what and why.
    """
    if not cfg.tasks:
        raise UserError("config: no tasks; add at least one [tasks.NAME] section (see `coterie tasks list`)")
    if cfg.method == "rl" and cfg.rollout.group_size < 2 and cfg.advantage.kind != "gae":
        raise UserError(
            "config: rollout.group_size = 1 gives no baseline (an answer's advantage is its difference from the others "
            "to the same problem); use at least 2, better 8. Evaluation with one sample is `coterie eval`"
        )
    if distributed.world() > 1:
        distributed.check(cfg)
    _check_helpers(cfg)
    check_swarm(cfg)
    if cfg.method == "sft":
        worked_answers(cfg.sft.answers)
    limit = context_of(cfg.model.name)
    if limit is not None and cfg.rollout.max_new_tokens >= limit:
        raise UserError(
            f"config: rollout.max_new_tokens = {cfg.rollout.max_new_tokens} leaves no room for a prompt in the context of "
            f"model {cfg.model.name} ({limit} tokens); lower it"
        )


def _check_helpers(cfg: Config) -> None:
    """What of :func:`check` is about helpers."""
    check_roles(cfg)
    group = cfg.rollout.group_size
    if cfg.method == "rl" and cfg.helpers.roles and cfg.helpers.solo_min >= group:
        raise UserError(
            f"config: helpers.solo_min = {cfg.helpers.solo_min} leaves none of rollout.group_size = {group} trajectories "
            "that might ask a helper; lower helpers.solo_min or raise rollout.group_size"
        )
    helped = cfg.advantage.kind != "gae" and cfg.advantage.baseline == "solo_mean" and bool(cfg.helpers.roles)
    if helped and not all(solo_count(cfg.helpers, group, at) for at in (0, cfg.helpers.solo_steps)):
        raise UserError(
            "config: advantage.baseline = solo_mean compares with plain rollouts, and helpers.solo_min, solo_start and "
            "solo_end leave none at some steps, so that nothing would be learnt there; use own_mode, or keep some"
        )
    if cfg.advantage.kind == "gae" and cfg.helpers.roles and cfg.loss.external_loss not in ("masked", "ce"):
        raise UserError(
            "config: advantage.kind = gae gives helpers' tokens no advantage (only the policy's tokens are steps), so "
            f"loss.external_loss = {cfg.loss.external_loss} would train nothing there; use masked or ce"
        )


def dry_run(cfg: Config) -> None:
    """Everything that can be refused without loading a model: settings, tasks with their parameters, held-out problems, folders
    of models.

    Raises:
        UserError: as the run itself would.
    """
    check(cfg)
    if cfg.model.name != "smollm2":  # made from its package at first use
        locate(cfg.model.name)
    build_tasks(cfg.tasks).eval_problems(cfg.eval.problems)


def make_engine(cfg: Config, policy: Policy) -> Engine:
    """The engine that ``cfg.engine`` names; one that shares out the prompts where several processes train the policy."""
    if isinstance(policy, distributed.ShardedPolicy):
        return distributed.SharedEngine(policy, cfg.rollout.token_budget)
    if cfg.engine.kind == "torch":
        return TorchEngine(policy, token_budget=cfg.rollout.token_budget)
    from coterie.engines.vllm import VllmEngine

    return VllmEngine(policy, cfg.model.name, cfg.engine)


@contextmanager
def build(cfg: Config, hub: MemoryHub | None = None, records: Records = record) -> Iterator[Trainer]:
    """All parts of a node, closed in the right order whatever happens. Nodes of one process meet at ``hub``, and may share what
    makes the tasks' ``records``."""
    torch.set_num_threads(cfg.threads or torch.get_num_threads())
    torch.manual_seed(derive(cfg.seed, "torch") % 2**31)
    with ExitStack() as stack:
        tasks = build_tasks(cfg.tasks, records=records)
        shared = distributed.world() > 1
        scorer = stack.enter_context((distributed.SharedScorer if shared else Scorer)(cfg.scoring))
        link = open_link(cfg, hub)
        entered = stack.enter_context(ExitStack())
        if link is not None:
            entered.callback(link.close)
        critic = cfg.method == "rl" and cfg.advantage.kind == "gae"
        kind = distributed.ShardedPolicy if shared else Policy
        policy = kind.load(cfg.model, seed=cfg.seed, optim=cfg.optim, value_head=critic)
        engine = make_engine(cfg, policy)
        node = open_node(
            cfg,
            link,
            encoder=policy.encoder,
            problem_of=training_problems(tasks),
            score=partial(scorer.score, untrusted=True),
            logprobs=own_logprobs(policy, cfg) if cfg.swarm.less_likely else None,
        )
        entered.pop_all()  # the node closes its link
        stack.callback(node.close)
        helpers = stack.enter_context(build_helpers(cfg, policy.encoder, policy)) if cfg.helpers.roles else None
        trainer = distributed.SharedTrainer if shared else TRAINERS[cfg.method]
        yield trainer(cfg, policy, engine, tasks, scorer, node, helpers)


class Run:
    """One run in its directory: resumed where it stopped, advanced step by step. A context manager.

    Raises:
        UserError: config or run directory cannot be used as asked.
        CoterieError: the disk refuses; the last checkpoint is intact.
    """

    def __init__(
        self, cfg: Config, *, quiet: bool = False, hub: MemoryHub | None = None, records: Records = record
    ) -> None:
        check(cfg)
        self.cfg = cfg
        self.metrics: dict[str, float] = {}
        with ExitStack() as stack:
            if distributed.world() > 1:
                distributed.join()
                stack.callback(distributed.leave)
            leads = distributed.leads()
            self.dir = RunDir(cfg) if leads else distributed.FollowerDir(cfg)
            stack.callback(self.dir.close)
            self.trainer = stack.enter_context(build(cfg, hub, records))
            mine = cfg if leads else cfg.model_copy(update={"tracking": TrackingConfig()})
            self._tracker = stack.enter_context(Tracker(mine, self.dir))
            every = max(1, cfg.steps // 20)
            self._console = stack.enter_context(RunConsole(cfg.steps, quiet=quiet or not leads, every=every))
            resume(self.trainer, self.dir, self._console)
            if isinstance(self.trainer.node, SwarmNode):
                self._console.note(f"swarm: this node is {self.trainer.node.identity.name}")
            self._updates: UpdateLog | None = None
            if width := cfg.parallel.log_updates:
                self._updates = UpdateLog(self.dir.path, width, self.trainer.policy)
                self._updates.rewind(self.trainer.step)
            self._stack = stack.pop_all()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    @property
    def done(self) -> bool:
        return self.trainer.finished

    def begin(self) -> None:
        """The evaluation before training (line 0 of the metrics), unless the run was resumed."""
        if self.trainer.step == 0:
            found = self.trainer.held_out()
            if "eval/accuracy" in found:
                self.trainer.node.feedback(found["eval/accuracy"], 0.0)  # what later ones are compared with
            self._log(found)

    def advance(self) -> None:
        """One training step: log it, evaluate and save when due."""
        trainer, cfg = self.trainer, self.cfg
        if self._updates:
            self._updates.watch()
        metrics, groups = trainer.train_step()
        trainer.tokens += int(metrics.get("tokens/generated", metrics.get("sft/tokens", 0.0)))
        if self._updates:
            metrics |= self._updates.append()
        while trainer.node.events:
            self._console.note(trainer.node.events.pop(0))
        metrics |= _held_out(trainer, groups)
        if "eval/accuracy" in metrics:
            trainer.node.feedback(metrics["eval/accuracy"], metrics["policy/kl_to_start"])
        self._log(metrics)
        self._tracker.transcripts(trainer.step, [transcript(g, trainer.policy.encoder) for g in groups])
        if trainer.step % cfg.checkpoint.every == 0 or self.done:
            save(trainer, self.dir)

    def finish(self) -> Summary:
        """Write the trained model in Hugging Face format and mark the run as finished."""
        self.trainer.policy.save_pretrained(self.dir.path / "model")
        self.dir.finish()
        if self.trainer.step < self.cfg.steps:
            self._console.note(
                f"ended after step {self.trainer.step} of {self.cfg.steps}: {self.trainer.tokens:,} tokens are spent, of "
                f"{self.cfg.tokens:,}; the same command with a larger --tokens (0: no limit) goes on"
            )
        if summary := self.trainer.node.summary():
            self._console.note(summary)
        return Summary(self.dir.path, self.trainer.step, self.metrics)

    def _log(self, metrics: dict[str, float]) -> None:
        self.metrics = metrics
        self._tracker.log(self.trainer.step, metrics)
        self._console.row(self.trainer.step, metrics)


def train(cfg: Config, *, quiet: bool = False) -> Summary:
    """Run ``cfg`` to its last step; an unfinished run in the same directory is continued (raises as :class:`Run`)."""
    with Run(cfg, quiet=quiet) as run:
        run.begin()
        while not run.done:
            run.advance()
        return run.finish()


def _held_out(trainer: Trainer, groups: list[Group]) -> dict[str, float]:
    """Evaluation metrics, when they are due."""
    cfg = trainer.cfg
    if not trainer.finished and not (cfg.eval.every and trainer.step % cfg.eval.every == 0):
        return {}
    return {**trainer.held_out(), "policy/kl_to_start": trainer.kl_to_start(groups)}


def save(trainer: Trainer, run: RunDir) -> None:
    """Everything the next step depends on. Randomness needs no state: it is derived from seed, step and purpose."""
    state: dict[str, Any] = {
        "node": trainer.node.state_dict(),
        "quiet_steps": trainer.guard.quiet,
        "tokens": trainer.tokens,
    }
    whole = Checkpoint(trainer.step, trainer.policy.weights(), trainer.policy.optimizer_state(), state)
    if distributed.leads():
        save_checkpoint(run.checkpoints, whole, trainer.cfg.checkpoint.keep)


def resume(trainer: Trainer, run: RunDir, console: RunConsole) -> None:
    """Load the newest complete checkpoint, if any, and drop the log lines of steps that will be run again.

    Raises:
        CoterieError: there are checkpoints, but none can be read: nothing is thrown away.
    """
    found = load_latest(run.checkpoints, console.note)
    if distributed.world() > 1:
        distributed.same(None if found is None else found.step, f"the newest checkpoint in {run.checkpoints}")
    if found is None:
        if run.checkpoints.is_dir() and any(run.checkpoints.iterdir()):
            raise CoterieError(
                f"{run.checkpoints}: no checkpoint there can be read (reasons above); choose another --run_dir, or remove "
                "the folder to start this run again from step 0"
            )
        run.rewind(0)
        return
    try:
        trainer.policy.load_weights(found.weights)
        trainer.policy.load_optimizer_state(found.optimizer)
        trainer.node.load_state_dict(found.state["node"])
        trainer.guard.quiet = int(found.state["quiet_steps"])
        trainer.tokens = int(found.state.get("tokens", 0))
    except (CoterieError, KeyError, TypeError, ValueError) as e:
        where = run.checkpoints / f"step_{found.step:06d}"
        raise CoterieError(f"checkpoint {where}: not of this run ({e}); remove it to go on from the one before") from e
    trainer.step = found.step
    run.rewind(found.step + 1)
    console.note(f"resumed {run.path} at step {found.step} of {trainer.cfg.steps}")
