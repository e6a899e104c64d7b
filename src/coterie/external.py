"""Loss terms for tokens the policy did not sample: helpers' words and peers' trajectories.

Notation, per token: ``p = pi_theta(y_t)`` now, ``pi_old`` at the start of the update, ``mu`` under whoever wrote it;
``r = p / pi_old``, ``rho0 = pi_old / mu`` (fixed for the update), ``A`` the advantage. All tensors are ``[B, T]``.

Most options are one form, decoupled PPO (Hilton et al., arXiv 2110.00641: behaviour ``mu``, proximal ``pi_old``), with
a coefficient ``c`` that carries no gradient::

    loss_t = -c * min(r A, clip(r, 1 - low, 1 + high) A)

=============== ============================================ ==========================================================
option          c                                            origin
=============== ============================================ ==========================================================
``masked``      0                                            retrieved text in Search-R1, arXiv 2503.09516
``surrogate``   1                                            as if own: what re-scoring everything amounts to; SAPO,
                                                             arXiv 2509.08721
``positive``    1 if A > 0 else 0                            learn from others' successes only
``tapered``     1 if A > 0 else pi_old                       push down only what the policy itself would say
``truncated_is``min(rho0, c_max)                             truncated importance weight
``aipo``        clip(rho0, c_min, c_max) if A > 0, else      our reconstruction (arXiv 2605.08401 does not give the
                clip(rho0, 0, c_max)                         formula where we could read it); the negative side follows
                                                             TOPR, arXiv 2503.14286
=============== ============================================ ==========================================================

Three are not of this form: ``ppo_is`` (ratio ``p / mu``), ``luffy`` and ``ce``. docs/losses.md derives what each is
biased by.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG = 20.0  # |log ratio| beyond which a ratio no longer grows: keeps exp finite in float32


@dataclass(frozen=True, slots=True)
class Provenance:
    """Masks [B, T] bool of trained tokens by who wrote them; disjoint."""

    own: Tensor
    peer: Tensor
    helper: Tensor

    def items(self) -> Iterator[tuple[str, Tensor]]:
        yield from (("own", self.own), ("peer", self.peer), ("helper", self.helper))


@dataclass(frozen=True, slots=True)
class Tokens:
    """What the loss of a token may look at; all [B, T], 0 outside the trained tokens."""

    logprobs: Tensor  # log p, differentiable
    old: Tensor  # log pi_old
    log_ratio: Tensor  # log(p / pi_old); its mean over the row on policy tokens under gspo
    mu: Tensor  # log mu as the loss uses it: 0 (probability 1) where unknown
    known: Tensor  # bool: whether mu may be divided by
    advantages: Tensor


def check_shapes(**tensors: Tensor) -> None:
    """Raise ValueError unless all tensors have one and the same shape ``[B, T]``."""
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    if len(set(shapes.values())) != 1 or len(next(iter(shapes.values()))) != 2:
        raise ValueError(f"expected equal shapes [B, T], got {shapes}")


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """``exp`` of a log ratio held within +-20, so that no pair of log-probs can overflow. Keeps NaN."""
    return log_ratio.clamp(-MAX_LOG, MAX_LOG).exp()


def clipped_loss(log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """``-min(r A, clip(r, 1 - low, 1 + high) A)`` per token: PPO, arXiv 1707.06347 eq. 7, two-sided as in DAPO,
    arXiv 2503.14476.

    Args:
        log_ratio: [B, T] ``log(p / pi_old)``, differentiable.
        advantages: [B, T].
        low, high: clip distances below and above 1.
    """
    check_shapes(log_ratio=log_ratio, advantages=advantages)
    ratio = bounded_exp(log_ratio)  # [B, T]
    clipped = ratio.clamp(1.0 - low, 1.0 + high)  # [B, T]
    return -torch.minimum(ratio * advantages, clipped * advantages)  # [B, T]


def recorded(behavior_logprobs: Tensor) -> Tensor:
    """Tokens that came with a usable log-prob of their writer: finite, not above 0 (rounding allowed). [B, T] bool."""
    return behavior_logprobs.isfinite() & (behavior_logprobs <= 1e-3)  # [B, T]


def whole_replies(old_logprobs: Tensor, mu_logprobs: Tensor, known: Tensor, helper: Tensor) -> Tensor:
    """``log mu`` with which each token of a reply has the reply's geometric mean ratio.

    A reply is a stretch of neighbouring ``helper`` tokens, n of them; each gets ``rho0 = exp(sum(log pi_old - log mu) /
    n)``. Only the sum of ``log mu`` matters, which helpers with another tokenizer know too. Replies with an unknown token,
    and tokens outside ``helper``, keep what they have.
    """
    check_shapes(old_logprobs=old_logprobs, mu_logprobs=mu_logprobs, known=known, helper=helper)
    old = old_logprobs.detach()  # [B, T]
    before = torch.nn.functional.pad(helper, (1, 0))[:, :-1]  # [B, T]
    reply = (helper & ~before).cumsum(1) * helper  # [B, T] 0: no reply, else its number in the row
    n, n_known, gap = torch.zeros(3, *reply.shape[:1], int(reply.max()) + 1, dtype=old.dtype, device=old.device)
    n.scatter_add_(1, reply, torch.ones_like(old))  # [B, replies + 1]
    n_known.scatter_add_(1, reply, known.to(old.dtype))  # [B, replies + 1]
    gap.scatter_add_(1, reply, old - mu_logprobs)  # [B, replies + 1]
    mean = (gap / n.clamp(min=1)).gather(1, reply)  # [B, T]
    whole = helper & (n_known == n).gather(1, reply)  # [B, T]
    return torch.where(whole, old - mean, mu_logprobs)  # [B, T]


def positive_coefficient(advantages: Tensor) -> Tensor:
    """1 where ``A > 0``, else 0."""
    return (advantages > 0).to(advantages.dtype)  # [B, T]


def tapered_coefficient(advantages: Tensor, old_logprobs: Tensor) -> Tensor:
    """1 where ``A > 0``, else ``pi_old``: the gradient of ``log p`` is largest where ``p`` is small, and pushing down
    what the policy would not say anyway is what destabilises."""
    check_shapes(advantages=advantages, old_logprobs=old_logprobs)
    return torch.where(advantages > 0, torch.ones_like(advantages), old_logprobs.detach().exp())  # [B, T]


def truncated_coefficient(old_logprobs: Tensor, mu_logprobs: Tensor, known: Tensor, c_max: float) -> Tensor:
    """``min(rho0, c_max)``; 0 where the writer's log-prob is unknown (nothing to weigh the token with)."""
    check_shapes(old_logprobs=old_logprobs, mu_logprobs=mu_logprobs, known=known)
    rho0 = bounded_exp(old_logprobs.detach() - mu_logprobs)  # [B, T]
    return torch.where(known, rho0.clamp(max=c_max), torch.zeros_like(rho0))  # [B, T]


