"""Problems from a JSONL file: what is read, how it is split, and errors that name file and line (CL-03)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coterie.config import TaskConfig
from coterie.errors import UserError
from coterie.tasks import Scorer, UnknownProblem, build_tasks, split_of


def _file(tmp_path: Path, *lines: object) -> TaskConfig:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n", encoding="utf-8")
    return TaskConfig(kind="jsonl", path=str(path))


def _many(tmp_path: Path, n: int = 200) -> TaskConfig:
    return _file(tmp_path, *({"prompt": f"{i}+1=", "answer": i + 1, "verifier": "numeric"} for i in range(n)))


def test_lines_become_problems_with_ids_of_content_and_line(tmp_path: Path) -> None:
    tasks = build_tasks({"mine": _many(tmp_path).model_copy(update={"suffix": " ?"})})
    problem = tasks.draw("me", 0, 1)[0]
    kind, _, line = problem.id.partition("#")
    assert kind.startswith("jsonl/") and len(kind) == len("jsonl/") + 12
    assert problem.prompt == f"{int(line) - 1}+1= ?" and problem.reference == line
    assert tasks.problem_from_id(problem.id) == problem
    with pytest.raises(UnknownProblem):
        tasks.problem_from_id(f"{kind}#100000")
    with Scorer() as scorer:
        assert scorer.score([(problem, f"<answer>{line}.0</answer>")])[0].reward == 1.0


def test_train_and_held_out_lines_are_apart_and_duplicates_count_once(tmp_path: Path) -> None:
    lines = [{"prompt": f"p{i % 50}", "answer": "a"} for i in range(150)]
    tasks = build_tasks({"mine": _file(tmp_path, *lines)})
    train = {p.prompt for step in range(60) for p in tasks.draw("me", step, 8)}
    held_out = {p.prompt for p in tasks.eval_problems(3)["mine"]}
    assert len(held_out) == 3 and not held_out & train and len(train) > 30
    assert all(split_of(p) == "train" for p in tasks.draw("me", 0, 8))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", ', r"data\.jsonl:2: not valid JSON: .* at column"),
        ("[1]", r":2: expected an object"),
        ({"answer": "b"}, r":2: `prompt` must be"),
        ({"prompt": "", "answer": "b"}, r":2: `prompt` must be"),
        ({"prompt": "a"}, r":2: `answer` must be"),
        ({"prompt": "a", "answer": None}, r":2: `answer` must be"),
        ({"prompt": "a", "answer": "b", "verifier": "exactt"}, r":2: unknown verifier 'exactt'; did you mean 'exact'"),
        ({"prompt": "a", "answer": "b", "verifier": 3}, r":2: `verifier` must be"),
        ({"prompt": "a", "answer": "b", "verifier": "code"}, r":2: `tests` must be"),
        ({"prompt": "a", "answer": "b", "verifier": "task"}, r":2: verifier 'task' is for reasoning-gym"),
        ({"prompt": "a", "answr": "b"}, r":2: unknown key 'answr'"),
    ],
)
def test_cl03_errors_name_file_and_line(tmp_path: Path, line: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_tasks({"mine": _file(tmp_path, {"prompt": "a", "answer": "b"}, line)})


def test_missing_empty_and_too_small_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        build_tasks({"mine": TaskConfig(kind="jsonl", path=str(tmp_path / "none.jsonl"))})
    with pytest.raises(UserError, match="needs a path"):
        build_tasks({"mine": TaskConfig(kind="jsonl")})
    with pytest.raises(UserError, match="has no problems"):
        build_tasks({"mine": _file(tmp_path, "")})
    with pytest.raises(UserError, match="add more lines"):
        build_tasks({"mine": _file(tmp_path, {"prompt": "x", "answer": "b"})}).eval_problems(1)


def test_weighted_verifier_and_custom_verifier_on_a_line(tmp_path: Path) -> None:
    lines = [{"prompt": f"p{i}", "answer": "3", "verifier": {"exact": 0.5, "mine": 0.5}} for i in range(9)]
    problem = build_tasks({"mine": _file(tmp_path, *lines)}, ["mine"]).draw("me", 0, 1)[0]
    with Scorer(verifiers={"mine": lambda p, answer: 0.5}) as scorer:
        assert scorer.score([(problem, "<answer>3</answer>")])[0].reward == pytest.approx(0.75)
