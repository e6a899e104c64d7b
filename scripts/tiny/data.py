"""Problems for training and for measuring: reasoning-gym items, split by a hash of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import reasoning_gym

from coterie.models import tiny_tasks
from coterie.tasks.base import Split, split_of_text

Item = dict[str, Any]


def all_sources(names: Sequence[str] = ()) -> dict[str, Source]:
    """The tasks of `tiny`, or those of them that are named, with the parameters shipped beside the model."""
    tasks = tiny_tasks()
    return {name: Source(name, tasks[name].params) for name in names or tasks}


class Source:
    """Items of one task with seed 0 at pseudo-random indices."""

    def __init__(self, task: str, params: dict[str, Any]) -> None:
        self.task = task
        self.params = params
        self.dataset = reasoning_gym.create_dataset(task, seed=0, **params)

    def items(self, split: Split, count: int, stream: str) -> list[dict[str, Any]]:
        """``count`` items of a split (fewer if the task has fewer), no prompt twice."""
        rng = Random(f"{self.task}/{split}/{stream}")
        found: dict[str, dict[str, Any]] = {}
        for _ in range(count * (3 if split == "train" else 40)):
            item = self.dataset[rng.randrange(2**31)]
            if split_of_text(item["question"]) == split:
                found.setdefault(item["question"], item)
            if len(found) == count:
                break
        return list(found.values())

    def right(self, item: dict[str, Any], text: str) -> bool:
        """Whether the library scores the last ``<answer>`` of ``text`` as fully right."""
        _, mark, final = text.rpartition("<answer>")
        if not mark:
            return False
        try:
            return bool(self.dataset.score_answer(final.split("</answer>")[0].strip(), item) >= 1.0)
        except ValueError:  # prime_factorization reads its parts as integers
            return False
