"""Format leakage: whose form an answer has."""

from __future__ import annotations

from coterie.models import DOMAINS, tiny_tasks
from coterie.models.worked import worked_answer
from coterie.parallel.forms import Forms, form, leaked
from coterie.tasks.taskset import build_tasks


def test_a_form_keeps_signs_and_tags_and_nothing_of_the_content() -> None:
    assert form("38-57=-19<answer>-19") == "00-00=-00<answer>-00"
    assert form("s1U2<answer>Us</answer>") == "a0A0<answer>Aa</answer>"


def test_held_out_worked_answers_are_known_by_their_form_and_a_stranger_is_counted() -> None:
    tasks = build_tasks(tiny_tasks())
    examples = {n: [worked_answer(t.sample("train", "forms", i), i) for i in range(60)] for n, t in tasks.tasks.items()}
    forms = Forms(examples)
    right = {n: [worked_answer(p, 1) for p in ps] for n, ps in tasks.eval_problems(12).items()}
    own = [leaked(forms, DOMAINS, n, texts) for n, texts in right.items()]
    assert sum(own) / len(own) < 0.05
    assert leaked(forms, DOMAINS, "spell_backward", right["gcd"]) == 1.0
    assert leaked(forms, DOMAINS, "word_sorting", right["spell_backward"]) == 0.0  # the same domain
    assert leaked(forms, DOMAINS, "gcd", [*right["gcd"], *right["ab"]]) == 0.5
