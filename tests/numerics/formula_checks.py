"""One hand-derived check per formula, as functions of the module under test, so that a broken copy can be checked too."""

from __future__ import annotations

import dataclasses
import math
from types import ModuleType
from unittest.mock import patch

import numpy as np
import torch
from loss_cases import Row, Stats, build, full
from torch import Tensor

import coterie.losses
from coterie.config import LossConfig
from coterie.types import Group, Problem, Source, StopReason, Trajectory


def close(got: Tensor | float, want: object, tol: float = 1e-5) -> None:
    torch.testing.assert_close(
        torch.as_tensor(got, dtype=torch.float64), torch.as_tensor(want, dtype=torch.float64), atol=tol, rtol=0
    )


def row(*values: float, grad: bool = False) -> Tensor:
    return torch.tensor([values], dtype=torch.float64, requires_grad=grad)  # [1, T]


def logs(*values: float, grad: bool = False) -> Tensor:
    return torch.tensor([values], dtype=torch.float64).log().requires_grad_(grad)  # [1, T]


def group(*rewards: float | None, modes: str = "", failed: str | None = None) -> Group:
    """``modes``: one letter a trajectory, s(olo) or h(elped). ``failed`` marks the last one."""
    n = len(rewards)
    rows = tuple(
        Trajectory(
            token_ids=np.array([1, 2], np.int32),
            source=np.array([Source.CONTEXT, Source.POLICY], np.uint8),
            behavior_logprobs=np.zeros(2, np.float32),
            prompt_length=1,
            segments=(),
            stop_reason=StopReason.EOS,
            reward=r,
            mode={"s": "solo", "h": "helped"}[(modes or "s" * n)[i]],
            failed=failed if i == n - 1 else None,
        )
        for i, r in enumerate(rewards)
    )
    return Group("g", Problem("p", "t", "q"), "me", 0, "tok", rows)


# --- external.py -------------------------------------------------------------------------------------------------------


def clipped(m: ModuleType) -> None:
    """Clip 0.8 .. 1.28. Ratios 0.5, 1, 1.5: A = 2 gives -min(1, 1.6), -2, -min(3, 2.56); A = -2 gives max(1, 1.6), 2, 3."""
    close(m.clipped_loss(logs(0.5, 1, 1.5), row(2, 2, 2), 0.2, 0.28), [[-1.0, -2.0, -2.56]])
    close(m.clipped_loss(logs(0.5, 1, 1.5), row(-2, -2, -2), 0.2, 0.28), [[1.6, 2.0, 3.0]])


def bounded(m: ModuleType) -> None:
    close(m.bounded_exp(row(0.5, 1000.0, -1000.0)) / math.exp(20), [[math.exp(-19.5), 1.0, math.exp(-40)]], 1e-12)
    assert m.bounded_exp(row(math.nan)).isnan().all()


def recorded(m: ModuleType) -> None:
    got = m.recorded(row(-1.0, 0.0, math.nan, -math.inf, math.inf, 0.5))
    assert got.tolist() == [[True, True, False, False, False, False]]


def positive(m: ModuleType) -> None:
    close(m.positive_coefficient(row(2, 0, -3)), [[1, 0, 0]])


def tapered(m: ModuleType) -> None:
    close(m.tapered_coefficient(row(2, -3, -1), logs(0.3, 0.3, 0.9)), [[1, 0.3, 0.9]])


def truncated(m: ModuleType) -> None:
    """rho0 = 0.3/0.6, 0.6/0.2 (capped at 2), unknown."""
    known = torch.tensor([[True, True, False]])
    close(m.truncated_coefficient(logs(0.3, 0.6, 0.3), logs(0.6, 0.2, 0.6), known, 2.0), [[0.5, 2, 0]])


