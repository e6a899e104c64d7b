"""Known faults of training loops, each against the real parts: `tiny`, its tasks, the scorer, the loss."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coterie.advantages import group_advantages
from coterie.batching import collate
from coterie.config import Config, load_config
from coterie.errors import UserError
from coterie.loss_metrics import loss_metrics
from coterie.losses import policy_loss
from coterie.rollout import Rollout, rollout_metrics, training_sampling
from coterie.run import build
from coterie.trainer import Trainer
from coterie.types import Group, Problem


def config(*flags: str) -> Config:
    base = "--threads 1 --rollout.problems 3 --rollout.group_size 4 --tasks.count_bits.params={min_n=1,max_n=1023}"
    return load_config(None, [*base.split(), *flags])


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    with build(config()) as t:
        yield t


def test_ro17_resampling_is_bounded_when_every_task_is_hopeless() -> None:
    """A budget of one token makes every answer wrong: three tries, then a step without an update, counted."""
    with build(config("--rollout.resample", "2", "--rollout.max_new_tokens", "1")) as trainer:
        before = {k: v.clone() for k, v in trainer.policy.weights().items()}
        metrics, groups = trainer.train_step()
        assert len(groups) == 9 and metrics["own/groups"] == 9  # 3 problems, 3 rounds
        assert metrics["policy/nothing_to_train"] == 1 and metrics["own/informative"] == 0
        assert all((before[k] == v).all() for k, v in trainer.policy.weights().items())


def test_ro18_resampling_refills_with_other_problems_and_counts(trainer: Trainer) -> None:
    with build(config("--rollout.resample", "4", "--swarm.own_selection", "informative")) as trainer:
        metrics, groups = trainer.train_step()
        informative = sum(g.informative for g in groups)
        assert metrics["update/own_groups"] == min(3, informative) and metrics["own/groups"] == len(groups) >= 3
        assert len({g.problem.id for g in groups}) == len(groups)


def test_ro19_ro20_groups_are_by_id_have_g_members_and_equal_prompts_stay_apart(trainer: Trainer) -> None:
    _, groups = trainer.train_step()
    assert [len(g.trajectories) for g in groups] == [4, 4, 4]
    twin = replace(groups[0], id="twin")
    batch = collate([groups[0], twin, *groups[1:]], None, me="self")
    assert batch.group_index.tolist() == sorted([0, 1, 2, 3] * 4)
    with pytest.raises(ValueError, match="same id"):
        collate([groups[0], groups[0]], None, me="self")


def with_rewards(group: Group, rewards: list[float], name: str) -> Group:
    rows = tuple(replace(t, reward=r) for t, r in zip(group.trajectories, rewards, strict=True))
    return replace(group, id=name, trajectories=rows)


def test_ob06_spread_is_that_within_groups(trainer: Trainer) -> None:
    """Two constant groups with different constants: nothing to learn, and the metrics say so."""
    _, groups = trainer.train_step()
    flat = [with_rewards(groups[0], [1.0] * 4, "a"), with_rewards(groups[0], [0.0] * 4, "b")]
    m = rollout_metrics(Rollout(flat), 4)
    assert m["own/reward"] == 0.5 and m["own/reward_std"] == 0.0 and m["own/informative"] == 0.0
    assert m["own/solved"] == 0.5


def test_ob13_truncated_sampling_cannot_be_trained_on() -> None:
    """The training sampler has full support by construction: there is no setting for top-k or top-p to train with."""
    sampling = training_sampling(config().rollout)
    assert (sampling.top_k, sampling.top_p) == (0, 1.0)
    with pytest.raises(UserError, match="unknown key 'top_p'"):
        config("--rollout.top_p", "0.9")


def test_ck10_an_interrupted_step_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped during scoring, after rollouts were made: no metrics line, no checkpoint, no advanced counter."""
    from coterie.run import Run
    from coterie.rundir import read_jsonl

    cfg = config("--run_dir", str(tmp_path / "run"), "--steps", "2", "--eval.problems", "2", "--eval.samples", "1")
    with Run(cfg, quiet=True) as run:
        run.begin()

        def stop(problem: Problem, text: str, *, untrusted: bool = False) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(run.trainer.scorer, "submit", stop)
        with pytest.raises(KeyboardInterrupt):
            run.advance()
        assert run.trainer.step == 0
    assert [r["step"] for r in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [0]
    assert not (tmp_path / "run" / "checkpoints").exists()
    monkeypatch.undo()
    with Run(cfg, quiet=True) as run:
        run.begin()
        while not run.done:
            run.advance()
    assert [r["step"] for r in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2]


def test_cl06_loss_near_zero_is_not_gradient_zero(trainer: Trainer) -> None:
    """The value of the loss at ratio 1 is the mean advantage, about 0; its gradient is not, and both are logged."""
    for _ in range(5):
        metrics, groups = trainer.train_step()
        if not metrics["policy/nothing_to_train"]:
            break
    assert abs(metrics["loss/total"]) < 0.5 and metrics["policy/grad_norm"] > 1e-3
    advantages = group_advantages(groups)
    batch = collate(groups, advantages, me="self", max_new_tokens=64)
    stats = trainer.policy.logprobs(batch)
    out = policy_loss(stats, batch, trainer.cfg.loss, stats.logprobs.detach())
    assert loss_metrics([out])["loss/own/ratio"] == 1.0
    assert np.isfinite(float(out.loss.detach()))


def test_ob16_kl_to_the_start_is_zero_at_first_and_finite_far_away(trainer: Trainer) -> None:
    groups = trainer._own_groups().groups
    assert abs(trainer.kl_to_start(groups)) < 1e-6
    trainer.policy.load_weights({k: 30 * v for k, v in trainer.policy.weights().items()})
    assert 1.0 < trainer.kl_to_start(groups) < float("inf")
