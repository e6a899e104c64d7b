"""Every reasoning-gym task by name, as a Task.

In reasoning-gym, item i at seed s is item 0 at seed s + i, so neighbouring seeds share nearly all problems. Here one seed
is fixed and problems are told apart by hashed indices into a large range. A few tasks draw from the process-wide random
generators; these are seeded with the index for the time of a draw and put back, so that an id gives the same problem in
every process and the trainer's own random state is left alone.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import io
import json
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import cache, cached_property, lru_cache
from typing import Any

import numpy as np

from coterie.config import TaskConfig
from coterie.errors import UserError
from coterie.tasks import maker
from coterie.tasks.base import MAX_TRIES, Split, UnknownProblem, canonical_json, hashed, id_prefix, split_of_text
from coterie.tasks.base import too_small as _too_small
from coterie.types import Problem

Records = Callable[[str, str, int], dict[str, Any]]  # task, parameters as JSON, index -> the library's record

KIND = "reasoning_gym"
SEED = 0
INDEX_RANGE = 2**31 - 1
MATERIALISED = {"acre": 2000, "gsm_symbolic": 20000, "list_functions": 20000, "word_ladder": 20000}
"""Tasks that build a list of all items (or refuse a large size) when made: their range of indices."""
HASH_DEPENDENT = frozenset(
    {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
)
"""Tasks whose problems depend on Python's hash of texts: made under hash seed 0, see :mod:`coterie.tasks.maker`."""
EVALUATING_CALLS = frozenset({"eval", "exec", "compile", "parse_expr", "sympify", "parse_latex", "__import__"})
_RESERVED = ("seed", "size")
_lock = threading.RLock()  # the library keeps state in class attributes and in process-wide generators


def names() -> list[str]:
    """All task names. The library's own `composite` is left out: list several tasks with weights instead."""
    return sorted(name for name in _registry() if name != "composite")