def whole_replies(m: ModuleType) -> None:
    """rho0 of a reply of two tokens 0.2/0.8 and 0.1/0.1, one of one token 0.3/0.6, one with an unknown token (0.3/0.3, and
    0.5 with mu = 1, which is no probability of the reply); the policy's own tokens between keep their mu of 0.9."""
    helper = torch.tensor([[False, True, True, False, True, False, True, True]])
    known = torch.tensor([[True] * 7 + [False]])
    old = logs(0.5, 0.2, 0.1, 0.4, 0.3, 0.4, 0.3, 0.5)
    mu = logs(0.5, 0.8, 0.1, 0.9, 0.6, 0.9, 0.3, 1.0)
    want = math.sqrt(0.25 * 1.0)
    got = (old - m.whole_replies(old, mu, known, helper)).exp()
    close(got, [[1.0, want, want, 0.4 / 0.9, 0.5, 0.4 / 0.9, 1.0, 0.5]])


def aipo(m: ModuleType) -> None:
    """rho0 = 0.05, 0.5, 3 with c in [0.2, 1]."""
    old, mu = logs(0.04, 0.4, 0.9), logs(0.8, 0.8, 0.3)
    up, down = row(1, 1, 1), row(-1, -1, -1)
    close(m.aipo_coefficient(old, mu, up, 0.2, 1.0, "tapered"), [[0.2, 0.5, 1.0]])
    close(m.aipo_coefficient(old, mu, down, 0.2, 1.0, "tapered"), [[0.05, 0.5, 1.0]])
    close(m.aipo_coefficient(old, mu, down, 0.2, 1.0, "zero"), [[0, 0, 0]])
    close(m.aipo_coefficient(old, mu, down, 0.2, 1.0, "full"), [[0.2, 0.5, 1.0]])


def ppo_is(m: ModuleType) -> None:
    """rho = 0.5, 1.5, 4, unknown; clip 0.8 .. 1.28, dual clip 3: A = 1 and A = -1."""
    lp, mu = logs(0.1, 0.3, 0.8, 0.5), logs(0.2, 0.2, 0.2, 0.5)
    known = torch.tensor([[True, True, True, False]])
    close(m.ppo_is_loss(lp, mu, known, row(1, 1, 1, 1), 0.2, 0.28, 3.0), [[-0.5, -1.28, -1.28, 0]])
    close(m.ppo_is_loss(lp, mu, known, row(-1, -1, -1, -1), 0.2, 0.28, 3.0), [[0.8, 1.5, 3.0, 0]])


def luffy(m: ModuleType) -> None:
    """p = 0.1: loss -2 * 0.1/0.2; slope against log p: -2 * 0.1 * 0.1 / 0.2^2."""
    lp = logs(0.1, grad=True)
    loss = m.luffy_loss(lp, row(2), 0.1)
    close(loss, [[-1.0]])
    close(torch.autograd.grad(loss.sum(), lp)[0], [[-0.5]])


# --- losses.py ---------------------------------------------------------------------------------------------------------


def gspo_ratio(m: ModuleType) -> None:
    """Mean of (0.1, 0.4) over the mask, whatever stands elsewhere; a row without tokens gets 0."""
    log_ratio = torch.tensor([[9.0, 0.1, 0.4], [1.0, 2.0, 3.0]])
    mask = torch.tensor([[False, True, True], [False, False, False]])
    close(m.sequence_log_ratio(log_ratio, mask), [[0.25] * 3, [0.0] * 3])


def kl(m: ModuleType) -> None:
    """ref/policy = 2: k3 = 2 - 1 - ln 2, k2 = ln(2)^2 / 2."""
    close(m.kl_estimate(logs(0.2), logs(0.4), "k3"), [[1 - math.log(2)]])
    close(m.kl_estimate(logs(0.2), logs(0.4), "k2"), [[math.log(2) ** 2 / 2]])
    # Beyond d = 10 the tangent: e^10 (1 + d - 10) - 1 - d.
    close(m.kl_estimate(row(-30.0), row(-10.0), "k3") / math.exp(10), [[11 - 21 * math.exp(-10)]])


