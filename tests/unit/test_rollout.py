"""Rollouts: answers are scored while later rows still decode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import pytest
from helpers_kit import ScriptEngine, encoder, scripted

from coterie.config import RolloutConfig
from coterie.rollout import rollout
from coterie.tasks.scoring import Score, Scorer
from coterie.types import Problem, Sample, Sampling

PROBLEMS = [Problem(f"p/{i}", "p", f"{i}+1?", str(i + 1), "numeric") for i in range(3)]


class SlowEngine(ScriptEngine):
    """Notes when each row begins to be decoded."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(lambda text: "<answer>1</answer>~")
        self.events = events

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int | Sequence[int], sampling: Sampling, seeds: Sequence[int]
    ) -> Iterator[tuple[int, int, Sample]]:
        for row in super().generate(prompts, n, sampling, seeds):
            self.events.append("decoded")
            yield row


class NotingScorer(Scorer):
    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def submit(self, problem: Problem, text: str, *, untrusted: bool = False) -> Future[Score]:
        self.events.append("scored")
        return super().submit(problem, text, untrusted=untrusted)


@pytest.mark.parametrize("helped", [False, True])
def test_a_row_is_scored_before_the_next_one_is_decoded(helped: bool) -> None:
    events: list[str] = []
    helpers = scripted({"verify": lambda query: "ok"}) if helped else None
    cfg = RolloutConfig(problems=3, group_size=2, max_new_tokens=200)
    with NotingScorer(events) as scorer:
        result = rollout(
            SlowEngine(events), encoder(), PROBLEMS, cfg, scorer, author="me", version=0, seed=1, helpers=helpers
        )
    assert [[t.reward for t in g.trajectories] for g in result.groups] == [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    assert events == ["decoded", "scored"] * 6
