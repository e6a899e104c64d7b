"""Exact enumeration of a three-token problem: which token weights are unbiased for what, and how biased the others are.

Token 1 is the policy's, token 2 a helper's (sampled from ``mu``, which sees the prefix), token 3 the policy's again.
V = 4, so 64 trajectories: expectations are sums, and every identity must hold to 1e-10. Two objectives:

- J_A: the helper is part of the world (it is there at deployment);
- J_B: the policy writes token 2 itself.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coterie.external import aipo_coefficient, clipped_loss, ppo_is_loss

V = 4
WIDE = 1e12  # a clip that never acts


class World:
    """Tables of one random policy, its older self, a helper and a reward, with all trajectories enumerated."""

    def __init__(self, seed: int, drift: float) -> None:
        g = torch.Generator().manual_seed(seed)
        sizes = [(V,), (V, V), (V, V, V)]
        old = [torch.randn(s, generator=g, dtype=torch.float64) for s in sizes]
        self.theta = [
            (o + drift * torch.randn(o.shape, generator=g, dtype=torch.float64)).requires_grad_() for o in old
        ]
        helper = 2 * torch.randn(V, V, generator=g, dtype=torch.float64)
        self.reward = torch.rand(V, V, V, generator=g, dtype=torch.float64)
        y = torch.cartesian_prod(*[torch.arange(V)] * 3)  # [N, 3]
        self.y = y
        self.logprobs = self.of(self.theta)  # [N, 3] differentiable
        self.old = self.of(old)  # [N, 3]
        self.mu = helper.log_softmax(-1)[y[:, 0], y[:, 1]]  # [N] of token 2
        self.r = self.reward[y[:, 0], y[:, 1], y[:, 2]]  # [N]
        # How often each trajectory is sampled: token 2 by the helper, the others by the older policy.
        self.sampled = (self.old[:, 0] + self.mu + self.old[:, 2]).exp()  # [N]

    def of(self, tables: list[Tensor]) -> Tensor:
        a, b, c = self.y.unbind(1)
        one, two, three = (t.log_softmax(-1) for t in tables)
        return torch.stack([one[a], two[a, b], three[a, b, c]], 1)  # [N, 3]

    def objective(self, helped: bool) -> Tensor:
        second = self.mu if helped else self.logprobs[:, 1]  # [N]
        return ((self.logprobs[:, 0] + second + self.logprobs[:, 2]).exp() * self.r).sum()

    def action_values(self, helped: bool) -> Tensor:
        """[N, 3] expected reward after each token, under the current policy (and the helper, if ``helped``)."""
        p3 = self.theta[2].detach().log_softmax(-1).exp()  # [V, V, V]
        helper = torch.zeros(V, V, dtype=torch.float64)
        helper[self.y[:, 0], self.y[:, 1]] = self.mu.exp()
        p2 = helper if helped else self.theta[1].detach().log_softmax(-1).exp()  # [V, V]
        q2 = (p3 * self.reward).sum(-1)  # [V, V]
        q1 = (p2 * q2).sum(-1)  # [V]
        a, b, _ = self.y.unbind(1)
        return torch.stack([q1[a], q2[a, b], self.r], 1)  # [N, 3]

    def gradient(self, loss: Tensor) -> Tensor:
        """Of the mean over sampled trajectories of a per-token loss [N, 3], as one vector of ascent."""
        total = -(self.sampled[:, None] * loss).sum()
        return flat(torch.autograd.grad(total, self.theta, retain_graph=True, allow_unused=True), self.theta)

    def true_gradient(self, helped: bool) -> Tensor:
        grads = torch.autograd.grad(self.objective(helped), self.theta, retain_graph=True, allow_unused=True)
        return flat(grads, self.theta)

    def token_losses(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """Our losses without clipping: [N, 3] against pi_old, and [N, 3] against mu at token 2."""
        against_old = clipped_loss(self.logprobs - self.old, a, WIDE, WIDE)  # [N, 3]
        mu = self.mu[:, None].expand_as(self.old)  # [N, 3]
        against_mu = ppo_is_loss(self.logprobs, mu, torch.ones_like(mu, dtype=torch.bool), a, WIDE, WIDE, WIDE)
        return against_old, against_mu


def flat(grads: tuple[Tensor | None, ...], like: list[Tensor]) -> Tensor:
    return torch.cat(
        [torch.zeros_like(p).ravel() if g is None else g.ravel() for g, p in zip(grads, like, strict=True)]
    )


@pytest.fixture(params=[0, 1, 2])
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param, drift=0.3)


def test_masking_helper_tokens_is_exact_where_the_helper_stays(world: World) -> None:
    """grad J_A = E[sum over policy tokens of (product of r up to it) Q dlog pi]: mu cancels, token 2 has no term."""
    q = world.action_values(helped=True)
    loss, _ = world.token_losses(q)
    first = (world.logprobs[:, 0] - world.old[:, 0]).detach().exp()  # [N] ratio of the earlier policy token
    masked = torch.stack([loss[:, 0], torch.zeros_like(first), first * loss[:, 2]], 1)
    torch.testing.assert_close(world.gradient(masked), world.true_gradient(helped=True), atol=1e-10, rtol=0)


def test_masking_alone_is_exact_with_one_update_per_batch() -> None:
    """pi = pi_old: all products are 1, so the plain masked loss is the whole gradient of J_A."""
    world = World(3, drift=0.0)
    loss, _ = world.token_losses(world.action_values(helped=True))
    masked = torch.stack([loss[:, 0], 0 * loss[:, 1], loss[:, 2]], 1)
    torch.testing.assert_close(world.gradient(masked), world.true_gradient(helped=True), atol=1e-10, rtol=0)


def test_full_products_are_exact_where_the_policy_writes_everything(world: World) -> None:
    """grad J_B needs rho = p/mu at the helper's token *and* in front of every policy token after it."""
    q = world.action_values(helped=False)
    against_old, against_mu = world.token_losses(q)
    first = (world.logprobs[:, 0] - world.old[:, 0]).detach().exp()  # [N]
    rho = (world.logprobs[:, 1] - world.mu).detach().exp()  # [N]
    loss = torch.stack([against_old[:, 0], first * against_mu[:, 1], first * rho * against_old[:, 2]], 1)
    torch.testing.assert_close(world.gradient(loss), world.true_gradient(helped=False), atol=1e-10, rtol=0)


