"""Where problems come from: ids, splits, streams, errors (known faults RW-02, RW-05, RW-07, RW-28)."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from coterie.config import TaskConfig
from coterie.errors import UserError
from coterie.tasks import UnknownProblem, build_tasks, describe, list_names, problem_from_id, reasoning_gym, split_of
from coterie.tasks.base import canonical_json, id_prefix, parse_id

SMALL = TaskConfig(name="chain_sum", params={"min_terms": 2, "max_terms": 2, "max_digits": 2})


def test_an_id_names_task_parameters_and_index_and_makes_the_problem_again() -> None:
    tasks = build_tasks({"sums": SMALL})
    problem = tasks.draw("me", 0, 1)[0]
    assert problem.id.startswith(
        "reasoning_gym/chain_sum?max_digits=2&max_terms=2#"
    )  # min_terms is the default: left out
    assert problem.task == "sums"
    again = problem_from_id(problem.id)
    assert (again.prompt, again.reference, again.id) == (problem.prompt, problem.reference, problem.id)
    assert tasks.problem_from_id(problem.id) == problem


def test_suffix_is_in_the_prompt_but_neither_in_the_id_nor_in_the_split() -> None:
    plain, suffixed = (build_tasks({"gcd": TaskConfig(suffix=s)}).draw("me", 3, 4) for s in ("", "\nThink first."))
    assert [p.id for p in plain] == [p.id for p in suffixed]
    assert [p.prompt + "\nThink first." for p in plain] == [p.prompt for p in suffixed]
    assert [split_of(p) for p in suffixed] == ["train"] * 4


def test_parameters_in_an_id_are_canonical_json() -> None:
    params = {"operators": ["+", "-", "a&b#c=d %"], "flag": True, "x": 1.5}
    prefix = id_prefix("reasoning_gym", "t", params)
    parsed = parse_id(prefix + "#7")
    assert {k: json.loads(v) for k, v in parsed.params} == params and parsed.index == 7 and parsed.prefix == prefix


@pytest.mark.parametrize(
    "text",
    [
        "", "chain_sum#1", "reasoning_gym/chain_sum", "reasoning_gym/chain_sum#-1", "reasoning_gym/chain_sum#x",
        "reasoning_gym/chain_sum?max_terms=#1", "reasoning_gym/chain_sum?max_terms=3.0&a=1#1", "reasoning_gym/nothing#1",
        "reasoning_gym/chain_sum?max_terms=6#1", "reasoning_gym/chain_sum?max_terms=1#1", "reasoning_gym/chain_sum#2147483647",
        "reasoning_gym/chain_sum#01", "reasoning_gym/chain_sum?max_terms=" + "[" * 100_000 + "#1", "jsonl/000000000000#1",
        "reasoning_gym/chain_sum#" + "9" * 5000, "reasoning_gym/chain_sum?seed=3#1", "reasoning_gym/chain_sum#١",
    ],
)  # fmt: skip
def test_hostile_and_foreign_ids_are_refused(text: str) -> None:
    with pytest.raises(UnknownProblem):
        problem_from_id(text)
    with pytest.raises(UnknownProblem):
        build_tasks({"sums": SMALL}).problem_from_id(text)


def test_a_task_set_makes_only_problems_of_its_own_tasks() -> None:
    with pytest.raises(UnknownProblem, match="no task of this run"):
        build_tasks({"sums": SMALL}).problem_from_id("reasoning_gym/chain_sum?max_terms=1000000000#1")


def test_rw02_streams_and_splits_share_no_problem() -> None:
    tasks = build_tasks({"gcd": TaskConfig(), "leg_counting": TaskConfig()})
    mine, other = ({p.prompt for step in range(20) for p in tasks.draw(stream, step, 8)} for stream in ("a", "b"))
    held_out = {p.prompt for problems in tasks.eval_problems(40).values() for p in problems}
    assert len(held_out) == 80 and not held_out & (mine | other)
    assert len(mine & other) <= 1  # by chance only: the space is large


def test_rw07_even_a_small_space_of_problems_does_not_leak() -> None:
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    tasks = build_tasks({"sums": TaskConfig(name="chain_sum", params=params)})
    train = Counter(p.prompt for step in range(100) for p in tasks.draw("a", step, 8))
    held_out = {p.prompt for p in tasks.eval_problems(10)["sums"]}
    assert len(held_out) == 10 and not held_out & set(train)
    assert len({p.prompt for p in tasks.draw("a", 0, 32)}) == 32  # no prompt twice in a step
    with pytest.raises(UserError, match="different held-out problems"):
        tasks.eval_problems(150)


def test_a_space_without_held_out_problems_is_named() -> None:
    params = {"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1}
    with pytest.raises(UserError, match=r"too small|different held-out"):
        build_tasks({"sums": TaskConfig(name="chain_sum", params=params)}).eval_problems(8)


def test_draws_depend_on_their_arguments_alone() -> None:
    first = build_tasks({"gcd": TaskConfig(), "sums": SMALL})
    later = build_tasks({"gcd": TaskConfig(), "sums": SMALL})
    later.draw("me", 9, 3)
    assert [p.id for p in first.draw("me", 4, 6)] == [p.id for p in later.draw("me", 4, 6)]
    assert [p.id for p in first.draw("me", 4, 3)] == [p.id for p in first.draw("me", 4, 6)][:3]
    assert {p.id for p in first.draw("me", 4, 6)} != {p.id for p in first.draw("me", 5, 6)}
    assert first.eval_problems(2) == later.eval_problems(2)


def test_tasks_are_drawn_by_weight() -> None:
    tasks = build_tasks({"gcd": TaskConfig(weight=3.0), "sums": SMALL, "lcm": TaskConfig(weight=0.0)})
    share = Counter(p.task for step in range(100) for p in tasks.draw("me", step, 8))
    assert set(share) == {"gcd", "sums"} and 540 < share["gcd"] < 660
    assert {p.task for p in tasks.draw("me", 0, 8, {"lcm": 1.0})} == {"lcm"}
    with pytest.raises(UserError, match="unknown task 'no'"):
        tasks.draw("me", 0, 1, {"no": 1.0})
    with pytest.raises(UserError, match="positive weight"):
        tasks.draw("me", 0, 1, {"gcd": 0.0})


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({}, "no tasks"),
        ({"chain_summ": TaskConfig()}, "did you mean 'chain_sum'"),
        ({"chain_sum": TaskConfig(params={"max_digit": 2})}, "did you mean 'max_digits'"),
        ({"chain_sum": TaskConfig(params={"seed": 2})}, "set by coterie"),
        ({"chain_sum": TaskConfig(params={"max_terms": 1})}, "max_terms must be >= min_terms"),
        ({"chain_sum": TaskConfig(params={"max_terms": "many"})}, "chain_sum"),
        ({"composite": TaskConfig()}, "list the tasks themselves"),
    ],
)
def test_errors_say_what_to_do(cfg: dict[str, TaskConfig], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_tasks(cfg)


def test_a_shared_memory_makes_each_problem_once_and_changes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """For task sets that differ in what is put around a problem; the newest are kept."""
    made: list[int] = []
    item = reasoning_gym.item
    monkeypatch.setattr(reasoning_gym, "item", lambda n, p, i: (made.append(i), item(n, p, i))[1])
    apart = build_tasks({"sums": SMALL}).draw("me", 0, 8)
    plain = len(made)
    records = reasoning_gym.remembering(size=1000)
    mine = build_tasks({"sums": SMALL}, records=records)
    other = build_tasks({"sums": SMALL.model_copy(update={"suffix": " ?", "weight": 2.0})}, records=records)
    assert mine.draw("me", 0, 8) == apart and len(made) == 2 * plain
    checked = [other.problem_from_id(p.id) for p in apart]
    assert len(made) == 2 * plain and [p.prompt for p in checked] == [p.prompt + " ?" for p in apart]
    small = build_tasks({"sums": SMALL}, records=reasoning_gym.remembering(size=1))
    for index in (1, 2, 1):
        small.tasks["sums"].problem(index)
    assert made[2 * plain :] == [1, 2, 1]


def test_rw28_one_dataset_object_per_task_and_parameters() -> None:
    assert (
        reasoning_gym.dataset("gcd")
        is reasoning_gym.dataset("gcd", {})
        is reasoning_gym.dataset("gcd", {"min_numbers": 2})
    )
    assert reasoning_gym.dataset("gcd", {"max_numbers": 3}) is not reasoning_gym.dataset("gcd")


def test_libraries_that_print_while_they_draw_are_kept_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    problem_from_id("reasoning_gym/boxnet#7")
    assert capfd.readouterr() == ("", "")


def test_drawing_leaves_the_process_wide_random_state_alone() -> None:
    random.seed(1), np.random.seed(1)
    expected = random.random(), np.random.rand()
    random.seed(1), np.random.seed(1)
    build_tasks({"pool_matrix": TaskConfig(), "list_functions": TaskConfig()}).draw("me", 0, 8)
    assert (random.random(), np.random.rand()) == expected


def test_rw05_tasks_without_a_single_answer_have_no_reference() -> None:
    for name in ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"):
        problem = problem_from_id(f"reasoning_gym/{name}#5")
        assert problem.reference is None and problem.verifier == "task" and problem.prompt
        assert isinstance(hash(problem), int)


_MAKE = """
import hashlib, json, sys
from coterie.tasks import problem_from_id
print(json.dumps([hashlib.sha256(repr((p.prompt, p.reference)).encode()).hexdigest()
                  for p in map(problem_from_id, json.loads(sys.argv[1]))]))