def weights(m: ModuleType) -> None:
    """Rows with 1 and 3 policy tokens; whole batch: 8 tokens in 4 rows, budget 5."""
    mask = torch.tensor([[False, True, False, False], [True, True, True, False]])
    close(m.token_weights(mask, "token", 8, 4, 5), [[1 / 8] * 4, [1 / 8] * 4])
    close(m.token_weights(mask, "sequence", 8, 4, 5), [[1 / 4] * 4, [1 / 12] * 4])
    close(m.token_weights(mask, "constant", 8, 4, 5), [[1 / 20] * 4, [1 / 20] * 4])
    close(m.token_weights(mask[:, 2:] & False, "token", 0, 0, 5), [[1.0] * 2, [1.0] * 2])


def provenance(m: ModuleType) -> None:
    batch = build([Row("cphc"), Row("cph", author="you")])
    who = m.provenance(batch)
    assert who.own.tolist() == [[False, True, False, False], [False] * 4]
    assert who.peer.tolist() == [[False] * 4, [False, True, False, False]]
    assert who.helper.tolist() == [[False, False, True, False], [False, False, True, False]]


def every_treatment(m: ModuleType) -> None:
    """One own, one peer and one helper token, all with p = pi_old = 0.2 and mu = 0.5, so rho0 = 0.4; N_policy = 2.

    Loss in units of 1/2: own -A = -1; peer with A = -1; helper with A = +1 (it stands in the own row).
    """
    batch = build([Row("cph", 1.0, mu=math.log(0.5)), Row("cp", -1.0, author="you", mu=math.log(0.5))])
    lp = full(batch, math.log(0.2))
    up = {  # external_loss -> loss of the helper token, A = +1
        "masked": 0.0,
        "surrogate": -1.0,
        "ppo_is": -0.4,  # rho = 0.4, below the clip but A > 0: not clipped
        "luffy": -0.2 / 0.3,
        "aipo": -0.4,  # above the floor
        "ce": -0.1 * math.log(0.2) * 2,  # own denominator: one token, so twice 1/2
    }
    down = {  # peer_loss -> loss of the peer token, A = -1
        "masked": 0.0,
        "surrogate": 1.0,
        "positive": 0.0,
        "tapered": 0.2,
        "truncated_is": 0.4,
        "ppo_is": 0.8,  # clipped from below
        "luffy": 0.2 / 0.3,
        "aipo": 0.4,
        "ce": -0.1 * math.log(0.2) * 2,
    }
    for name, want in up.items():
        cfg = LossConfig(external_loss=name, peer_loss="masked")  # type: ignore[arg-type]
        close(m.policy_loss(Stats(lp), batch, cfg, lp).loss, (-1 + want) / 2)
        half = LossConfig(external_loss=name, peer_loss="masked", lambda_ext=0.5)  # type: ignore[arg-type]
        close(m.policy_loss(Stats(lp), batch, half, lp).loss, (-1 + want / 2) / 2)
    for name, want in down.items():
        cfg = LossConfig(external_loss="masked", peer_loss=name)  # type: ignore[arg-type]
        close(m.policy_loss(Stats(lp), batch, cfg, lp).loss, (-1 + want) / 2)


def kl_in_loss(m: ModuleType) -> None:
    """Own tokens only, same weights as the policy part: here one own token of two policy tokens, d = ln 2."""
    batch = build([Row("cph", 0.0), Row("cp", 0.0, author="you")])
    lp = full(batch, math.log(0.2))
    cfg = LossConfig(kl_coef=0.3)
    close(m.policy_loss(Stats(lp), batch, cfg, lp, full(batch, math.log(0.4))).loss, 0.3 * (1 - math.log(2)) / 2)


def row_weights(m: ModuleType) -> None:
    """Rows with factors 1 and 0.5, two tokens: -(1 + 0.5) / 2."""
    batch = build([Row("cp"), Row("cp")], weights=[1.0, 0.5])
    lp = full(batch, -1.0)
    close(m.policy_loss(Stats(lp), batch, LossConfig(), lp).loss, -0.75)


# --- advantages.py -----------------------------------------------------------------------------------------------------


