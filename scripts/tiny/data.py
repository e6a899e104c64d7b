"""Problems for training and for measuring: reasoning-gym items, split by a hash of the prompt."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path
from random import Random
from typing import Any

import reasoning_gym

TASKS_FILE = Path(__file__).parents[2] / "src/coterie/models/tiny_tasks.toml"
EVAL_SHARE = 6554  # of 65536: about a tenth of all prompts


def is_eval(prompt: str) -> bool:
    """Whether a problem belongs to the held-out split: the first 16 bits of the prompt's SHA-256, big-endian, are small."""
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:2], "big") < EVAL_SHARE


def task_parameters() -> dict[str, dict[str, Any]]:
    tasks = tomllib.loads(TASKS_FILE.read_text(encoding="utf-8"))["tasks"]
    return {name: task["params"] for name, task in tasks.items()}


Item = dict[str, Any]


class Source:
    """Items of one task with seed 0 at pseudo-random indices."""

    def __init__(self, task: str, params: dict[str, Any]) -> None:
        self.task = task
        self.params = params
        self.dataset = reasoning_gym.create_dataset(task, seed=0, **params)

    def items(self, split: str, count: int, stream: str) -> list[dict[str, Any]]:
        """``count`` items of a split (fewer if the task has fewer), no prompt twice."""
        rng = Random(f"{self.task}/{split}/{stream}")
        found: dict[str, dict[str, Any]] = {}
        for _ in range(count * (3 if split == "train" else 40)):
            item = self.dataset[rng.randrange(2**31)]
            if is_eval(item["question"]) == (split == "eval"):
                found.setdefault(item["question"], item | {"male_names": self.params.get("male_names", ())})
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