def test_token_ratios_without_the_prefix_product_are_biased(world: World) -> None:
    """What every practical loss (ours too) leaves out: the bias is real, so it is measured and not denied."""
    q = world.action_values(helped=False)
    against_old, against_mu = world.token_losses(q)
    got = world.gradient(torch.stack([against_old[:, 0], against_mu[:, 1], against_old[:, 2]], 1))
    want = world.true_gradient(helped=False)
    cosine = torch.cosine_similarity(got, want, dim=0)
    assert 0 < cosine < 0.995
    assert (got - want).norm() / want.norm() > 0.1


def test_importance_sampling_gives_the_on_policy_push(world: World) -> None:
    """E_mu[rho A dlog pi] = sum_y pi(y) A dlog pi, state by state: tokens with pi near 0 get nothing, whatever mu is."""
    logits = world.theta[1][0]  # [V] token 2 after y1 = 0
    lp = logits.log_softmax(-1)[None]  # [1, V]
    mu = world.mu[(world.y[:, 0] == 0) & (world.y[:, 2] == 0)][None]  # [1, V]
    a = torch.randn(1, V, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    loss = ppo_is_loss(lp, mu, torch.ones_like(mu, dtype=torch.bool), a, WIDE, WIDE, WIDE)  # [1, V]
    sampled = torch.autograd.grad((mu.exp() * loss).sum(), logits, retain_graph=True)[0]
    exact = torch.autograd.grad(-(lp.exp() * a).sum(), logits)[0]
    torch.testing.assert_close(sampled, exact, atol=1e-10, rtol=0)


@pytest.mark.parametrize("c_min", [0.0, 0.2, 0.5, 1.0])
def test_bias_of_the_floored_coefficient_is_c_minus_rho(world: World, c_min: float) -> None:
    """Gradient with c minus gradient with rho0 = E_mu[(c - rho0) A r dlog pi], to 1e-10."""
    q = world.action_values(helped=False)
    a = q - q.mean()
    base = clipped_loss(world.logprobs - world.old, a, WIDE, WIDE)[:, 1:2]  # [N, 1]
    old, mu, adv = world.old[:, 1:2], world.mu[:, None], a[:, 1:2]  # [N, 1]
    c = aipo_coefficient(old, mu, adv, c_min, 1.0, "tapered")  # [N, 1]
    rho0 = (old - mu).exp()  # [N, 1]
    zero = torch.zeros_like(world.old)

    def at_token_2(x: Tensor) -> Tensor:
        return torch.cat([zero[:, :1], x, zero[:, :1]], 1)  # [N, 3]

    difference = world.gradient(at_token_2(c * base)) - world.gradient(at_token_2(rho0 * base))
    ratio = (world.logprobs[:, 1:2] - world.old[:, 1:2]).detach().exp()  # [N, 1]
    bias = world.gradient(at_token_2(-(c - rho0) * adv * ratio * world.logprobs[:, 1:2]))
    torch.testing.assert_close(difference, bias, atol=1e-10, rtol=0)
    assert bias.norm() > 1e-4  # the floor and the cap do act here


def test_enumeration_covers_all_probability(world: World) -> None:
    assert float(world.sampled.sum()) == pytest.approx(1, abs=1e-12)