def advantage_kinds(m: ModuleType) -> None:
    """(2, 4, 9): mean 5, squares 9 + 1 + 16 = 26, ddof 1: s = sqrt(13). Leave one out: 2 - 6.5, 4 - 5.5, 9 - 3."""
    s = math.sqrt(13)
    close(m.group_advantages([group(2, 4, 9)], "mean_std")[0], [-3 / s, -1 / s, 4 / s])
    close(m.group_advantages([group(2, 4, 9)], "mean")[0], [-3, -1, 4])
    close(m.group_advantages([group(2, 4, 9)], "rloo")[0], [-4.5, -1.5, 6])
    # One mean and deviation over (1,1),(0,0): mean 1/2, s^2 = 1/3.
    close(m.group_advantages([group(1, 1), group(0, 0)], "batch"), [[3**0.5 / 2] * 2, [-(3**0.5) / 2] * 2])


def advantage_unusable(m: ModuleType) -> None:
    assert m.group_advantages([group(1, math.nan, None, math.inf, 0)], "mean")[0] == [0.5, None, None, None, -0.5]
    assert m.group_advantages([group(1, 0, 0, failed="timeout")], "mean")[0] == [0.5, -0.5, None]


def advantage_baselines(m: ModuleType) -> None:
    """Solo (0, 1), helped (1, 1): means 1/2 and 1, shared 3/4 with s = 1/2; solo s = sqrt(1/2)."""
    g = [group(0, 1, 1, 1, modes="sshh")]
    close(m.group_advantages(g, "mean", "own_mode")[0], [-0.5, 0.5, 0, 0])
    close(m.group_advantages(g, "mean", "shared")[0], [-0.75, 0.25, 0.25, 0.25])
    close(m.group_advantages(g, "mean_std", "solo_mean")[0], [-1, 1, 1, 1])


def informative_share(m: ModuleType) -> None:
    close(m.expected_informative_share(0.18, 2), 0.2952)


# --- stats.py ----------------------------------------------------------------------------------------------------------


def pass_at_k(m: ModuleType) -> None:
    """n = 4, c = 1, k = 2: 1 - C(3,2)/C(4,2) = 1/2; c = 3: 1 - 0; the mean 3/4. A problem without scores is left out."""
    close(m.pass_at_k([4, 4, 0], [1, 3, 0], 2), 0.75)
    close(m.pass_at_k([4, 2], [1, 2], 1), 0.625)
    assert math.isnan(m.pass_at_k([0], [0], 1))


def wilson(m: ModuleType) -> None:
    """3 of 10 at 95%: the textbook interval (0.1078, 0.6032); 0 of 10: (0, 3.8415 / 13.8415)."""
    close(m.wilson_interval(3, 10), [0.107789, 0.603222], 1e-5)
    close(m.wilson_interval(0, 10), [0.0, 3.841459 / 13.841459], 1e-6)


def clustered(m: ModuleType) -> None:
    """Rates 0, 0, 1, 1: p (1 - p) = 1/4, s^2 = 1/3, effective trials 4 (1/4) / (1/3) = 3. Equal rates: 4 trials."""
    close(m.cluster_interval([0, 0, 1, 1]), m.wilson_interval(1.5, 3))
    close(m.cluster_interval([0.5] * 4), m.wilson_interval(2, 4))
    close(m.cluster_interval([1.0] * 4), m.wilson_interval(4, 4))


def student(m: ModuleType) -> None:
    """(1, 2, 3): mean 2, s = 1, t(0.975, 2) = 4.302653: half width 4.302653 / sqrt(3)."""
    close(m.mean_interval([1, 2, 3]), [2 - 2.484138, 2 + 2.484138], 1e-5)


def paired(m: ModuleType) -> None:
    """Differences (1, 2, 3): t = 2 sqrt(3) = 3.4641, p = 0.07418; sign flips: |6| in 2 of 8; g = (1 - 3/7) 2."""
    got = m.compare_paired([2, 4, 6], [1, 2, 3])
    close(
        [got.difference, got.p_t, got.p_sign_flip, got.effect, got.low],
        [2, 0.074180, 0.25, 2 * 4 / 7, 2 - 2.484138],
        1e-5,
    )
    assert m.compare_paired([1, 1], [1, 1]).p_t == 1.0
    close(m.sign_flip_p([1, -2, 4]), 0.75)  # |sum| over all signs: 7, 5, 3, 1; observed 3


