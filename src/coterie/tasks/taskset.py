"""The tasks of one run: what is drawn for training, what is held out, and which problem an id stands for."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from coterie.config import TaskConfig
from coterie.errors import UserError
from coterie.tasks import reasoning_gym
from coterie.tasks.base import MAX_TRIES, Split, Task, UnknownProblem, hashed, parse_id, split_of_text
from coterie.tasks.jsonl import JsonlTask
from coterie.tasks.reasoning_gym import ReasoningGymTask
from coterie.types import Problem

_REDRAWS = 20  # draws of one slot before a prompt may come twice in a step


class TaskSet:
    """Tasks by config key. Everything drawn is a pure function of the arguments: nothing is counted inside."""

    def __init__(self, tasks: Mapping[str, Task], weights: Mapping[str, float]) -> None:
        self.tasks = dict(tasks)
        self.weights = dict(weights)
        self._held_out: dict[tuple[str, int], list[Problem]] = {}  # made at the first evaluation, used by all

    def draw(self, stream: str, step: int, k: int, weights: Mapping[str, float] | None = None) -> list[Problem]:
        """``k`` training problems for ``step``; the task of each is drawn by weight (default: the config's).

        A prompt comes twice in a step only where the task's space is too small to avoid it.

        Raises:
            UserError: a weight for an unknown task, or no positive weight.
        """
        share = self.weights if weights is None else dict(weights)
        unknown = sorted(set(share) - set(self.tasks))
        if unknown:
            raise UserError(f"weight for unknown task {unknown[0]!r}; known: {', '.join(self.tasks)}")
        names = sorted(name for name, weight in share.items() if weight > 0)
        if not names:
            raise UserError("no task has a positive weight; give at least one task a positive weight")
        out: list[Problem] = []
        seen: set[str] = set()
        for slot in range(k):
            task = self.tasks[_pick(names, share, hashed("task", stream, step, slot) / 2**64)]
            for redraw in range(_REDRAWS):
                found = task.sample("train", stream, ((step * _REDRAWS) + redraw) * 2**16 + slot)
                if found.prompt not in seen:
                    break
            seen.add(found.prompt)
            out.append(found)
        return out

    def eval_problems(self, n: int) -> dict[str, list[Problem]]:
        """``n`` held-out problems per task, all of different text; the same for every run, seed and node.

        Raises:
            UserError: a task with fewer than ``n`` held-out problems.
        """
        for name, task in self.tasks.items():
            if (name, n) not in self._held_out:
                self._held_out[name, n] = self._distinct(task, n)
        return {name: list(self._held_out[name, n]) for name in self.tasks}

    def problem_from_id(self, problem_id: str) -> Problem:
        """The problem of one of *this run's* tasks, with its suffix and verifier: what a peer's id is checked against.

        Raises:
            UnknownProblem: no task of this run (with exactly these parameters) makes that problem.
        """
        parsed = parse_id(problem_id)
        for task in self.tasks.values():
            if task.prefix == parsed.prefix:
                return task.problem(parsed.index)
        raise UnknownProblem(f"problem {problem_id[:200]!r} is of no task of this run: {', '.join(self.tasks)}")

    def _distinct(self, task: Task, n: int) -> list[Problem]:
        found: dict[str, Problem] = {}
        for counter in range(n + MAX_TRIES):
            if len(found) == n:
                break
            problem = task.sample("eval", "held-out", counter)
            found.setdefault(problem.prompt, problem)
        if len(found) < n:
            raise UserError(
                f"task {task.name}: {len(found)} different held-out problems found, {n} asked for; "
                f"lower eval.problems or widen the task's parameters"
            )
        return list(found.values())


def build_tasks(
    cfg: Mapping[str, TaskConfig],
    custom_verifiers: Collection[str] = (),
    records: reasoning_gym.Records = reasoning_gym.record,
) -> TaskSet:
    """The tasks of a config section. ``custom_verifiers`` names those the caller gives to its Scorer; ``records`` makes (or
    remembers, :func:`coterie.tasks.reasoning_gym.remembering`) the library's records.

    Raises:
        UserError: no task, unknown task or parameter, a value the task refuses, a file or line that cannot be read.
    """
    if not cfg:
        raise UserError("no tasks: add a section [tasks.NAME]; `coterie tasks list` shows the names")
    tasks: dict[str, Task] = {}
    for name, section in cfg.items():
        if section.kind == "jsonl":
            tasks[name] = JsonlTask(name, section, custom_verifiers)
        else:
            tasks[name] = ReasoningGymTask(name, section, records)
    return TaskSet(tasks, {name: section.weight for name, section in cfg.items()})


def problem_from_id(problem_id: str) -> Problem:
    """Make a reasoning-gym problem again from its id, in any process (no suffix, the task's own right/wrong verifier).

    For ids of one's own (logs, transcripts). A peer's id goes through :meth:`TaskSet.problem_from_id`, which makes only
    problems of this run's tasks: parameters can make a problem arbitrarily expensive.

    Raises:
        UnknownProblem: malformed id, unknown task, or a JSONL line (only a TaskSet knows its files).
    """
    parsed = parse_id(problem_id)
    if parsed.kind != reasoning_gym.KIND:
        raise UnknownProblem(f"problem {problem_id[:200]!r}: only reasoning_gym problems can be made from the id alone")
    params = {key: json.loads(value) for key, value in parsed.params}
    try:
        task = ReasoningGymTask(parsed.name, TaskConfig(params=params))
    except UserError as e:
        raise UnknownProblem(f"problem {problem_id[:200]!r}: {e}") from e
    if task.prefix != parsed.prefix:
        raise UnknownProblem(
            f"problem id {problem_id[:200]!r} is not canonical (expected {task.prefix}#{parsed.index})"
        )
    return task.problem(parsed.index)


def split_of(problem: Problem) -> Split:
    """Whether a problem is for training or held out: a function of its text without the suffix."""
    return split_of_text(problem.metadata["question"])


def list_names() -> list[str]:
    """Names of all built-in tasks."""
    return reasoning_gym.names()


def describe(name: str, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What `coterie tasks show` prints: parameters with defaults, an example, and how answers are scored.

    Raises:
        UserError: unknown task or parameter.
    """
    task = ReasoningGymTask(name, TaskConfig(params=dict(params or {})))
    example = task.sample("train", "example", 0)
    return {
        "name": name,
        "category": reasoning_gym.dataset(name, task.params).category,
        "params": reasoning_gym.defaults(name) | task.params,
        "example": {"id": example.id, "prompt": example.prompt, "answer": example.reference},
        "needs_worker": not reasoning_gym.has_plain_scorer(name),
        "evaluates_text": reasoning_gym.evaluates_text(name),
    }


def _pick(names: list[str], share: Mapping[str, float], u: float) -> str:
    """The name whose interval of the weights, laid end to end, holds ``u`` in [0, 1)."""
    left = u * sum(share[name] for name in names)
    for name in names:
        left -= share[name]
        if left < 0:
            return name
    return names[-1]