"""
_SLOW = {"acre", "futoshiki", "knight_swap", "zebra_puzzles", "puzzle24", "quantum_lock", "arc_agi"}


def _hashes(ids: list[str], hash_seed: str) -> list[str]:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    out = subprocess.run(
        [sys.executable, "-c", _MAKE, json.dumps(ids)], env=env, check=True, capture_output=True, text=True
    )
    result: list[str] = json.loads(out.stdout)
    return result


def test_ids_of_hash_dependent_tasks_mean_the_same_in_every_process() -> None:
    ids = [f"reasoning_gym/{name}#{i}" for name in sorted(reasoning_gym.HASH_DEPENDENT) for i in (17, 1999)]
    assert os.environ.get("PYTHONHASHSEED") != "0"  # this process makes them in the helper
    here = [problem_from_id(i) for i in ids]
    there = _hashes(ids, "0")  # that one makes them itself
    assert [hashlib.sha256(repr((p.prompt, p.reference)).encode()).hexdigest() for p in here] == there


@pytest.mark.slow
def test_ids_of_all_tasks_mean_the_same_in_every_process() -> None:
    ids = [f"reasoning_gym/{n}#{i}" for n in list_names() for i in ((3,) if n in _SLOW else (3, 444, 1999))]
    first, second = _hashes(ids, "1"), _hashes(ids[::-1], "2")[::-1]
    assert [i for i, a, b in zip(ids, first, second, strict=True) if a != b] == []


def test_describe_backs_tasks_show() -> None:
    shown = describe("chain_sum", {"max_digits": 2})
    assert shown["params"]["max_digits"] == 2 and shown["params"]["min_terms"] == 2
    assert shown["example"]["prompt"] and shown["example"]["answer"] and not describe("gcd")["needs_worker"]
    assert describe("countdown")["needs_worker"] and describe("countdown")["evaluates_text"]
    assert canonical_json(shown)
    assert len(list_names()) == 105