def holm(m: ModuleType) -> None:
    """Sorted 0.01, 0.03, 0.04 times 3, 2, 1: 0.03, 0.06, and 0.04 lifted to 0.06."""
    close(m.holm([0.04, 0.01, 0.03]), [0.06, 0.03, 0.06])
    close(m.holm([0.9, 0.8]), [1.0, 1.0])


# --- value.py ----------------------------------------------------------------------------------------------------------


def gae_by_hand(m: ModuleType) -> None:
    """gamma 1/2, lambda 1/2; steps at t = 1, 3, 4 (t = 2 is a helper's), V = 1, 2, 4, reward 8 at the end.

    From the back: 8 - 4 = 4; (4/2 - 2) + 4/4 = 1; (2/2 - 1) + 1/4 = 1/4. Returns A + V.
    """
    mask = torch.tensor([[False, True, False, True, True]])
    advantages, returns = m.gae(row(0, 0, 0, 0, 8), row(9, 1, 9, 2, 4), mask, 0.5, 0.5)
    close(advantages, [[0, 0.25, 0, 1, 4]])
    close(returns, [[0, 1.25, 0, 3, 8]])


def gae_extremes(m: ModuleType) -> None:
    """lambda 1: discounted return minus value; lambda 0: one-step difference. Rows do not mix."""
    rewards, values = torch.tensor([[0.0, 1.0], [3.0, 0.0]]), torch.tensor([[0.5, 0.25], [1.0, 2.0]])
    mask = torch.tensor([[True, True], [True, False]])
    close(m.gae(rewards, values, mask, 0.9, 1.0)[0], [[0.9 - 0.5, 0.75], [2.0, 0.0]])
    close(m.gae(rewards, values, mask, 0.9, 0.0)[0], [[0.9 * 0.25 - 0.5, 0.75], [2.0, 0.0]])


def value_regression(m: ModuleType) -> None:
    """V_old = 0, clip 1/2, R = 2. V = 1: errors 1 and (0.5 - 2)^2 = 2.25; V = 0.25: both 3.0625; weights 1/2; rest off.

    Slopes: clipped away at V = 1, and (0.25 - 2) / 2 at V = 0.25.
    """
    values = row(1.0, 0.25, 7.0, grad=True)
    loss = m.value_loss(values, row(0, 0, 0), row(2, 2, 2), row(0.5, 0.5, 0), 0.5)
    close(loss, (2.25 + 3.0625) / 4)
    close(torch.autograd.grad(loss, values)[0], [[0.0, -0.875, 0.0]])


def span_mu(m: ModuleType) -> None:
    """A reply of two tokens, rho0 = 0.5 and 0.02: under `aipo` c = 0.5 and 0.2 (floored), over the whole reply 0.1 and 0.1,
    floored to 0.2; own token 1. N = 1 policy token."""
    batch = build([Row("cphh", 1.0, mu=[0, 0, math.log(0.8), math.log(0.5)])])
    old = logs(1, 0.5, 0.4, 0.01)
    for source, want in (("recorded", 0.5 + 0.2), ("span", 0.2 + 0.2)):
        cfg = LossConfig(external_loss="aipo", mu_source=source)  # type: ignore[arg-type]
        close(m.policy_loss(Stats(old), batch, cfg, old).loss, -1 - want)
    cfg = LossConfig(external_loss="ppo_is", mu_source="span")
    close(m.policy_loss(Stats(old), batch, cfg, old).loss, -1 - 0.2)


def capped_share(m: ModuleType) -> None:
    """Norms 6 and 2: a share of 0.75; scaled by a sixth they are 1 and 2: a third."""
    close([m.share_scale(0.75, 1 / 3), m.share_scale(0.2, 0.3), m.share_scale(1.0, 0.3)], [1 / 6, 1, 0])


