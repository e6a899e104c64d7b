"""The loss as the trainer calls it: normalisation, splits, clipping, KL, degenerate batches, and what it reports."""

from __future__ import annotations

import math

import pytest
import torch
from loss_cases import Row, Stats, build, full
from torch import Tensor

from coterie.batching import Batch, micro_batches
from coterie.config import LossConfig
from coterie.lmhead import token_logprobs
from coterie.loss_metrics import loss_metrics
from coterie.losses import kl_estimate, policy_loss, zero_advantages_are_silent


def random(shape: tuple[int, ...], seed: int, low: float = -2.0, high: float = -0.1) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=g, dtype=torch.float64) * (high - low) + low


def slope(batch: Batch, cfg: LossConfig) -> float:
    """Gradient of the loss when one number is added to every log-prob, at ratio 1."""
    lp = full(batch, -1.0, grad=True)
    out = policy_loss(Stats(lp), batch, cfg, lp.detach())
    return float(torch.autograd.grad(out.loss, lp)[0].sum())


@pytest.mark.parametrize(
    ("normalization", "expected"),
    [
        ("token", -(10 - 1000) / 1010),  # the long row outweighs the short one
        ("sequence", 0.0),  # rows count alike
        ("constant", -(10 - 1000) / (2 * 1000)),
    ],
)
def test_ob07_uneven_lengths_under_three_normalisations(normalization: str, expected: float) -> None:
    """Lengths 10 and 1000, advantages +1 and -1: three different numbers."""
    batch = build([Row("c" + "p" * 10, 1.0), Row("c" + "p" * 1000, -1.0)], max_new_tokens=1000)
    assert slope(batch, LossConfig(normalization=normalization)) == pytest.approx(expected, abs=1e-5)


def test_constant_normalisation_without_a_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="response budget"):
        slope(build([Row("cp")]), LossConfig(normalization="constant"))


ROWS = [
    Row("cppppp", 1.0),
    Row("cpp", -0.5),
    Row("cphhpp", 0.7),
    Row("cp", -1.2, "you"),
    Row("cppphp", 0.4, "you"),
    Row("cppp", 2.0, "you", mu=math.nan),
    Row("cphp", -0.9),
    Row("cpppppppp", 0.1),
]


@pytest.mark.parametrize("normalization", ["token", "sequence", "constant"])
@pytest.mark.parametrize("kind", ["clip", "gspo"])
@pytest.mark.parametrize(("external", "peer"), [("aipo", "truncated_is"), ("ce", "ce"), ("ppo_is", "tapered")])
def test_ob08_ob09_microbatch_splits_change_neither_gradient_nor_metrics(
    normalization: str, kind: str, external: str, peer: str
) -> None:
    """The same eight rows of unequal length as 1 x 8, 2 x 4, 8 x 1 and by token budget."""
    batch = build(ROWS, max_new_tokens=9)
    cfg = LossConfig(
        kind=kind, normalization=normalization, external_loss=external, peer_loss=peer, kl_coef=0.1, lambda_ext=0.7
    )
    shape = tuple(batch.input_ids.shape)
    old, ref = random(shape, 1), random(shape, 2)
    entropy, sum_sq = -random(shape, 3), -random(shape, 4, -0.6)
    theta = random(shape, 0).requires_grad_()
    whole = policy_loss(Stats(theta, entropy, sum_sq), batch, cfg, old, ref)
    (want,) = torch.autograd.grad(whole.loss, theta)
    cuts = [[[b] for b in range(8)], [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 7], [3, 1, 2], [6, 5, 4]]]
    for cut in cuts:
        outputs = []
        got = torch.zeros_like(theta)
        for rows in cut:
            part = batch.rows(rows)
            t = part.input_ids.shape[1]
            pick = [x[rows][:, :t] for x in (theta, entropy, sum_sq, old, ref)]
            outputs.append(policy_loss(Stats(*pick[:3]), part, cfg, *pick[3:]))
            got += torch.autograd.grad(outputs[-1].loss, theta)[0]
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
        torch.testing.assert_close(sum(o.loss for o in outputs), whole.loss, atol=1e-12, rtol=0)
        assert loss_metrics(outputs) == pytest.approx(whole.metrics, abs=1e-6)
    assert sum(len(p) for p in micro_batches(batch, 12)) == 8


def test_gspo_by_hand() -> None:
    """Two tokens with log ratios 0.1 and 0.3: s = e^0.2 = 1.2214, above 1.2: A = 1 is clipped, A = -1 is not."""
    for advantage, loss, grad in ((1.0, -1.2, 0.0), (-1.0, math.exp(0.2), math.exp(0.2) / 2)):
        batch = build([Row("cpp", advantage)])
        lp = torch.tensor([[0.0, -0.9, -0.7]], dtype=torch.float64, requires_grad=True)
        cfg = LossConfig(kind="gspo", clip_high=0.2, normalization="sequence")
        out = policy_loss(Stats(lp), batch, cfg, full(batch, -1.0))
        assert out.loss.item() == pytest.approx(loss, abs=1e-6)
        got = torch.autograd.grad(out.loss, lp)[0][0].tolist()
        assert got == pytest.approx([0.0, grad, grad], abs=1e-6)


