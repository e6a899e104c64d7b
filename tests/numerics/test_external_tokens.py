"""Invariants of the treatments of external tokens (docs/losses.md): gradients by autograd against the branch table."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from loss_cases import Row, Stats, build, full

from coterie.config import LossConfig
from coterie.external import luffy_loss, ppo_is_loss
from coterie.losses import policy_loss

HELPER = get_args(LossConfig.model_fields["external_loss"].annotation)
PEER = get_args(LossConfig.model_fields["peer_loss"].annotation)
TREATED = [n for n in HELPER if n != "masked"]


def random(batch, seed: int, scale: float = 1.0):  # type: ignore[no-untyped-def]
    g = torch.Generator().manual_seed(seed)
    return -scale * torch.rand(batch.input_ids.shape, generator=g, dtype=torch.float64) - 0.05  # [B, T]


def mixed(mu: float = -0.7):  # type: ignore[no-untyped-def]
    return build([Row("cphhp", 1.0, mu=mu), Row("cpp", -2.0, mu=mu), Row("cphp", -0.5, mu=mu)])


@pytest.mark.parametrize("name", HELPER)
def test_1_without_external_tokens_every_option_is_plain_grpo(name: str) -> None:
    batch = build([Row("cppp", 1.0), Row("cpp", -1.0)])
    lp, old = random(batch, 0), random(batch, 1)
    plain = policy_loss(Stats(lp), batch, LossConfig(), old).loss
    other = policy_loss(Stats(lp), batch, LossConfig(external_loss=name, peer_loss="aipo"), old).loss
    assert torch.equal(plain, other)


def test_2_masked_tokens_have_exactly_no_gradient() -> None:
    batch = mixed()
    lp = random(batch, 0).requires_grad_()
    policy_loss(Stats(lp), batch, LossConfig(external_loss="masked"), random(batch, 1)).loss.backward()
    assert lp.grad is not None
    assert torch.count_nonzero(lp.grad[batch.source == 2]) == 0
    assert torch.count_nonzero(lp.grad[batch.source == 0]) == 0
    assert torch.count_nonzero(lp.grad[batch.source == 1]) > 0


def test_2b_masking_leaves_the_rate_of_policy_tokens_unchanged() -> None:
    """The denominator counts policy tokens only: their gradient is the same under every treatment of the others."""
    batch = mixed()
    grads = []
    for name in HELPER:
        lp = random(batch, 0).requires_grad_()
        policy_loss(Stats(lp), batch, LossConfig(external_loss=name), random(batch, 1)).loss.backward()
        assert lp.grad is not None
        grads.append(lp.grad[batch.source == 1])
    for other in grads[1:]:
        assert torch.equal(grads[0], other)


def test_3_helper_equal_to_policy_makes_aipo_surrogate_and_ppo_is_agree() -> None:
    """mu = pi_old, equal clip distances, ratios below the dual clip."""
    batch = mixed(mu=-0.7)
    old = full(batch, -0.7).double()
    lp = old + 0.4 * (random(batch, 3) + 0.5)
    got = []
    for name in ("aipo", "surrogate", "ppo_is"):
        x = lp.clone().requires_grad_()
        cfg = LossConfig(external_loss=name, ext_clip_low=0.2, ext_clip_high=0.28)
        out = policy_loss(Stats(x), batch, cfg, old)
        out.loss.backward()
        got.append((out.loss.detach(), x.grad))
    for loss, grad in got[1:]:
        torch.testing.assert_close(loss, got[0][0], atol=1e-6, rtol=0)
        torch.testing.assert_close(grad, got[0][1], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("advantage", "ratio", "slope"),
    [
        (1.0, 0.5, 0.5),  # vanishes with the ratio, not clipped
        (1.0, 1.0, 1.0),
        (1.0, 1.5, 0.0),  # clipped: high side
        (-1.0, 0.5, 0.0),  # clipped: low side
        (-1.0, 1.0, 1.0),
        (-1.0, 1.5, 1.5),
        (-1.0, 2.9, 2.9),  # grows with the ratio ...
        (-1.0, 3.1, 0.0),  # ... until the dual clip
    ],
)
def test_4_branch_table_of_ppo_with_the_true_ratio(advantage: float, ratio: float, slope: float) -> None:
    """Gradient of the objective per unit of A and of log p, eps 0.2/0.28, dual clip 3."""
    lp = torch.tensor([[math.log(0.1 * ratio)]], dtype=torch.float64, requires_grad=True)
    mu = torch.tensor([[math.log(0.1)]], dtype=torch.float64)
    a = torch.tensor([[advantage]], dtype=torch.float64)
    ppo_is_loss(lp, mu, torch.tensor([[True]]), a, 0.2, 0.28, 3.0).sum().backward()
    assert lp.grad is not None
    assert -lp.grad.item() / advantage == pytest.approx(slope, abs=1e-12)


def test_5_luffy_weight_peaks_at_a_quarter_where_p_is_gamma() -> None:
    p = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)[None]  # [1, N], has 0.1
    lp = p.log().requires_grad_()
    luffy_loss(lp, torch.ones_like(p), 0.1).sum().backward()
    assert lp.grad is not None
    weight = -lp.grad[0]
    best = int(weight.argmax())
    assert float(weight[best]) == pytest.approx(0.25, abs=1e-9)
    assert float(p[0, best]) == pytest.approx(0.1, abs=1e-9)
    # Above the plain weight p only below (sqrt(gamma) - gamma) = 0.216.
    assert float(p[0][weight > p[0]].max()) == pytest.approx(0.216, abs=1e-3)


@pytest.mark.parametrize("name", HELPER)
def test_7_batch_without_policy_tokens_is_finite(name: str) -> None:
    batch = build([Row("chh", 1.0), Row("chhh", -1.0)])
    assert batch.normalizers.policy == 0
    lp = random(batch, 0).requires_grad_()
    for normalization in ("token", "sequence"):
        cfg = LossConfig(external_loss=name, normalization=normalization)
        out = policy_loss(Stats(lp), batch, cfg, random(batch, 1))
        assert math.isfinite(out.loss.item())
        assert all(math.isfinite(v) for v in out.metrics.values())


def test_floor_makes_a_token_learnable_that_importance_sampling_ignores() -> None:
    """p = pi_old = 1e-4, mu = 1/2, A = 1: rho = 2e-4 for ppo_is, c = 0.2 for aipo, 1 for surrogate."""
    batch = build([Row("ch", 1.0, mu=math.log(0.5))])
    slopes = {}
    for name in ("ppo_is", "aipo", "surrogate", "luffy", "ce"):
        lp = full(batch, math.log(1e-4), grad=True)
        policy_loss(Stats(lp), batch, LossConfig(external_loss=name), lp.detach()).loss.backward()
        assert lp.grad is not None
        slopes[name] = -lp.grad[0, 1].item()
    assert slopes == {
        "ppo_is": pytest.approx(2e-4, rel=1e-4),
        "aipo": pytest.approx(0.2, rel=1e-5),
        "surrogate": pytest.approx(1.0),
        "luffy": pytest.approx(1e-5 / 0.1001**2, rel=1e-4),
        "ce": pytest.approx(0.1),
    }


def test_ob22_foreign_tokens_have_a_stated_rule_each() -> None:
    """Five spliced tokens whose writer's log-prob is unknown (NaN): slope per token and option, A = 1, p = 0.3."""
    rule = {
        "masked": 0.0,
        "surrogate": 1.0,
        "ppo_is": 0.0,  # cannot be weighed: left out
        "luffy": 0.1 * 0.3 / 0.4**2,
        "aipo": 0.3,  # mu taken as 1, so c = rho0 = pi_old
        "ce": 0.1 * 2 / 5,  # mean over its own five tokens, in units of 1/2
        "positive": 1.0,
        "tapered": 1.0,
        "truncated_is": 0.0,
    }
    for name, want in rule.items():
        helper = name in HELPER
        rows = [Row("cphhhhhp", 1.0, mu=math.nan)] if helper else [Row("cppppp", 1.0, "you", mu=math.nan), Row("c")]
        batch = build(rows)
        lp = full(batch, math.log(0.3), grad=True)
        cfg = LossConfig(external_loss=name) if helper else LossConfig(peer_loss=name)
        out = policy_loss(Stats(lp), batch, cfg, lp.detach())
        out.loss.backward()
        assert lp.grad is not None
        foreign = lp.grad[batch.source == 2] if helper else lp.grad[0, 1:6]
        unit = 2 if helper else 5
        assert (-foreign * unit).tolist() == pytest.approx([want] * 5, abs=1e-6), name
        assert out.metrics[f"loss/{'helper' if helper else 'peer'}/unknown"] == 1.0