# --- loss_metrics.py --------------------------------------------------------------------------------------------------


def metrics(m: ModuleType) -> None:
    """One own row (ratios 2 and 1, A = 1), one helper token each with rho0 = 1/4 and 1, one peer token, A = -1.

    All have p = 1/2 now; vocabulary of two equal symbols, so sum_sq = 1/2 and the logit norm is sqrt(1/2).
    """
    half, quarter = math.log(0.5), math.log(0.25)
    batch = build(
        [
            Row("cpphh", 1.0, mu=[0, half, half, 0.0, half]),
            Row("cp", -1.0, "you", mu=quarter),
        ]
    )
    lp = full(batch, half, grad=True)
    old = full(batch, half)
    old[0, 1] = quarter  # own ratio 2, above 1.28: clipped
    old[0, 3] = quarter
    cfg = LossConfig(external_loss="aipo", peer_loss="truncated_is", c_min=0.3, c_max=1.0, ext_clip_high=2.0)
    with patch.object(coterie.losses, "diagnostics", m.diagnostics):
        out = coterie.losses.policy_loss(Stats(lp, full(batch, math.log(2)), full(batch, 0.5)), batch, cfg, old)
    got = m.loss_metrics([out])
    want = {
        "loss/trained_tokens": 5,
        "loss/own/tokens": 2,
        "loss/own/ratio": 1.5,
        "loss/own/clip_high": 0.5,
        "loss/own/clip_low": 0,
        "loss/own/kl_old": (2 - 1 - math.log(2)) / 2,
        "loss/own/nll": math.log(2),
        "loss/own/entropy": math.log(2),
        "loss/own/behavior_gap": math.log(2) / 2,
        # Gradients in units of 1/3: own 0 (clipped) and 1; helper 0.3 * 2 and 1 * 1; peer: c = min(2, 1).
        "loss/own/gradient_share": 1 / 3.6,
        "loss/helper/gradient_share": 1.6 / 3.6,
        "loss/peer/gradient_share": 1 / 3.6,
        "loss/helper/ratio": 1.5,
        "loss/helper/floored": 0.5,
        "loss/helper/capped": 0,
        "loss/helper/coefficient": 0.8,
        "loss/helper/unknown": 0,
        "loss/helper/behavior_k1": math.log(4) / 2,
        "loss/helper/behavior_k3": (0.25 - 1 + math.log(4)) / 2,
        "loss/helper/behavior_chi2": (1 + 1 / 16) / 2 - 1,
        "loss/helper/ess": 1.25**2 / (2 * (1 + 1 / 16)),
        "loss/helper/bias": (0.3 - 0.25) * 2 / 1.6,
        "loss/peer/capped": 1,
        "loss/peer/coefficient": 1,
        "loss/peer/ess": 1,
        "loss/peer/bias": 1.0,  # pushes 1 where importance sampling would push 2
        "loss/peer/clip_low": 0,
        "loss/total": (-1.28 - 1 - 0.6 - 1 + 1) / 3,
    }
    close([got[k] for k in want], list(want.values()))


def clip_metrics(m: ModuleType) -> None:
    """A = -1, ratio 1/2 for own and peer; under ppo_is the ratio that clips is p / mu = 2 (not low), unknown mu never."""
    half = math.log(0.5)
    rows = [Row("cp", -1.0), Row("cp", -1.0, "you", mu=math.log(0.25)), Row("cp", -1.0, "you", mu=math.nan)]
    batch = build(rows)
    with patch.object(coterie.losses, "diagnostics", m.diagnostics):
        out = coterie.losses.policy_loss(
            Stats(full(batch, half)), batch, LossConfig(peer_loss="ppo_is"), full(batch, 0.0)
        )
    got = m.loss_metrics([out])
    close([got["loss/own/clip_low"], got["loss/peer/clip_low"], got["loss/peer/clip_high"]], [1, 0, 0])
    close([got["loss/peer/unknown"], got["loss/own/ratio"]], [0.5, 0.5])


