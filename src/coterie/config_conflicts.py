"""Settings that are each allowed and contradict one another: refused with the config, in one line."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coterie.config import Config


def conflicts(cfg: Config) -> Iterator[str]:
    """What is wrong and what to do, one line each."""
    yield from _tasks(cfg)
    yield from _loss_and_engine(cfg)
    yield from _helpers(cfg)
    yield from _swarm(cfg)


def _tasks(cfg: Config) -> Iterator[str]:
    if cfg.tasks and not any(t.weight > 0 for t in cfg.tasks.values()):
        yield "tasks: every weight is 0; give at least one task a positive weight"
    for name, tasks in cfg.parallel.experts.items():
        if unknown := [t for t in tasks if t not in cfg.tasks]:
            yield f"parallel.experts.{name}: no section [tasks.{unknown[0]}]"
    if any(not 1 <= k <= cfg.eval.samples for k in cfg.eval.ks):
        yield f"eval.ks: pass@k needs k from 1 to eval.samples = {cfg.eval.samples}"
    if cfg.eval.modes and not cfg.helpers.roles:
        yield "eval.modes: there are no helpers; add a [helpers.roles.*] section"
    if cfg.parallel.log_updates and cfg.model.lora_rank:
        yield "parallel.log_updates: updates of LoRA factors do not add up to the delta; train all weights"


def _loss_and_engine(cfg: Config) -> Iterator[str]:
    if cfg.helpers.roles and cfg.loss.external_loss == "aipo" and cfg.loss.c_min > cfg.loss.c_max:
        yield (
            f"loss.c_min = {cfg.loss.c_min:g} is above loss.c_max = {cfg.loss.c_max:g}: no coefficient is both; lower "
            "loss.c_min or raise loss.c_max"
        )
    context, longest = cfg.engine.context, cfg.rollout.max_new_tokens
    if cfg.engine.kind == "vllm" and 0 < context <= longest:
        yield (
            f"engine.context = {context} leaves no room for a prompt beside rollout.max_new_tokens = {longest}; raise "
            "engine.context, or set it to 0 for the model's own limit"
        )


def _helpers(cfg: Config) -> Iterator[str]:
    helpers, response = cfg.helpers, cfg.rollout.max_new_tokens
    for role, h in helpers.roles.items():
        if h.limit > helpers.total_limit:
            yield (
                f"helpers.roles.{role}.limit = {h.limit} is above helpers.total_limit = {helpers.total_limit}: the policy "
                f"would be told of {h.limit} questions and have fewer answered; lower the one or raise the other"
            )
    reserve = max(1, math.ceil(helpers.reserve * response))
    # Tags and question take at least a token more; how many is known once there is a tokenizer (helpers/budget.py).
    if helpers.roles and helpers.feedback_tokens + reserve >= response:
        yield (
            f"helpers: no question could ever be served: a reply takes up to helpers.feedback_tokens = "
            f"{helpers.feedback_tokens} tokens and {reserve} are reserved, but rollout.max_new_tokens is {response}; lower "
            f"helpers.feedback_tokens or helpers.reserve, or raise rollout.max_new_tokens"
        )


def _swarm(cfg: Config) -> Iterator[str]:
    swarm = cfg.swarm
    if swarm.exchange != "none" and swarm.peer_groups > swarm.pool:
        yield (
            f"swarm.peer_groups = {swarm.peer_groups} is above swarm.pool = {swarm.pool}: so many groups never wait to be "
            "used; raise swarm.pool"
        )
    if swarm.exchange != "none" and swarm.share != "nothing" and cfg.rollout.group_size > swarm.max_trajectories:
        yield (
            f"swarm.max_trajectories = {swarm.max_trajectories} is below rollout.group_size = {cfg.rollout.group_size}: "
            "nodes with these settings would refuse each other's groups; raise swarm.max_trajectories"
        )
    if swarm.send_problems and swarm.share == "nothing":
        yield "swarm.send_problems sends nothing with swarm.share = 'nothing'; set share to informative or all"
    if bool(swarm.tls_certificate) != bool(swarm.tls_key):
        yield "swarm.tls_certificate and swarm.tls_key belong together: set both or none"
