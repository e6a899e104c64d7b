"""PPO in the loop: advantages per token by hand, and one whole update against a longhand reference in float64."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from batch_kit import H, P, double, group, trajectory
from engine_models import tiny_model
from torch import Tensor

from coterie.batching import collate
from coterie.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from coterie.config import AdvantageConfig, Config, LossConfig, OptimConfig, config_from_dict
from coterie.critic import critic_loss, critic_metrics, plain_rewards, with_gae
from coterie.errors import UserError
from coterie.forward import TokenStats
from coterie.policy import HEAD, Policy, StepResult
from coterie.run import check
from coterie.trainer import Trainer
from coterie.types import Group, StopReason


class NoTokenizer:
    eos_token_id, pad_token_id, bos_token_id, chat_template = 1, 1, None, None
    all_special_ids = (1,)

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "<eos>": 1}


def by_hand() -> list[Group]:
    """Row 0: policy, helper, policy, right. Row 1: one token, wrong and truncated. Row 2: no reward, so no row."""
    return [
        group(
            "g",
            trajectory([5, 6], [7, 8, 9], [P, H, P], reward=1.0),
            trajectory([5, 6], [7], reward=0.0, stop_reason=StopReason.LENGTH),
            trajectory([5, 6], [7, 7], reward=None),
        )
    ]


VALUES = torch.tensor([[9.0, 9.0, 0.5, 9.0, 0.25], [9.0, 9.0, 0.1, 9.0, 9.0]])  # 9: must never be looked at


def test_advantages_and_returns_by_hand() -> None:
    """gamma = lam = 1/2: the last step has 1 - 0.25; the first -0.5 + 0.25 / 2 + 0.75 / 4; the helper's token none."""
    batch = collate(by_hand(), plain_rewards(by_hand()), "me")
    got = with_gae(batch, VALUES, AdvantageConfig(kind="gae", gamma=0.5, lam=0.5, whiten=False))
    torch.testing.assert_close(got.advantages, torch.tensor([[0, 0, -0.1875, 0, 0.75], [0, 0, -0.1, 0, 0]]))
    torch.testing.assert_close(got.returns, torch.tensor([[0, 0, 0.3125, 0, 1.0], [0, 0, 0, 0, 0]]))
    assert got.normalizers == batch.normalizers and got.normalizers.own_rows == 2


def test_whitening_is_over_all_policy_tokens_and_leaves_returns_alone() -> None:
    batch = collate(by_hand(), plain_rewards(by_hand()), "me")
    got = with_gae(batch, VALUES, AdvantageConfig(kind="gae", gamma=0.5, lam=0.5))
    raw = np.array([-0.1875, 0.75, -0.1])
    white = (raw - raw.mean()) / (raw.std() + 1e-6)
    want = torch.zeros(2, 5)
    want[0, 2], want[0, 4], want[1, 2] = (float(w) for w in white)
    torch.testing.assert_close(got.advantages, want)
    torch.testing.assert_close(got.returns[0, 2], torch.tensor(0.3125))


def test_value_loss_in_the_loop_by_hand() -> None:
    """Three steps, token normalisation. Errors: 0.2 - 0.3125 clipped to 0.4 - 0.3125 where the value fell by 0.3 (limit
    0.1): the larger is 0.1125; 0.25 - 1; 0.1 - 0. Half the mean of their squares, times value_coef 0.5."""
    batch = collate(by_hand(), plain_rewards(by_hand()), "me")
    settings = AdvantageConfig(kind="gae", gamma=0.5, lam=0.5, whiten=False, value_clip=0.1, value_coef=0.5)
    batch = with_gae(batch, VALUES, settings)
    now = VALUES.clone()
    now[0, 2] = 0.2
    zero = torch.zeros_like(VALUES)
    cfg = Config(advantage=settings)
    got = critic_loss(TokenStats(zero, zero, zero, values=now), TokenStats(zero, zero, zero, values=VALUES), batch, cfg)
    squares = 0.1125**2 + 0.75**2 + 0.1**2
    assert float(got.loss) == pytest.approx(0.5 * squares / 2 / 3, abs=1e-6)
    metrics = critic_metrics([got])
    assert metrics["value/loss"] == pytest.approx(squares / 6, abs=1e-6)
    assert metrics["value/clipped"] == pytest.approx(1 / 3)
    errors, returns = np.array([0.1125, 0.75, -0.1]), np.array([0.3125, 1.0, 0.0])
    assert metrics["value/explained"] == pytest.approx(1 - errors.var() / returns.var(), abs=1e-5)


def test_a_peers_rows_do_not_train_the_head_and_an_empty_batch_passes() -> None:
    groups = [replace(by_hand()[0], author="somebody")]
    settings = AdvantageConfig(kind="gae")
    batch = with_gae(collate(groups, plain_rewards(groups), "me"), VALUES, settings)
    stats = TokenStats(VALUES * 0, VALUES * 0, VALUES * 0, values=VALUES + 1)
    out = critic_loss(stats, stats, batch, Config(advantage=settings))
    assert float(out.loss) == 0 and critic_metrics([out]) == {}
    empty = collate([], [], "me")
    assert with_gae(empty, torch.zeros(0, 0), settings).returns.shape == (0, 0)


def ppo_policy(**optim: Any) -> Policy:
    policy = Policy(tiny_model("llama").eval(), NoTokenizer(), optim=OptimConfig(**optim), value_head=True)
    with torch.no_grad():
        policy.value_head.weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(0))
        policy.value_head.bias.fill_(0.2)
    return policy


