"""Tasks, verifiers and scoring. `build_tasks` makes problems, `Scorer` marks answers."""

from __future__ import annotations

from coterie.tasks.base import Split, Task, UnknownProblem
from coterie.tasks.extract import extract_answer
from coterie.tasks.scoring import Score, Scorer
from coterie.tasks.taskset import TaskSet, build_tasks, describe, list_names, problem_from_id, split_of

__all__ = [
    "Score",
    "Scorer",
    "Split",
    "Task",
    "TaskSet",
    "UnknownProblem",
    "build_tasks",
    "describe",
    "extract_answer",
    "list_names",
    "problem_from_id",
    "split_of",
]
