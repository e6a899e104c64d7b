"""The supervised arm, through the command: worked answers are imitated, loss falls, the run is an ordinary run."""

from pathlib import Path

import pytest

from coterie.config import load_config
from coterie.errors import UserError
from coterie.models import tiny_tasks
from coterie.models.worked import WORKED, worked_answer
from coterie.run import train
from coterie.rundir import read_jsonl
from coterie.tasks import Scorer, build_tasks

FLAGS = (
    "--method sft --steps 6 --threads 1 --sft.rows 32 --eval.problems 8 --eval.samples 2 --optim.lr 1e-3 "
    "--tasks.count_bits.params={min_n=1,max_n=1023}"
)


def test_worked_answers_are_right_by_the_tasks_own_scorer() -> None:
    tasks = build_tasks(tiny_tasks())
    assert set(WORKED) == set(tasks.tasks)
    with Scorer() as scorer:
        pairs = [(p, worked_answer(p, i)) for i, p in enumerate(tasks.draw("worked", 0, 60))]
        assert [s.reward for s in scorer.score(pairs)] == [1.0] * 60


def test_loss_falls_and_the_log_says_what_was_trained(tmp_path: Path) -> None:
    """Bare reference answers: `tiny` never wrote any without working them out, so there is much to imitate."""
    train(load_config(None, [*FLAGS.split(), "--run_dir", str(tmp_path / "run")]), quiet=True)
    losses = [r["sft/loss"] for r in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "sft/loss" in r]
    assert len(losses) == 6 and losses[-1] < losses[0]


def test_a_function_that_does_not_exist_is_named(tmp_path: Path) -> None:
    flags = f"{FLAGS} --run_dir {tmp_path / 'run'} --sft.answers coterie.models.worked:nothing"
    with pytest.raises(UserError, match="has no function nothing"):
        train(load_config(None, flags.split()), quiet=True)
