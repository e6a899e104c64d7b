"""The three ways a policy is evaluated when helpers exist.

`plain` (E0): plain prompt, no helpers: the headline. `tagged` (E1): the prompt that speaks of helpers, but nobody
answers; the policy may write the reply itself. `helped` (E2): with helpers, an upper bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from coterie.errors import UserError
from coterie.helpers.dialogue import DialogueStart, run_dialogues
from coterie.rollout import sampled
from coterie.types import Sampling, Trajectory

if TYPE_CHECKING:
    from coterie.engines.base import Engine
    from coterie.helpers.roles import HelperSet
    from coterie.prompting import PromptEncoder

Mode = Literal["plain", "tagged", "helped"]


def sample_mode(
    mode: Mode,
    engine: Engine,
    encoder: PromptEncoder,
    questions: Sequence[str],
    n: int,
    sampling: Sampling,
    seeds: Sequence[int],
    helpers: HelperSet | None = None,
) -> Iterator[tuple[int, int, Trajectory]]:
    """Yield ``(question index, sample index, trajectory)`` as rows finish, ``n`` for each question; rewards are not set.

    Raises:
        UserError: `tagged` or `helped` without helpers.
    """
    if mode == "plain":
        yield from sampled(engine, encoder, [encoder.prompt_ids(q) for q in questions], n, sampling, seeds)
        return
    if helpers is None:
        raise UserError(f"evaluation mode {mode}: the config has no [helpers.roles.*] section")
    prompts = [helpers.prompt_ids(q) for q in questions]
    if mode == "tagged":
        yield from sampled(engine, encoder, prompts, n, sampling, seeds)
        return
    starts = [DialogueStart(q, p, s, n) for q, p, s in zip(questions, prompts, seeds, strict=True)]
    yield from run_dialogues(engine, starts, helpers, sampling)