def test_mu_source_one_ignores_what_was_recorded() -> None:
    batch = build([Row("ch", 1.0, mu=math.log(0.5))])
    lp = full(batch, math.log(0.3))
    for name, want in {"aipo": -0.3, "ppo_is": -0.3}.items():
        cfg = LossConfig(external_loss=name, mu_source="one")
        assert policy_loss(Stats(lp), batch, cfg, lp).loss.item() == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("name", PEER)
def test_peer_options_read_only_the_log_probs_they_may(name: str) -> None:
    """Hostile log-probs from a peer (NaN, infinite, above 0, absurd) leave loss, gradient and metrics finite."""
    mu = [0.0, math.nan, math.inf, -math.inf, 50.0, -1e30, -3e38]
    batch = build([Row("cpppppp", 1.0, "you", mu=mu), Row("cpppppp", -1.0, "you", mu=mu)])
    lp = random(batch, 0, 5.0).float().requires_grad_()
    out = policy_loss(Stats(lp, lp.detach(), lp.detach().exp()), batch, LossConfig(peer_loss=name), random(batch, 1))
    out.loss.backward()
    assert math.isfinite(out.loss.item())
    assert lp.grad is not None and lp.grad.isfinite().all()
    assert all(math.isfinite(v) for v in out.metrics.values())


def test_surrogate_peers_are_trained_exactly_as_own() -> None:
    own = build([Row("cpp", 1.0), Row("cppp", -1.0)])
    mixed = build([Row("cpp", 1.0), Row("cppp", -1.0, author="you")])
    lp, old = random(own, 0), random(own, 1)
    for kind in ("clip", "gspo"):
        cfg = LossConfig(kind=kind, peer_loss="surrogate")
        a, b = (policy_loss(Stats(lp), x, cfg, old).loss for x in (own, mixed))
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)