def some_groups() -> list[Group]:
    rng = np.random.default_rng(0)
    out = []
    for g in range(3):
        prompt = [int(i) for i in rng.integers(0, 61, 3 + g)]
        rows = [
            trajectory(prompt, [int(i) for i in rng.integers(0, 61, int(rng.integers(1, 7)))], reward=float(j % 2))
            for j in range(3)
        ]
        out.append(group(f"g{g}", *rows, author="me" if g else "peer"))
    return out


def longhand(policy: Policy, groups: list[Group], cfg: Config) -> Tensor:
    """Row by row and token by token, unpadded, in float64: the loss of PPO with a shared trunk at ratio 1."""
    model, head = double(policy.model), copy.deepcopy(policy.value_head).double()
    rows = [(g.author, t) for g in groups for t in g.trajectories]
    total = sum(t.response_length for _, t in rows)
    found = []
    for author, t in rows:
        out = model(input_ids=torch.tensor([t.token_ids.tolist()]), output_hidden_states=True)
        logp, hidden = torch.log_softmax(out.logits[0], -1), out.hidden_states[-1][0]
        steps = range(t.prompt_length, len(t.token_ids))
        value = {s: head(hidden[s - 1])[0] for s in steps}
        advantage: dict[int, float] = {}
        later_v = later_a = 0.0
        for s in reversed(steps):
            reward = t.reward if s == len(t.token_ids) - 1 else 0.0
            ahead = cfg.advantage.gamma * (later_v + cfg.advantage.lam * later_a)
            later_a = reward + ahead - value[s].item()
            later_v = value[s].item()
            advantage[s] = later_a
        found.append((author, t, logp, value, advantage))
    every = np.array([a for *_, advantage in found for a in advantage.values()])
    loss = torch.zeros((), dtype=torch.float64)
    for author, t, logp, value, advantage in found:
        for s, a in advantage.items():
            weight = 1 / total if cfg.loss.normalization == "token" else 1 / (len(rows) * len(advantage))
            white = (a - every.mean()) / (every.std() + 1e-6)
            p = logp[s - 1][int(t.token_ids[s])]
            loss = loss - weight * (p - p.detach()).exp() * white
            if author == "me":
                target = a + value[s].item()
                loss = loss + cfg.advantage.value_coef * weight * (value[s] - target) ** 2 / 2
    loss.backward()
    grads = [p.grad for p in model.parameters()] + [p.grad for p in head.parameters()]
    return torch.cat([g.flatten() for g in grads])


@pytest.mark.parametrize("normalization", ["token", "sequence"])
@pytest.mark.parametrize("budget", [12, 4096], ids=["cut", "whole"])
def test_one_update_of_the_loop_equals_the_longhand_gradient(
    normalization: str, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = Config(
        advantage=AdvantageConfig(kind="gae", gamma=0.9, lam=0.8),
        loss=LossConfig(normalization=normalization, peer_loss="surrogate"),
        optim=OptimConfig(token_budget=budget),
    )
    policy = ppo_policy()
    trainer = Trainer(cfg, policy, None, None, None)
    monkeypatch.setattr(trainer.node, "author", "me", raising=False)
    grads: list[Tensor] = []

    def step(lr: float) -> StepResult:
        grads.append(torch.cat([p.grad.flatten() for p in policy._trained.values()]))
        return StepResult(0.0, None)

    monkeypatch.setattr(policy, "step", step)
    metrics = trainer._update(trainer._batch(some_groups()))
    want = longhand(policy, some_groups(), cfg)
    error = float((grads[0].double() - want).norm() / want.norm())
    assert error < 1e-4, error
    assert metrics["value/clipped"] == 0 and metrics["loss/own/ratio"] == pytest.approx(1, abs=1e-5)


def test_the_head_is_saved_loaded_and_left_out_of_the_model(tmp_path: Any) -> None:
    policy = ppo_policy()
    assert {n for n in policy.weights() if n.startswith(HEAD)} == {f"{HEAD}weight", f"{HEAD}bias"}
    path = save_checkpoint(tmp_path, Checkpoint(1, policy.weights(), {}, {}), keep=1)
    other = ppo_policy()
    with torch.no_grad():
        other.value_head.weight.zero_()
    other.load_weights(load_checkpoint(path).weights)
    torch.testing.assert_close(other.value_head.weight, policy.value_head.weight)
    assert not any("value_head" in n for n in policy.model.state_dict())


def test_the_head_learns_to_tell_right_from_wrong_states() -> None:
    """Answers that begin with token 3 are right, with 4 wrong: after some steps the value after them differs."""
    groups = [
        group("g", trajectory([5, 6], [3, 7], reward=1.0), trajectory([5, 6], [4, 7], reward=0.0), author="me"),
    ]
    cfg = Config(advantage=AdvantageConfig(kind="gae", value_clip=10), optim=OptimConfig())
    trainer = Trainer(cfg, ppo_policy(), None, None, None)
    trainer.node.author = "me"
    first = trainer._update(trainer._batch(groups))
    for _ in range(60):
        trainer._update(trainer._batch(groups))
    last = trainer._update(trainer._batch(groups))
    assert last["value/explained"] > first["value/explained"]
    assert last["value/loss"] < 0.5 * first["value/loss"]


def test_helpers_tokens_have_no_advantage_so_options_that_need_one_are_refused() -> None:
    data = {
        "tasks": {"gcd": {}},
        "model": {"name": "some/model"},
        "advantage": {"kind": "gae"},
        "rollout": {"max_new_tokens": 512},
        "helpers": {"roles": {"verify": {"backend": "scripted", "table": {"*": "ok"}}}},
    }
    with pytest.raises(UserError, match="no advantage"):
        check(config_from_dict(data | {"loss": {"external_loss": "aipo"}}))
    check(config_from_dict(data | {"loss": {"external_loss": "masked"}}))