def aipo_coefficient(
    old_logprobs: Tensor, mu_logprobs: Tensor, advantages: Tensor, c_min: float, c_max: float, negative: str
) -> Tensor:
    """Our reconstruction: ``rho0`` floored at ``c_min`` where ``A > 0`` and capped at ``c_max``.

    ``negative`` is the rule for ``A < 0``: ``tapered`` (cap, no floor), ``zero`` (no push down at all), ``full`` (as
    for ``A > 0``).

    The floor makes low-probability tokens learnable and is a bias towards imitation: ``(c - rho0) A r``.
    """
    check_shapes(old_logprobs=old_logprobs, mu_logprobs=mu_logprobs, advantages=advantages)
    rho0 = bounded_exp(old_logprobs.detach() - mu_logprobs)  # [B, T]
    floored = rho0.clamp(c_min, c_max)  # [B, T]
    down = {"tapered": rho0.clamp(max=c_max), "zero": torch.zeros_like(rho0), "full": floored}[negative]  # [B, T]
    return torch.where(advantages > 0, floored, down)  # [B, T]


def ppo_is_loss(
    logprobs: Tensor,
    mu_logprobs: Tensor,
    known: Tensor,
    advantages: Tensor,
    low: float,
    high: float,
    dual_clip: float,
) -> Tensor:
    """PPO with the true importance ratio ``rho = p / mu``; where ``A < 0`` the loss is at most ``dual_clip |A|``.

    Dual clip: arXiv 1912.09729. 0 where the writer's log-prob is unknown.
    """
    check_shapes(logprobs=logprobs, mu_logprobs=mu_logprobs, known=known, advantages=advantages)
    loss = clipped_loss(logprobs - mu_logprobs, advantages, low, high)  # [B, T]
    capped = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)  # [B, T]
    return torch.where(known, capped, torch.zeros_like(capped))  # [B, T]


def luffy_loss(logprobs: Tensor, advantages: Tensor, gamma: float) -> Tensor:
    """``-A p / (p + gamma)``, no clip, ``mu`` taken as 1: policy shaping of LUFFY, arXiv 2504.14945.

    Gradient: ``-A gamma p / (p + gamma)^2`` per unit of log-prob, largest (1/4) at ``p = gamma``.
    """
    check_shapes(logprobs=logprobs, advantages=advantages)
    p = logprobs.exp()  # [B, T]
    return -advantages * p / (p + gamma)  # [B, T]