def metrics_of_unlike_tokens(m: ModuleType) -> None:
    """Peer tokens with A = -2, 2, 2, 2 and p = pi_old = 0.1, 0.1, 0.5, 0.5: rho0 = 0.1, 0.1, 1, 1; c = 0.1, 0.2, 1, 1.

    One of four is floored; mean coefficient weighted by |A|: 2.3 / 4. The own token, A = 1, p = 0.5, norm sqrt(0.5);
    rare tokens have norm sqrt(1 - 0.2 + 0.82) = sqrt(1.62). Pushes (over 5 tokens): own 1, peers 0.2, 0.4, 2, 2.
    """
    rare, half = math.log(0.1), math.log(0.5)
    rows = [Row("cp", 1.0, mu=half)] + [
        Row("cp", a, "you", mu=mu) for a, mu in ((-2, 0.0), (2, 0.0), (2, half), (2, half))
    ]
    batch = build(rows)
    lp = torch.tensor([[0, half], [0, rare], [0, rare], [0, half], [0, half]], requires_grad=True)
    sum_sq = torch.tensor([[0, 0.5], [0, 0.82], [0, 0.82], [0, 0.5], [0, 0.5]])
    with patch.object(coterie.losses, "diagnostics", m.diagnostics):
        cfg = LossConfig(peer_loss="aipo")
        out = coterie.losses.policy_loss(Stats(lp, None, sum_sq), batch, cfg, lp.detach())
    got = m.loss_metrics([out])
    own, peers = 0.5**0.5, 0.6 * 1.62**0.5 + 4 * 0.5**0.5
    close(got["loss/peer/floored"], 1 / 4)
    close(got["loss/peer/coefficient"], 2.3 / 4)
    close(got["loss/own/gradient_share"], own / (own + peers))


def metrics_absurd_peer(m: ModuleType) -> None:
    """One impossible recorded log-prob counts as a log ratio of 20, not 1e30."""
    batch = build([Row("cpp", 1.0, "you", mu=[0.0, -1e30, -1.0])])
    with patch.object(coterie.losses, "diagnostics", m.diagnostics):
        out = coterie.losses.policy_loss(Stats(full(batch, -1.0)), batch, LossConfig(), full(batch, -1.0))
    close(m.loss_metrics([out])["loss/peer/behavior_gap"], 10.0)


def metrics_by_role(m: ModuleType) -> None:
    """Two replies of one token, p = 0.5 and 0.25; a question that failed has no tokens."""
    batch = build([Row("cphph", 1.0)])
    role = torch.tensor([[0, 0, 1, 0, 2]], dtype=torch.int8)
    batch = dataclasses.replace(batch, role=role, roles=("knowledge", "verify"))
    lp = logs(1, 0.5, 0.5, 0.5, 0.25)
    with patch.object(coterie.losses, "diagnostics", m.diagnostics):
        out = coterie.losses.policy_loss(Stats(lp), batch, LossConfig(external_loss="surrogate"), lp)
    got = m.loss_metrics([out])
    close([got["loss/helper/knowledge/nll"], got["loss/helper/verify/nll"]], [math.log(2), math.log(4)])
    close([got[f"loss/helper/{r}tokens"] for r in ("", "knowledge/", "verify/")], [2, 1, 1])
    assert got["loss/trained_tokens"] == 4


EXTERNAL = (clipped, bounded, recorded, positive, tapered, truncated, whole_replies, aipo, ppo_is, luffy)
LOSSES = (gspo_ratio, kl, weights, provenance, every_treatment, kl_in_loss, row_weights, span_mu, capped_share)
ADVANTAGES = (advantage_kinds, advantage_unusable, advantage_baselines, informative_share)
STATS = (pass_at_k, wilson, clustered, student, paired, holm)
VALUE = (gae_by_hand, gae_extremes, value_regression)
METRICS = (metrics, clip_metrics, metrics_of_unlike_tokens, metrics_absurd_peer, metrics_by_role)