def test_ob14_sequence_ratio_does_not_grow_with_length() -> None:
    """0.01 per token at lengths 10 and 300: the same ratio e^0.01, so neither is clipped at 1.28."""
    batch = build([Row("c" + "p" * 10), Row("c" + "p" * 300)])
    out = policy_loss(Stats(full(batch, -0.99)), batch, LossConfig(kind="gspo"), full(batch, -1.0))
    assert out.metrics["loss/own/ratio"] == pytest.approx(math.exp(0.01), abs=1e-5)
    assert out.metrics["loss/own/clip_high"] == 0


def test_ob12_log_probs_at_the_sampling_temperature_give_ratio_one() -> None:
    """Behaviour from softmax(logits / 0.6): rescored at 0.6 the gap is rounding, rescored at 1 it is not."""
    g = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(6, 8, generator=g), torch.randn(12, 8, generator=g)
    ids = torch.tensor([1, 2, 3, 4, 5, 6])
    sampled_from = (hidden @ head.T / 0.6).log_softmax(-1)[torch.arange(6), ids]  # [6]
    batch = build([Row("cpppppp", mu=[0.0, *sampled_from.tolist()])])
    gap = {}
    for temperature in (0.6, 1.0):
        rescored = token_logprobs(hidden, head, None, ids, torch.full((6,), temperature))[0]  # [6]
        lp = torch.cat([torch.zeros(1), rescored])[None]  # [1, 7]
        gap[temperature] = policy_loss(Stats(lp), batch, LossConfig(), lp).metrics["loss/own/behavior_gap"]
    assert gap[0.6] < 1e-5
    assert gap[1.0] > 0.1


def test_ob15_ratio_differs_from_one_on_the_second_pass() -> None:
    """One plain gradient step on logits between two passes over the same tokens; old log-probs are kept."""
    batch = build([Row("cpp", 1.0)])
    logits = torch.zeros(3, 4, requires_grad=True)
    at = torch.arange(3), batch.input_ids[0]

    def logprobs() -> Tensor:
        return logits.log_softmax(-1)[at][None]  # [1, 3]

    old = logprobs().detach()
    first = policy_loss(Stats(logprobs()), batch, LossConfig(), old)
    first.loss.backward()
    assert logits.grad is not None
    with torch.no_grad():
        logits -= logits.grad
    second = policy_loss(Stats(logprobs()), batch, LossConfig(), old)
    assert first.metrics["loss/own/ratio"] == 1.0
    # Step 1/2 (3/4, -1/4, ..): log-sum-exp by hand.
    up = math.exp(0.375) / (math.exp(0.375) + 3 * math.exp(-0.125)) / 0.25
    assert second.metrics["loss/own/ratio"] == pytest.approx(up, abs=1e-5)
    assert second.metrics["loss/own/kl_old"] == pytest.approx(up - 1 - math.log(up), abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("estimator", ["k3", "k2"])
def test_ob16_kl_far_from_the_start_model_is_finite_and_pulls_back(dtype: torch.dtype, estimator: str) -> None:
    batch = build([Row("cpp", 0.0)])
    lp = torch.full((1, 3), -100.5, dtype=dtype, requires_grad=True)
    out = policy_loss(
        Stats(lp), batch, LossConfig(kl_coef=0.1, kl_estimator=estimator), lp.detach(), full(batch, -0.5).to(dtype)
    )
    out.loss.backward()
    assert math.isfinite(out.loss.item())
    assert lp.grad is not None and lp.grad.isfinite().all()
    assert (lp.grad[0, 1:] < 0).all()  # descent raises log p towards the start model
    assert out.metrics["loss/kl_ref_far"] == 1.0
    assert math.isfinite(out.metrics["loss/kl_ref"])


def test_ob17_mean_gradient_of_each_kl_estimator_is_the_one_documented() -> None:
    """Three symbols, exact expectation over the policy: k3 as a loss descends KL(ref || policy), k2 KL(policy || ref)."""
    theta = torch.tensor([0.3, -0.8, 1.1], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-0.2, 0.9, 0.1], dtype=torch.float64).log_softmax(0)
    lp = theta.log_softmax(0)

    def mean_gradient(estimator: str) -> Tensor:
        values = kl_estimate(lp[None], ref[None], estimator)[0]  # [V]
        return torch.autograd.grad((lp.exp().detach() * values).sum(), theta, retain_graph=True)[0]

    forward = torch.autograd.grad((ref.exp() * (ref - lp)).sum(), theta, retain_graph=True)[0]
    reverse = torch.autograd.grad((lp.exp() * (lp - ref)).sum(), theta, retain_graph=True)[0]
    torch.testing.assert_close(mean_gradient("k3"), forward, atol=1e-10, rtol=0)
    torch.testing.assert_close(mean_gradient("k2"), reverse, atol=1e-10, rtol=0)
    assert (forward - reverse).norm() > 0.05  # the choice matters here
    value = (lp.exp() * kl_estimate(lp[None], ref[None], "k3")[0]).sum()
    torch.testing.assert_close(value, (lp.exp() * (lp - ref)).sum(), atol=1e-10, rtol=0)  # k3 is unbiased as a value


