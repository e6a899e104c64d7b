"""The gradient probe: scores of sampled answers under one model, task by task, as one matrix of inner products.

The *score* of an answer is ``S = d log p(answer) / d weights``, a vector as long as the model. Everything the probe reports
(see :mod:`coterie.merging.probe_figures`) is arithmetic on the inner products of all scores, so those are all that is kept:
whole vectors for small models, count sketches otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.batching import collate
from coterie.config import RolloutConfig
from coterie.errors import CoterieError, UserError
from coterie.merging.sketch import CountSketch, Projection, Whole
from coterie.policy import HEAD
from coterie.rng import derive
from coterie.rollout import rollout
from coterie.sft import as_trajectory, reference_answer
from coterie.types import Group, Problem, Trajectory

if TYPE_CHECKING:
    from coterie.engines.base import Engine
    from coterie.policy import Policy
    from coterie.tasks.scoring import Scorer
    from coterie.tasks.taskset import TaskSet

WHOLE_BYTES = 256 << 20  # scores are kept whole up to this size
SKETCH = 1 << 16
_COLUMNS = 1 << 13  # values of the scores multiplied at a time


@dataclass(frozen=True)
class ProbeSettings:
    """``score_temperature`` 0: the one sampled at. ``per_token``: scores divided by the answer's length, as losses that
    average per sequence do. ``sketch`` 0: whole scores if they take less than 256 MiB, else 65536 values."""

    problems: int = 32
    group_size: int = 8
    temperature: float = 1.0
    score_temperature: float = 0.0
    max_new_tokens: int = 64
    per_token: bool = False
    sketch: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.problems < 4 or self.group_size < 2:
            raise UserError(
                "probe: at least 4 problems per task and 2 answers per problem (halves of a task are compared)"
            )
        if self.temperature <= 0 or self.score_temperature < 0 or self.max_new_tokens < 1:
            raise UserError("probe: temperature and max-new-tokens must be positive, score-temperature not negative")
        if self.sketch & (self.sketch - 1) or self.sketch == 1:
            raise UserError(f"probe: --sketch must be a power of two, not {self.sketch}")


@dataclass(frozen=True, eq=False)
class Scores:
    """``N`` answers: whose they are, what they got, and the inner products of their scores."""

    tasks: tuple[str, ...]
    task: NDArray[np.int64]  # [N] index into tasks
    group: NDArray[np.int64]  # [N] problem, numbered over all tasks
    reward: NDArray[np.float64]  # [N]; NaN: not scored
    length: NDArray[np.int64]  # [N] tokens
    entropy: NDArray[np.float64]  # [N] mean per token, nats
    concentration: NDArray[np.float64]  # [N] mean per token of sum_v p_v^2
    distinct: NDArray[np.float64]  # [tasks] distinct texts per group, as a share of G
    gram: NDArray[np.float64]  # [N, N] <S_a, S_b>
    reference_norm: tuple[float | None, ...]  # [tasks] rms |S| of the reference answers; None: a task without any
    floor: float  # cosines below this are the sketch's own error
    values: int  # length of a score
    settings: ProbeSettings = field(default_factory=ProbeSettings)


def collect(policy: Policy, engine: Engine, tasks: TaskSet, scorer: Scorer, settings: ProbeSettings) -> Scores:
    """Sample ``problems`` groups per task from the model and take the score of every answer.

    Costs one backward pass per distinct answer, and memory for one gradient and ``N`` kept vectors.

    Raises:
        CoterieError: a score that is not finite.
    """
    weights = {n: w for n, w in policy.weights().items() if not n.startswith(HEAD)}
    values = sum(w.numel() for w in weights.values())
    rows = len(tasks.tasks) * settings.problems * settings.group_size
    whole = not settings.sketch and values * rows * 4 <= WHOLE_BYTES
    projection: Projection = Whole(weights) if whole else CountSketch(settings.sketch or SKETCH)
    taker = _Taker(policy, list(weights), projection, settings)
    groups: list[tuple[int, Group]] = []
    references: list[float | None] = []
    for i, name in enumerate(tasks.tasks):
        problems = tasks.draw(f"{settings.seed}/probe", 0, settings.problems, {name: 1.0})
        cfg = RolloutConfig(
            problems=settings.problems,
            group_size=settings.group_size,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
        )
        seed = derive(settings.seed, "probe", name, settings.temperature)
        done = rollout(engine, policy.encoder, problems, cfg, scorer, author="probe", version=0, seed=seed)
        groups += [(i, g) for g in done.groups]
        references.append(_reference_norm(taker, policy, problems))
    return _scores(tuple(tasks.tasks), groups, references, taker, values)


def _scores(
    names: tuple[str, ...],
    groups: Sequence[tuple[int, Group]],
    references: Sequence[float | None],
    taker: _Taker,
    values: int,
) -> Scores:
    task, group, reward, length, entropy, concentration, kept, square = [], [], [], [], [], [], [], []
    distinct: list[list[float]] = [[] for _ in names]
    for g, (i, found) in enumerate(groups):
        done: dict[bytes, _Taken] = {}
        for t in found.trajectories:
            key = t.token_ids.tobytes()
            if key not in done:
                done[key] = taker(t)
            taken = done[key]
            task.append(i)
            group.append(g)
            reward.append(t.reward if t.reward is not None and t.failed is None else float("nan"))
            length.append(t.response_length)
            entropy.append(taken.entropy)
            concentration.append(taken.concentration)
            kept.append(taken.image)
            square.append(taken.square)
        distinct[i].append(len(done) / len(found.trajectories))
    return Scores(
        names,
        np.array(task),
        np.array(group),
        np.array(reward),
        np.array(length),
        np.array(entropy),
        np.array(concentration),
        np.array([np.mean(d) if d else 0.0 for d in distinct]),
        gram_of(kept, square),
        tuple(references),
        taker.projection.floor,
        values,
        taker.settings,
    )


def gram_of(kept: Sequence[Tensor], square: Sequence[float]) -> NDArray[np.float64]:
    """[N, N] inner products in float64, some columns at a time; the diagonal is exact even for sketches."""
    out = torch.zeros(len(kept), len(kept), dtype=torch.float64)
    width = len(kept[0]) if kept else 0
    for first in range(0, width, _COLUMNS):
        block = torch.stack([v[first : first + _COLUMNS] for v in kept]).double()  # [N, c]
        out += block @ block.T
    out.fill_diagonal_(0.0)
    return (out + torch.diag(torch.tensor(square, dtype=torch.float64))).numpy()


@dataclass(frozen=True)
class _Taken:
    image: Tensor  # [k]
    square: float  # |S|^2, exact
    entropy: float
    concentration: float


class _Taker:
    """Takes the score of one answer: one forward and backward pass."""

    def __init__(self, policy: Policy, names: list[str], projection: Projection, settings: ProbeSettings) -> None:
        self.policy, self.names, self.projection, self.settings = policy, names, projection, settings
        found = dict(policy.model.named_parameters())
        self.weights = [found[n] for n in names]

    def __call__(self, t: Trajectory) -> _Taken:
        scored = replace(t, temperature=self.settings.score_temperature or t.temperature)
        group = Group("probe", Problem("probe", "probe", ""), "probe", 0, "", (scored,))
        batch = collate([group], None, me="probe")
        stats = self.policy.logprobs(batch)
        n = max(1, batch.trained)
        total = stats.logprobs.sum() / (n if self.settings.per_token else 1)  # scalar
        grads = torch.autograd.grad(total, self.weights, allow_unused=True)
        image = torch.zeros(self.projection.width)  # [k]
        square = 0.0
        for name, grad in zip(self.names, grads, strict=True):
            if grad is not None:
                square += float(grad.double().square().sum())
                self.projection.add(image, name, grad.cpu())
        if not np.isfinite(square):
            raise CoterieError("probe: the gradient of an answer is not finite; is the model sound?")
        return _Taken(image, square, float(stats.entropy.sum()) / n, float(stats.sum_sq.sum()) / n)


def _reference_norm(taker: _Taker, policy: Policy, problems: Sequence[Problem]) -> float | None:
    """Root mean square of |S| over the reference answers: what supervised training would push with."""
    if any(p.reference is None for p in problems):
        return None
    squares = [taker(as_trajectory(policy.encoder, p.prompt, reference_answer(p, 0))).square for p in problems]
    return float(np.sqrt(np.mean(squares)))
