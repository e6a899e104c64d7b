"""Hostile answers through the public scoring call: no effect outside, score 0, counted, and the next score is right."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coterie.config import ScoringConfig
from coterie.sandbox import gate, pool
from coterie.tasks import Score, Scorer, list_names, problem_from_id, reasoning_gym
from coterie.types import Problem

EVALUATING = sorted(gate.GRAMMARS)
_IMPORT = "__import__('os')"
EXPRESSIONS = {
    "file": "open({marker!r}, 'w').write('x')",
    "shell": _IMPORT + ".system('touch ' + {marker!r})",
    "socket": "__import__('socket').create_connection(('127.0.0.1', {port}))",
    "environment": _IMPORT + ".environ['COTERIE_CANARY']",
    "fork": "[" + _IMPORT + ".fork(), " + _IMPORT + ".fork()]",
    "memory": "bytearray(10**11)",
    "loop": "[0 for _ in iter(int, 1)]",
    "kill": "[" + _IMPORT + ".kill(p, 9) for p in (" + _IMPORT + ".getppid(), {pid})]",
    "print": "[print('x' * 10**6) for _ in range(1000)]",
}
_RIGHT = "\ndef add(a, b):\n    return a + b\n"
PROGRAMS = {
    "file": ("open({marker!r}, 'w').write('x')", "breach:syscall"),
    "shell": ("import os; os.system('touch ' + {marker!r})", "breach:syscall"),
    "socket": ("import socket; socket.create_connection(('127.0.0.1', {port}))", "breach:syscall"),
    "environment": ("import os; os.environ['COTERIE_CANARY']", "ok"),
    "fork": ("import os\nwhile True:\n    os.fork()", "breach:syscall"),
    "thread": ("import threading\nthreading.Thread(target=print).start()", "breach:syscall"),
    "memory": ("x = bytearray(10**11)", "breach:memory"),
    "loop": ("while True:\n    pass", "breach:timeout"),
    "kill": ("import os; os.kill(os.getppid(), 9)", "breach:syscall"),
    "kill trainer": ("import os; os.kill({pid}, 9)", "breach:syscall"),
    "print": ("for _ in range(1000):\n    print('x' * 10**6)", "breach:output"),
    "write out": ("import os\nfor _ in range(1000):\n    os.write(1, b'x' * 10**6)", "breach:output"),
    "crash": ("import ctypes; ctypes.string_at(0)", "breach:crash"),
    "leave": ("import os; os._exit(0)", "breach:crash"),
    "exit": ("import sys; sys.exit(0)", "ok"),
    "recursion": ("def f(): f()\nf()", "ok"),
}
FAKES = {
    "equals everything": "def add(a, b):\n    class E:\n        def __eq__(self, o): return True\n    return E()",
    "int that lies": "class I(int):\n    def __eq__(self, o): return True\ndef add(a, b): return I(0)",
    "builtins": "import builtins\nbuiltins.AssertionError = Exception\nall = any = lambda *a: True\ndef add(a, b): return 0",
    "tracing": "import sys, os\nsys.settrace(lambda *a: os._exit(0))\ndef add(a, b): return 0",
    "writes verdicts": (
        "import os, struct, json\n"
        "v = json.dumps(dict(reward=1.0, outcome='ok', detail='')).encode()\n"
        "def add(a, b):\n    for fd in range(3, 64):\n        try:\n            os.write(fd, struct.pack('<I', len(v)) + v)\n"
        "        except OSError:\n            pass\n    return 0"
    ),
    "huge reply": "def add(a, b):\n    return 'x' * 10**7",
    "deep reply": "def add(a, b):\n    x = []\n    for _ in range(10**5):\n        x = [x]\n    return x",
}


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COTERIE_CANARY", "secret")
        with Scorer(ScoringConfig(timeout_s=15.0, memory_mb=256)) as s:
            assert s.confined(), s.cage_report()
            yield s


@pytest.fixture(scope="module")
def impatient() -> Iterator[Scorer]:
    """For answers that are to run out of time."""
    with Scorer(ScoringConfig(timeout_s=1.0, memory_mb=256)) as s:
        yield s


@pytest.fixture(scope="module")
def open_gate() -> Iterator[Scorer]:
    """A scorer whose workers evaluate whatever the library evaluates: only the cage is left."""
    start = pool._START.replace("main(sys", "from coterie.sandbox import gate; gate.GRAMMARS.clear(); main(sys")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COTERIE_CANARY", "secret")
        patch.setattr(pool, "_START", start)
        with Scorer(ScoringConfig(timeout_s=4.0, memory_mb=256)) as s:
            assert s.confined()
            yield s


class Outside:
    """What an attack could reach: a marker file and a listening port."""

    def __init__(self, folder: Path) -> None:
        self.marker = folder / "marker"
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(0.02)

    def fill(self, attack: str) -> str:
        port = self.listener.getsockname()[1]
        return attack.format(marker=str(self.marker), port=port, pid=os.getpid())

    def check_untouched(self) -> None:
        assert not self.marker.exists()
        with pytest.raises(TimeoutError):
            self.listener.accept()


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Outside]:
    out = Outside(tmp_path)
    yield out
    out.check_untouched()
    out.listener.close()


def _code(scorer: Scorer, code: str, tests: str = "assert add(1, 2) == 3") -> Score:
    return scorer.score([(Problem("jsonl/000000000000#1", "t", "p", tests, "code"), f"```python\n{code}\n```")])[0]


def _right(scorer: Scorer, problem: Problem) -> None:
    answer = problem.metadata["entry"]["metadata"].get("expression") or problem.reference
    assert scorer.score([(problem, f"<answer>{answer}</answer>")])[0].reward == 1.0


def test_rw01_the_list_of_evaluating_tasks_is_complete() -> None:
    """Every scorer whose source calls eval, exec, sympy's parser and the like has been read: its answer is gated, or safe."""
    found = {name for name in list_names() if reasoning_gym.evaluates_text(name)}
    assert found == set(gate.GRAMMARS) | gate.REVIEWED


