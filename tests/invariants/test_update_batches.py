"""How a batch is padded, ordered or cut does not change the update."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from batch_kit import advantages_for, double, gradients, group, naive_stats, random_groups, relative_error, trajectory
from engine_models import EOS, tiny_model

from coterie.batching import Batch, collate, micro_batches
from coterie.forward import Forward

KINDS = ["llama", "gpt2"]  # rotary and absolute positions


def loss_of(logprobs: torch.Tensor, part: Batch, normalization: str = "token") -> torch.Tensor:
    per_row = (logprobs * part.advantages).sum(1)  # [B]
    if normalization == "sequence":
        per_row = per_row / part.loss_mask.sum(1).clamp(min=1)
        return -per_row.sum() / max(1, part.normalizers.rows)
    return -per_row.sum() / max(1, part.normalizers.policy)


def update(model: torch.nn.Module, parts: list[Batch], normalization: str = "token") -> tuple[float, dict]:
    model.zero_grad()
    forward, total = Forward(model), 0.0
    for part in parts:
        loss = loss_of(forward(part).logprobs, part, normalization)
        if loss.requires_grad:
            loss.backward()
        total += loss.item()
    return total, gradients(model)


@pytest.mark.parametrize("normalization", ["token", "sequence"])
@pytest.mark.parametrize("kind", KINDS)
def test_ob08_ob09_microbatch_cuts_give_the_same_update(kind: str, normalization: str) -> None:
    model = tiny_model(kind).eval()
    prompt = [5, 6, 7]
    lengths = [1, 9, 2, 3, 12, 1, 5, 7]
    g = group("a", *(trajectory(prompt, [10 + i] * n) for i, n in enumerate(lengths)))
    batch = collate([g], advantages_for([g]), "me")
    whole = update(model, [batch], normalization)
    for size in (1, 2, 4):  # 8 x 1, 4 x 2, 2 x 4
        parts = [batch.rows(range(i, i + size)) for i in range(0, 8, size)]
        loss, grads = update(model, parts, normalization)
        assert math.isclose(loss, whole[0], rel_tol=1e-5, abs_tol=1e-6)
        assert relative_error(grads, whole[1]) < 1e-5


@pytest.mark.parametrize("budget", [1, 20, 45, 1000])
def test_ob08_token_budget_never_changes_the_update(budget: int) -> None:
    model = tiny_model("llama").eval()
    groups = random_groups(1)
    batch = collate(groups, advantages_for(groups), "me")
    whole = update(model, [batch])
    loss, grads = update(model, micro_batches(batch, budget))
    assert math.isclose(loss, whole[0], rel_tol=1e-5, abs_tol=1e-6)
    assert relative_error(grads, whole[1]) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_ro02_a_row_scores_the_same_alone_and_beside_longer_neighbours(kind: str) -> None:
    forward = Forward(tiny_model(kind).eval())
    short, long = group("s", trajectory([3, 4], [5, 6, 1])), group("l", trajectory(list(range(2, 30)), [7] * 20))
    alone = forward(collate([short], [[1.0]], "me")).logprobs
    beside = forward(collate([long, short], [[1.0], [1.0]], "me")).logprobs
    assert torch.allclose(alone[0], beside[1, : alone.shape[1]], atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_order_of_groups_and_rows_does_not_matter(kind: str) -> None:
    model = tiny_model(kind).eval()
    groups = random_groups(2)
    advantages = advantages_for(groups)
    backwards = [dataclasses.replace(g, trajectories=g.trajectories[::-1]) for g in groups[::-1]]
    a = update(model, [collate(groups, advantages, "me")])
    b = update(model, [collate(backwards, [x[::-1] for x in advantages[::-1]], "me")])
    assert math.isclose(a[0], b[0], rel_tol=1e-5, abs_tol=1e-6)
    assert relative_error(a[1], b[1]) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_ro01_sampled_eos_is_trained_when_pad_is_eos(kind: str) -> None:
    model = tiny_model(kind).eval()
    assert model.config.pad_token_id in (EOS, None)
    g = group("a", trajectory([EOS, 4], [5, EOS]), trajectory([EOS, 4], [5, EOS, 6, 7, EOS]))
    batch = collate([g], [[1.0, -1.0]], "me")
    assert batch.loss_mask.tolist() == [[False, False, True, True, False, False, False], [False, False] + [True] * 5]
    got = Forward(model)(batch).logprobs
    assert torch.allclose(got.double(), naive_stats(double(model), batch)[0], atol=2e-5)
    assert float(got.detach()[0, 3]) != 0.0 and got.detach()[0, 4:].abs().sum() == 0


def test_ro16_empty_and_one_token_responses_are_finite() -> None:
    model = tiny_model("llama").eval()
    g = group("a", trajectory([3, 4], []), trajectory([3, 4], [EOS]))
    batch = collate([g], [[1.0, -1.0]], "me")
    loss, grads = update(model, [batch])
    assert math.isfinite(loss) and all(bool(t.isfinite().all()) for t in grads.values())


@pytest.mark.parametrize(
    "groups", [[], [group("a", trajectory([3, 4], []), trajectory([3], []))]], ids=["none", "empty"]
)
def test_ob10_ob11_nothing_to_train_on_is_finite(groups: list) -> None:
    batch = collate(groups, [[1.0, 1.0]] * len(groups), "me")
    stats = Forward(tiny_model("llama").eval())(batch)
    assert stats.layout == "none" and stats.tokens == 0
    for values in (stats.logprobs, stats.entropy, stats.sum_sq):
        assert values.shape == batch.input_ids.shape and bool(values.isfinite().all())
    assert math.isfinite(loss_of(stats.logprobs, batch).item())
    assert sum(len(part) for part in micro_batches(batch, 100)) == len(batch)


def test_rows_without_signal_cost_nothing_and_change_nothing() -> None:
    model = tiny_model("llama").eval()
    groups = random_groups(3)
    advantages = advantages_for(groups)
    advantages[1] = [0.0] * len(advantages[1])
    advantages[2][0] = 0.0
    full = collate(groups, advantages, "me")
    lean = collate(groups, advantages, "me", drop_zero_advantages=True)
    assert len(lean) == len(full) - 5 and lean.normalizers == full.normalizers
    a, b = update(model, [full]), update(model, [lean])
    assert math.isclose(a[0], b[0], rel_tol=1e-5, abs_tol=1e-6)
    assert relative_error(a[1], b[1]) < 1e-5
    assert Forward(model)(lean).tokens < Forward(model)(full).tokens