def test_ob01_without_signal_nothing_moves_unless_a_kl_term_is_asked_for() -> None:
    batch = build([Row("cpp", 0.0), Row("cp", 0.0)])
    assert slope(batch, LossConfig()) == 0.0
    lp = full(batch, -1.0, grad=True)
    policy_loss(Stats(lp), batch, LossConfig(kl_coef=0.5), lp.detach(), full(batch, -2.0)).loss.backward()
    assert lp.grad is not None
    assert lp.grad.sum().item() == pytest.approx(0.5 * (1 - math.exp(-1)), abs=1e-6)  # three tokens of weight 1/3
    assert zero_advantages_are_silent(LossConfig(external_loss="aipo", peer_loss="luffy"))
    assert not zero_advantages_are_silent(LossConfig(kl_coef=0.1))
    assert not zero_advantages_are_silent(LossConfig(external_loss="ce"))
    assert not zero_advantages_are_silent(LossConfig(peer_loss="ce"))


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_ob10_ob11_batches_with_nothing_to_train_are_finite_and_say_so(kl_coef: float) -> None:
    """All truncated and masked (no rows left), and rows that hold no trainable token."""
    all_masked = build([Row("cpp", truncated=True), Row("cp", truncated=True)], mask_truncated=True)
    no_tokens = build([Row("ccc"), Row("c")])
    assert len(all_masked) == 0 and len(no_tokens) == 2
    for batch in (all_masked, no_tokens):
        for normalization in ("token", "sequence"):
            lp = full(batch, -1.0, grad=True)
            cfg = LossConfig(kl_coef=kl_coef, normalization=normalization)
            out = policy_loss(Stats(lp), batch, cfg, lp.detach(), lp.detach())
            out.loss.backward()
            assert lp.grad is not None
            assert out.loss.item() == 0 and torch.count_nonzero(lp.grad) == 0
            assert out.metrics["loss/trained_tokens"] == 0
            assert all(math.isfinite(v) for v in out.metrics.values())


def test_mask_truncated_leaves_the_row_out_of_the_denominator() -> None:
    batch = build([Row("cpp", 1.0), Row("cpppp", -1.0, truncated=True)], mask_truncated=True)
    assert slope(batch, LossConfig()) == pytest.approx(-1.0)


def test_ob21_a_nan_log_prob_makes_the_loss_nan_and_is_counted() -> None:
    """The loss must not hide it (the step is skipped on it); metrics stay finite."""
    batch = build([Row("cpp"), Row("cphp", author="you")])
    lp = full(batch, -1.0)
    lp[0, 1] = math.nan
    lp.requires_grad_()
    out = policy_loss(Stats(lp, lp.detach(), lp.detach()), batch, LossConfig(kl_coef=0.1), full(batch, -1.0), lp)
    assert math.isnan(out.loss.item())
    assert out.metrics["loss/non_finite_tokens"] == 1
    assert all(math.isfinite(v) for v in out.metrics.values())


def test_what_stands_outside_the_trained_tokens_is_never_read() -> None:
    batch = build([Row("cpp"), Row("cphp")])
    lp, old = full(batch, -1.0), full(batch, -1.1)
    want = policy_loss(Stats(lp), batch, LossConfig(kl_coef=0.1, kind="gspo"), old, old).loss
    for x in (lp, old):
        x[~batch.loss_mask] = math.nan
    lp.requires_grad_()
    got = policy_loss(Stats(lp), batch, LossConfig(kl_coef=0.1, kind="gspo"), old, old).loss
    got.backward()
    assert torch.equal(got.detach(), want)
    assert lp.grad is not None and lp.grad.isfinite().all()


def test_missing_parts_are_refused() -> None:
    batch = build([Row("cp")])
    lp = full(batch, -1.0)
    with pytest.raises(ValueError, match="ref_logprobs"):
        policy_loss(Stats(lp), batch, LossConfig(kl_coef=0.1), lp)
    with pytest.raises(ValueError, match="shapes"):
        policy_loss(Stats(lp), batch, LossConfig(), lp[:, :1])


def test_entropy_after_help_counts_own_tokens_behind_a_helper_token() -> None:
    batch = build([Row("cpphp"), Row("cp")])
    entropy = torch.arange(10.0).view(2, 5)
    m = policy_loss(Stats(full(batch, -1.0), entropy), batch, LossConfig(), full(batch, -1.0)).metrics
    assert m["loss/own/entropy_after_help"] == 4.0
    assert m["loss/own/entropy"] == (1 + 2 + 4 + 6) / 4