@pytest.mark.parametrize("task", EVALUATING)
def test_rw01_hostile_answers_to_evaluating_tasks_are_refused(task: str, scorer: Scorer, outside: Outside) -> None:
    problem = problem_from_id(f"reasoning_gym/{task}#11")
    before = scorer.counts["breach:forbidden"]
    scores = scorer.score((problem, f"<answer>{outside.fill(attack)}</answer>") for attack in EXPRESSIONS.values())
    assert {(s.reward, s.counted_as) for s in scores} == {(0.0, "breach:forbidden")}
    assert scorer.counts["breach:forbidden"] == before + len(EXPRESSIONS)
    _right(scorer, problem)


@pytest.mark.parametrize("grammar", ["literal", "expression"])
@pytest.mark.parametrize(
    "text",
    [
        "().__class__", "(lambda: 1)()", "[x for x in [1]]", "f'{print(1)}'", "[1][0]", "(x := 1)", "1 if 1 else 2",
        "eval('1')", "\uff45val('1')", "sin(eval('1'))", "sin(*[1])", "sin(x=1)", "sin(x)(y)", "S('1')", "Symbol('x')",
        "\neval('1')", "\t eval('1')", "# coding: utf-7\neval('1')", "not 1", "1 < 2", "a @ b", "__builtins__", "b'x'.hex()",
    ],
)  # fmt: skip
def test_the_gate_refuses_everything_that_can_act(text: str, grammar: str) -> None:
    task = next(name for name, kind in gate.GRAMMARS.items() if kind == grammar)
    with pytest.raises(gate.Forbidden):
        gate.check(task, text)


@pytest.mark.parametrize("text", ["x**2/2 + sin(3*x)*exp(-x) + C", "2*(10 + 3) - 2", "-x", "1.5e3", "sqrt(2)//1"])
def test_the_gate_lets_formulas_pass(text: str) -> None:
    gate.check("simple_integration", text)


@pytest.mark.parametrize("text", ["[[1, 0], [0, 1]]", "['a', 'b']", "1 2 3", "_ Q _", "ABCDE", "[-1]", "((((" * 50])
def test_the_gate_lets_lists_and_plain_text_pass(text: str) -> None:
    gate.check("spiral_matrix", text)


@pytest.mark.parametrize("task", EVALUATING)
def test_rw01_the_cage_holds_where_the_answer_is_really_evaluated(
    task: str, open_gate: Scorer, outside: Outside
) -> None:
    problem = problem_from_id(f"reasoning_gym/{task}#11")
    attacks = [outside.fill(EXPRESSIONS[kind]) for kind in ("file", "fork")]
    scores = open_gate.score((problem, f"<answer>{attack}</answer>") for attack in attacks)
    assert [(s.reward, s.counted_as) for s in scores] == [(0.0, "breach:syscall")] * 2
    _right(open_gate, problem)


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXPRESSIONS)
@pytest.mark.parametrize("task", EVALUATING)
def test_rw01_every_attack_on_every_task_without_the_gate(
    task: str, kind: str, open_gate: Scorer, outside: Outside
) -> None:
    problem = problem_from_id(f"reasoning_gym/{task}#11")
    score = open_gate.score([(problem, f"<answer>{outside.fill(EXPRESSIONS[kind])}</answer>")])[0]
    assert score.reward == 0.0 and score.outcome in ("breach", "ok", "error")
    _right(open_gate, problem)


@pytest.mark.parametrize("task", ["countdown", "puzzle24", "polynomial_multiplication", "simple_integration"])
def test_expensive_formulas_pass_the_gate_and_are_stopped(task: str, impatient: Scorer) -> None:
    problem = problem_from_id(f"reasoning_gym/{task}#11")
    score = impatient.score([(problem, "<answer>9**9**9**9</answer>")])[0]
    assert (score.reward, score.counted_as) == (0.0, "breach:timeout")
    _right(impatient, problem)