def defaults(name: str) -> dict[str, Any]:
    """Parameter -> default value of a task. Raises UserError for an unknown task (with a suggestion)."""
    config = _entry(name)[1]
    out = {}
    for field in dataclasses.fields(config):
        if field.name in _RESERVED:
            continue
        if field.default is not dataclasses.MISSING:
            out[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            out[field.name] = field.default_factory()
        else:
            out[field.name] = None
    return out


def canonical_params(name: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that differ from the task's defaults, as JSON values.

    Raises:
        UserError: unknown task or parameter (with a suggestion), or a value that JSON cannot hold.
    """
    known = defaults(name)
    out = {}
    for key, value in params.items():
        if key in _RESERVED:
            raise UserError(
                f"task {name}: {key!r} is set by coterie (problems are drawn by hashed index); leave it out"
            )
        if key not in known:
            close = difflib.get_close_matches(key, list(known), n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known)) or 'none'}"
            raise UserError(f"task {name}: unknown parameter {key!r}; {hint}")
        try:
            text = canonical_json(value)
        except (TypeError, ValueError) as e:
            raise UserError(f"task {name}: parameter {key!r} must be a JSON value: {e}") from e
        if text != _json_or_repr(known[key]):
            out[key] = json.loads(text)
    return out


def dataset(name: str, params: Mapping[str, Any] | None = None) -> Any:
    """The one dataset object for (task, parameters). Raises UserError for values the task refuses."""
    return _dataset(name, canonical_json(canonical_params(name, params or {})))


def item(name: str, params: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The library's record at ``index``: ``question``, ``answer`` (None where the task has no single one), ``metadata``."""
    source = dataset(name, params)
    if not 0 <= index < _index_range(name):
        raise UnknownProblem(f"task {name}: index {index} is not in 0..{_index_range(name) - 1}")
    if name in HASH_DEPENDENT and os.environ.get("PYTHONHASHSEED") != "0":
        return maker.item(name, canonical_json(dict(params)), index)
    with _lock, _seeded(index):
        try:
            record: dict[str, Any] = source[index]
        except (IndexError, RuntimeError, ValueError, AssertionError) as e:
            raise UnknownProblem(f"task {name}: no problem at index {index}: {e}") from e
    return record


def record(name: str, params: str, index: int) -> dict[str, Any]:
    """:func:`item` with the parameters as JSON."""
    return item(name, json.loads(params), index)


def remembering(size: int = 16384) -> Records:
    """:func:`record` with a memory of the ``size`` latest, for several task sets that make the same problems: what one node of
    a simulation draws, the others make again to check it."""
    return lru_cache(maxsize=size)(record)


def has_plain_scorer(name: str) -> bool:
    """Whether the task compares its answer with one text and nothing else."""
    from reasoning_gym.dataset import ProceduralDataset

    return _entry(name)[0].score_answer is ProceduralDataset.score_answer


@cache
def evaluates_text(name: str) -> bool:
    """Whether the module of the task's scorer calls something that can run text as code (found by reading its source)."""
    if has_plain_scorer(name):
        return False
    module = inspect.getmodule(_entry(name)[0].score_answer)
    assert module is not None
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Call):
            called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if called == "compile" and isinstance(node.func, ast.Attribute):
                continue  # re.compile
            if called in EVALUATING_CALLS and not _is_module_function(module, called):
                return True
    return False


class ReasoningGymTask:
    """One reasoning-gym task with its parameters, drawn by hashed index. ``records`` makes them."""

    def __init__(self, name: str, cfg: TaskConfig, records: Records = record) -> None:
        self.name = name
        self._records = records
        self.library_name = cfg.name or name
        self.suffix = cfg.suffix
        self.verifier = "task" if cfg.verifier == "auto" else cfg.verifier
        self.params = canonical_params(self.library_name, cfg.params)
        self._params = canonical_json(self.params)
        dataset(self.library_name, self.params)  # refuses bad values now, not in the middle of a run

    @cached_property
    def prefix(self) -> str:
        return id_prefix(KIND, self.library_name, self.params)

    def problem(self, index: int) -> Problem:
        found = self._records(self.library_name, self._params, index)
        answer = found["answer"]
        return Problem(
            id=f"{self.prefix}#{index}",
            task=self.name,
            prompt=found["question"] + self.suffix,
            reference=None if answer is None else str(answer),
            verifier=self.verifier,
            metadata={"question": found["question"], "entry": found},
        )

    def sample(self, split: Split, stream: str, counter: int) -> Problem:
        span = _index_range(self.library_name)
        for attempt in range(MAX_TRIES):
            try:
                found = self.problem(hashed(self.prefix, split, stream, counter, attempt) % span)
            except UnknownProblem:
                continue  # a hole in the task's space
            if split_of_text(found.metadata["question"]) == split:
                return found
        raise _too_small(self.name, split, MAX_TRIES)


def _registry() -> Mapping[str, tuple[Any, Any]]:
    import reasoning_gym  # imports all tasks: about a second
    from reasoning_gym.factory import DATASETS

    assert reasoning_gym.__name__
    registry: Mapping[str, tuple[Any, Any]] = DATASETS
    return registry


def _entry(name: str) -> tuple[Any, Any]:
    registry = _registry()
    if name == "composite":
        raise UserError("task composite: list the tasks themselves under [tasks], with weights")
    if name not in registry:
        close = difflib.get_close_matches(name, list(registry), n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else "`coterie tasks list` shows all"
        raise UserError(f"unknown reasoning-gym task {name!r}; {hint}")
    return registry[name]


@lru_cache(maxsize=256)
def _dataset(name: str, params: str) -> Any:
    import reasoning_gym

    try:
        with redirect_stdout(io.StringIO()):  # as in _seeded
            return reasoning_gym.create_dataset(name, seed=SEED, size=_index_range(name), **json.loads(params))
    except (AssertionError, ValueError, TypeError, KeyError, AttributeError, IndexError) as e:
        reason = str(e) or "the library refuses these values"
        raise UserError(f"task {name}: parameters {params}: {reason}") from e


def _index_range(name: str) -> int:
    return MATERIALISED.get(name, INDEX_RANGE)


@contextmanager
def _seeded(index: int) -> Iterator[None]:
    """Process-wide generators seeded with ``index``, and no printing to the user's output (some tasks do), for one draw."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(index)
    np.random.seed(index)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _is_module_function(module: Any, name: str) -> bool:
    """Whether ``name`` is a function the module defines itself (propositional_logic has its own, harmless parse_expr)."""
    found = getattr(module, name, None)
    return inspect.isfunction(found) and found.__module__ == module.__name__


def _json_or_repr(value: Any) -> str:
    try:
        return canonical_json(value)
    except (TypeError, ValueError):
        return repr(value)
