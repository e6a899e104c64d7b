"""Rollout: problems in, groups of scored trajectories out.

Token-in, token-out: a trajectory holds the ids that were sampled; text is made from them for the verifier and for people,
and never encoded again. Scoring runs in its workers while later rows still decode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from coterie.config import RolloutConfig
from coterie.helpers.dialogue import DialogueStart, run_dialogues
from coterie.helpers.mixing import solo_count
from coterie.rng import derive
from coterie.types import Group, Problem, Sample, Sampling, Segment, Source, StopReason, Trajectory

if TYPE_CHECKING:
    from coterie.engines.base import Engine
    from coterie.helpers.roles import HelperSet
    from coterie.prompting import PromptEncoder
    from coterie.tasks.scoring import Score, Scorer


@dataclass(frozen=True)
class Rollout:
    """Groups, and what was counted on the way."""

    groups: list[Group]
    too_long: int = 0  # problems dropped because their prompt exceeds max_prompt_tokens
    outcomes: dict[str, int] = field(default_factory=dict)  # scoring outcomes by kind


def training_sampling(cfg: RolloutConfig) -> Sampling:
    """The training sampler: full support (a truncated one would bias the ratio), so only temperature is a choice."""
    return Sampling(cfg.max_new_tokens, temperature=cfg.temperature, stop=cfg.stop)


def rollout(
    engine: Engine,
    encoder: PromptEncoder,
    problems: Sequence[Problem],
    cfg: RolloutConfig,
    scorer: Scorer,
    *,
    author: str,
    version: int,
    seed: int,
    helpers: HelperSet | None = None,
) -> Rollout:
    """Sample ``cfg.group_size`` answers to each problem and score them.

    With ``helpers``, the last answers of each group are sampled under the tagged prompt and may ask them; how many is a
    matter of the schedule and of ``version``. Every random number depends on ``seed`` and the problem's place, never on
    batching. Problems whose prompt is too long are dropped and counted; prompts are never cut.
    """
    prompts = [_prompts(p, encoder, helpers) for p in problems]
    kept = [i for i, ids in enumerate(prompts) if max(map(len, ids)) <= cfg.max_prompt_tokens]
    rows = _rows(engine, encoder, [(problems[i], *prompts[i]) for i in kept], cfg, version, seed, helpers)
    done: list[dict[int, tuple[Trajectory, Future[Score] | None]]] = [{} for _ in kept]
    for k, j, trajectory in rows:
        score = None if trajectory.failed else scorer.submit(problems[kept[k]], trajectory.text)
        done[k][j] = (trajectory, score)
    outcomes: dict[str, int] = {}
    groups = []
    for k, i in enumerate(kept):
        scored = tuple(_scored(*done[k][j], outcomes) for j in sorted(done[k]))
        name = f"{author[:16]}-{version}-{seed:x}-{i}"
        groups.append(Group(name, problems[i], author, version, encoder.tokenizer_hash, scored))
    return Rollout(groups, len(problems) - len(kept), outcomes)


def prompt_tokens(problem: Problem, encoder: PromptEncoder, helpers: HelperSet | None = None) -> int:
    """Tokens of the longest prompt ``problem`` is asked with: what ``rollout.max_prompt_tokens`` is compared with."""
    return max(map(len, _prompts(problem, encoder, helpers)))


def _prompts(problem: Problem, encoder: PromptEncoder, helpers: HelperSet | None) -> tuple[list[int], list[int]]:
    """Ids of the plain prompt and of the one that speaks of helpers (the plain one again without helpers)."""
    plain = encoder.prompt_ids(problem.prompt)
    return plain, helpers.prompt_ids(problem.prompt) if helpers is not None else plain


def _rows(
    engine: Engine,
    encoder: PromptEncoder,
    asked: Sequence[tuple[Problem, list[int], list[int]]],
    cfg: RolloutConfig,
    version: int,
    seed: int,
    helpers: HelperSet | None,
) -> Iterator[tuple[int, int, Trajectory]]:
    """Solo and helped rows (the latter while a helper is up), as they finish: solo ones decode while the helpers of the
    first questions think."""
    sampling = training_sampling(cfg)
    solo = cfg.group_size
    if helpers is not None and helpers.available():
        solo = solo_count(helpers.cfg, cfg.group_size, version)
    seeds = [derive(seed, "sample", i) for i in range(len(asked))]
    alone = sampled(engine, encoder, [plain for _, plain, _ in asked], solo, sampling, seeds)
    if helpers is None or solo == cfg.group_size:
        yield from alone
        return
    starts = [
        DialogueStart(p.prompt, tagged, derive(seed, "helped", i), cfg.group_size - solo)
        for i, (p, _, tagged) in enumerate(asked)
    ]
    for i, j, trajectory in run_dialogues(engine, starts, helpers, sampling, meanwhile=alone):
        yield i, j + (solo if trajectory.mode == "helped" else 0), trajectory


def sampled(
    engine: Engine,
    encoder: PromptEncoder,
    prompts: Sequence[Sequence[int]],
    n: int,
    sampling: Sampling,
    seeds: Sequence[int],
) -> Iterator[tuple[int, int, Trajectory]]:
    """Yield ``(prompt index, sample index, trajectory)`` as rows finish; rewards are not set yet."""
    for i, j, sample in engine.generate(prompts, n, sampling, seeds):
        yield i, j, _trajectory(prompts[i], sample, encoder, sampling.temperature)


def _trajectory(prompt: Sequence[int], sample: Sample, encoder: PromptEncoder, temperature: float) -> Trajectory:
    p, t = len(prompt), len(sample.token_ids)
    return Trajectory(
        token_ids=np.concatenate([np.asarray(prompt, np.int32), sample.token_ids]),
        source=np.repeat(np.array([Source.CONTEXT, Source.POLICY], np.uint8), [p, t]),
        behavior_logprobs=np.concatenate([np.full(p, np.nan, np.float32), sample.logprobs]),
        prompt_length=p,
        segments=(Segment(Source.POLICY, encoder.decode(sample.token_ids)),),
        stop_reason=sample.stop_reason,
        temperature=temperature,
    )


def _scored(trajectory: Trajectory, future: Future[Score] | None, outcomes: dict[str, int]) -> Trajectory:
    if future is None:
        return trajectory
    score = future.result()
    kind = score.counted_as.replace(":", "/")
    outcomes[kind] = outcomes.get(kind, 0) + 1
    return replace(trajectory, reward=score.reward)


def rollout_metrics(result: Rollout, group_size: int) -> dict[str, float]:
    """Metrics of the node's own groups (never of the training mix). All finite, whatever came back."""
    groups = result.groups
    rows = [t for g in groups for t in g.trajectories]
    rewards = [r for g in groups for r in g.valid_rewards]
    ended = [t for t in rows if t.stop_reason is not StopReason.LENGTH]
    out = {
        "own/reward": _mean(rewards),
        "own/groups": float(len(groups)),
        "own/informative": _mean([g.informative for g in groups]),
        "own/solved": _mean([bool(g.valid_rewards) and min(g.valid_rewards) >= 1.0 for g in groups]),
        "own/reward_std": _mean([float(np.std(g.valid_rewards)) for g in groups if g.valid_rewards]),
        "own/length": _mean([t.response_length for t in rows]),
        "own/length_ended": _mean([t.response_length for t in ended]),
        "own/truncated": _mean([t.truncated for t in rows]),
        "own/failed": float(sum(t.failed is not None for t in rows)),
        "own/unscored": float(sum(t.reward is None for t in rows)),
        "own/prompts_too_long": float(result.too_long),
        "own/distinct": _mean([len({t.text for t in g.trajectories}) / group_size for g in groups]),
        "tokens/generated": float(sum(t.response_length for t in rows)),
        "tokens/prompt": float(sum(g.trajectories[0].prompt_length for g in groups if g.trajectories)),
    }
    for task in sorted({g.problem.task for g in groups}):
        out[f"own/reward/{task}"] = _mean([r for g in groups if g.problem.task == task for r in g.valid_rewards])
    for kind in sorted(k for k in result.outcomes if k != "ok"):
        out[f"score/{kind}"] = float(result.outcomes[kind])
    return out


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