@pytest.mark.parametrize("kind", PROGRAMS)
def test_hostile_programs(kind: str, scorer: Scorer, impatient: Scorer, outside: Outside) -> None:
    attack, expected = PROGRAMS[kind]
    if kind == "loop":
        scorer = impatient
    before = scorer.counts[expected]
    score = _code(scorer, outside.fill(attack) + _RIGHT)
    assert (score.reward, score.counted_as) == (0.0, expected), score
    assert scorer.counts[expected] == before + 1
    assert _code(scorer, _RIGHT).reward == 1.0


@pytest.mark.parametrize("kind", FAKES)
def test_a_program_cannot_write_its_own_verdict(kind: str, scorer: Scorer) -> None:
    score = _code(scorer, FAKES[kind])
    assert score.reward == 0.0 and score.counted_as != "breach:timeout"
    assert (score.counted_as == "breach:reply") == (kind == "huge reply"), score
    assert _code(scorer, _RIGHT).reward == 1.0


def test_a_program_sees_no_environment_no_descriptor_and_no_file(scorer: Scorer) -> None:
    secret = os.open("/etc/hostname", os.O_RDONLY)
    os.set_inheritable(secret, True)
    code = """
import os
def environment():
    return {k: v for k, v in os.environ.items() if "NUM_THREADS" not in k and not k.startswith("LC_")}
def descriptors():
    out = []
    for fd in range(256):
        try:
            os.fstat(fd)
            out.append(fd)
        except OSError:
            pass
    return len(out)
def reads(path):
    try:
        return len(os.listdir(path) if path.endswith("/") else open(path).read()) >= 0
    except OSError:
        return False
"""
    tests = "assert environment() == {}, environment()\nassert descriptors() == 5, descriptors()\n"
    for path in ("/etc/hostname", "/proc/self/environ", "/tmp/", os.getcwd() + "/", os.path.expanduser("~/")):
        tests += f"assert not reads({path!r}), {path!r}\n"
    try:
        score = _code(scorer, code, tests)
    finally:
        os.close(secret)
    assert score.reward == 1.0, score


MATH = {
    "power tower": (r"9^{9^{9^{9}}}", "breach:timeout"),  # RW-10
    "python": ("__import__('os').system('touch {marker}')", "ok"),
    "file": ("open('{marker}', 'w').write('x')", "ok"),
    "deep": ("{" * 5000 + "1" + "}" * 5000, None),
    "factorial": "((10^9)!)!",
}


@pytest.mark.parametrize("kind", MATH)
def test_hostile_formulas(kind: str, impatient: Scorer, outside: Outside) -> None:
    case: Any = MATH[kind]
    text, expected = case if isinstance(case, tuple) else (case, None)
    problem = Problem("jsonl/000000000000#1", "t", "p", r"\frac{1}{3}x", "math")
    text = text.replace("{marker}", str(outside.marker))
    score = impatient.score([(problem, f"<answer>{text}</answer>")])[0]
    assert score.reward == 0.0 and expected in (None, score.counted_as), score
    assert impatient.score([(problem, r"\boxed{x/3}")])[0].reward == 1.0


def test_an_unreviewed_evaluating_task_is_scored_alone(scorer: Scorer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "REVIEWED", frozenset())
    problem = problem_from_id("reasoning_gym/number_sorting#5")
    texts = [problem.reference, "[1]", problem.reference]
    assert [s.reward for s in scorer.score((problem, f"<answer>{t}</answer>") for t in texts)] == [1.0, 0.0, 1.0]


def test_text_of_others_is_not_scored_where_a_wall_is_missing(scorer: Scorer, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_from_id("reasoning_gym/spiral_matrix#5")
    right = f"<answer>{problem.reference}</answer>"
    assert scorer.score([(problem, right)], untrusted=True)[0].reward == 1.0
    report = scorer.cage_report() | {"files": "Landlock is not available"}
    monkeypatch.setattr(scorer, "cage_report", lambda: report)
    refused = scorer.score([(problem, right)], untrusted=True)[0]
    assert (refused.reward, refused.outcome) == (None, "unconfined")
    assert scorer.score([(problem, right)])[0].reward == 1.0  # one's own model
    monkeypatch.setattr(scorer, "cfg", scorer.cfg.model_copy(update={"allow_unconfined": True}))
    assert scorer.score([(problem, right)], untrusted=True)[0].reward == 1.0


def test_a_worker_killed_from_outside_is_replaced(scorer: Scorer) -> None:
    pids = subprocess.run(
        ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True
    ).stdout
    workers = [int(line.split()[0]) for line in pids.splitlines() if "sandbox.worker" in line]
    assert workers
    for pid in workers:
        os.kill(pid, 9)
    assert _code(scorer, _RIGHT).reward == 1.0
