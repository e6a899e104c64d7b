"""Every formula against hand-derived numbers, and every check against broken formulas.

A check that passes on a wrong formula proves nothing, so each line of the maths is broken on purpose (in a copy of the
module's source) and some check must notice.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from types import ModuleType

import formula_checks
import pytest

import coterie.advantages
import coterie.external
import coterie.loss_metrics
import coterie.losses
import coterie.stats
import coterie.value

Check = Callable[[ModuleType], None]
CHECKS: dict[ModuleType, tuple[Check, ...]] = {
    coterie.external: formula_checks.EXTERNAL,
    coterie.losses: formula_checks.LOSSES,
    coterie.loss_metrics: formula_checks.METRICS,
    coterie.advantages: formula_checks.ADVANTAGES,
    coterie.stats: formula_checks.STATS,
    coterie.value: formula_checks.VALUE,
}
MUTATIONS: list[tuple[ModuleType, str, str]] = [
    (coterie.external, "torch.minimum(ratio * advantages, clipped * advantages)", "(clipped * advantages)"),
    (coterie.external, "torch.minimum(ratio * advantages, clipped * advantages)", "(ratio * advantages)"),
    (coterie.external, "-torch.minimum(ratio * advantages", "torch.minimum(ratio * advantages"),
    (coterie.external, "ratio.clamp(1.0 - low, 1.0 + high)", "ratio.clamp(1.0 - high, 1.0 + low)"),
    (coterie.external, "log_ratio.clamp(-MAX_LOG, MAX_LOG).exp()", "log_ratio.exp()"),
    (coterie.external, "behavior_logprobs.isfinite() & ", "~behavior_logprobs.isnan() & "),
    (coterie.external, " & (behavior_logprobs <= 1e-3)", ""),
    (coterie.external, "(advantages > 0).to(", "(advantages >= 0).to("),
    (coterie.external, "old_logprobs.detach().exp())", "old_logprobs.detach())"),
    (coterie.external, "rho0.clamp(max=c_max), torch.zeros_like(rho0))", "rho0, torch.zeros_like(rho0))"),
    (coterie.external, "rho0.clamp(max=c_max), torch.zeros_like(rho0))", "rho0.clamp(max=c_max), rho0)"),
    (coterie.external, "(n_known == n)", "(n_known <= n)"),
    (coterie.external, "(helper & ~before)", "helper"),
    (coterie.external, "gap / n.clamp(min=1)", "gap"),
    (coterie.external, "torch.where(whole, old - mean, mu_logprobs)", "torch.where(helper, old - mean, mu_logprobs)"),
    (coterie.external, "floored = rho0.clamp(c_min, c_max)", "floored = rho0.clamp(max=c_max)"),
    (coterie.external, "floored = rho0.clamp(c_min, c_max)", "floored = rho0.clamp(min=c_min)"),
    (coterie.external, '"tapered": rho0.clamp(max=c_max)', '"tapered": rho0'),
    (coterie.external, '"tapered": rho0.clamp(max=c_max)', '"tapered": floored'),
    (coterie.external, '"zero": torch.zeros_like(rho0)', '"zero": rho0'),
    (coterie.external, "bounded_exp(old_logprobs.detach() - mu_logprobs)", "bounded_exp(mu_logprobs - old_logprobs)"),
    (coterie.external, "torch.minimum(loss, -dual_clip * advantages)", "loss"),
    (coterie.external, "torch.where(known, capped, torch.zeros_like(capped))", "capped"),
    (coterie.external, "clipped_loss(logprobs - mu_logprobs", "clipped_loss(logprobs"),
    (coterie.external, "-advantages * p / (p + gamma)", "-advantages * p"),
    (coterie.losses, "(log_ratio * mask).sum(1, keepdim=True) / count", "(log_ratio * mask).sum(1, keepdim=True)"),
    (coterie.losses, "(log_ratio * mask).sum(1, keepdim=True) / count", "log_ratio.mean(1, keepdim=True)"),
    (coterie.losses, "mu = whole_replies(old, mu, known, who.helper)", "mu = mu"),
    (coterie.losses, "cap * (1 - share) / (share * (1 - cap))", "cap / share"),
    (coterie.losses, "d.square() / 2", "d.square()"),
    (coterie.losses, "near.exp() * (1 + d - near) - 1 - d", "near.exp() * (1 + d - near) - 1"),
    (coterie.losses, "near.exp() * (1 + d - near) - 1 - d", "near.exp() - 1 - d"),
    (coterie.losses, "d = ref_logprobs.detach() - logprobs", "d = logprobs - ref_logprobs.detach()"),
    (coterie.losses, "max(policy_tokens, 1)", "max(rows, 1)"),
    (coterie.losses, "1.0 / (per_row * max(rows, 1))", "1.0 / per_row"),
    (coterie.losses, "1.0 / (per_row * max(rows, 1))", "torch.ones_like(per_row) / max(policy_tokens, 1)"),
    (coterie.losses, "(max(rows, 1) * max_new_tokens)", "max_new_tokens"),
    (coterie.losses, "Provenance(policy & own, policy & ~own", "Provenance(policy, policy & ~own"),
    (coterie.losses, "Provenance(policy & own, policy & ~own", "Provenance(policy & own, policy"),
    (coterie.losses, "batch.source == Source.HELPER", "batch.source == Source.CONTEXT"),
    (coterie.losses, "positive_coefficient(t.advantages)", "torch.ones_like(t.advantages)"),
    (coterie.losses, "tapered_coefficient(t.advantages, t.old)", "torch.ones_like(t.advantages)"),
    (coterie.losses, "-cfg.ce_coef * t.logprobs", "-cfg.ce_coef * t.logprobs * t.advantages"),
    (coterie.losses, "(row / max(count, 1)).expand_as(weight) if kind", "weight if kind"),
    (coterie.losses, "cfg.lambda_ext\n", "1.0\n"),
    (coterie.losses, "n.policy, n.rows", "n.own_policy, n.rows"),
    (coterie.losses, "weight = weight * row", "weight = weight"),
    (coterie.losses, "torch.where(who.own, kl,", "torch.where(batch.loss_mask, kl,"),
    (coterie.losses, "cfg.kl_coef * (kl * weight)", "cfg.kl_coef * (kl)"),
    (coterie.advantages, "(len(values) - 1)", "len(values)"),
    (coterie.advantages, "centred * n / (n - 1)", "centred"),
    (coterie.advantages, 'if kind == "mean_std" else centred', 'if kind == "mean" else centred'),
    (coterie.advantages, 'if kind == "batch" else [list', 'if kind == "mean" else [list'),
    (coterie.advantages, "math.isfinite(r) and ", ""),
    (coterie.advantages, " and trajectory.failed is None", ""),
    (coterie.advantages, "1.0 - (p**group_size + (1.0 - p) ** group_size)", "1.0 - p**group_size"),
    (coterie.advantages, "by_mode[t.mode], by_mode[t.mode]", "everyone, everyone"),
    (coterie.advantages, 'by_mode.get("solo", []), everyone', 'by_mode.get("solo", []), by_mode["solo"]'),
    (coterie.stats, "1.0 - math.comb(n - c, k) / math.comb(n, k)", "1.0 - (1.0 - c / n) ** k"),
    (coterie.stats, "if values else math.nan", "if values else 0.0"),
    (coterie.stats, "z * z / (4 * n * n)", "z * z / (4 * n)"),
    (coterie.stats, "(p + z * z / (2 * n))", "p"),
    (coterie.stats, "n = m * p * (1 - p) / between if between else float(m)", "n = float(m)"),
    (coterie.stats, "math.sqrt(len(x))\n    return float(x.mean()) - half", "1\n    return float(x.mean()) - half"),
    (
        coterie.stats,
        "scipy_stats.t.ppf(0.5 + confidence / 2, len(x) - 1)",
        "scipy_stats.norm.ppf(0.5 + confidence / 2)",
    ),
    (coterie.stats, "p_t = 2 * ", "p_t = "),
    (coterie.stats, "1 - 3 / (4 * (n - 1) - 1)", "1"),
    (coterie.stats, "np.abs(signs @ d) >= observed", "signs @ d >= observed"),
    (coterie.stats, "(len(p_values) - rank) * p_values[i]", "len(p_values) * p_values[i]"),
    (coterie.stats, "largest = max(largest, min(", "largest = (min("),
    (coterie.value, "gamma * next_value - v[:, t]", "next_value - v[:, t]"),
    (coterie.value, "gamma * lam * next_advantage", "lam * next_advantage"),
    (coterie.value, "torch.where(step, advantage, next_advantage)", "advantage"),
    (coterie.value, "torch.where(step, v[:, t], next_value)", "v[:, t]"),
    (coterie.value, "torch.where(mask, advantages + v,", "torch.where(mask, advantages,"),
    (coterie.value, "torch.maximum((values", "torch.minimum((values"),
    (coterie.value, "(near - returns).square()) / 2", "(near - returns).square())"),
    (coterie.value, "(values - old).clamp(-clip, clip)", "(values - old)"),
    (coterie.loss_metrics, "torch.where(weight > 0, push.abs() / weight,", "torch.where(weight > 0, push.abs(),"),
    (coterie.loss_metrics, "(1 - 2 * tokens.logprobs", "(1 - tokens.logprobs"),
    (coterie.loss_metrics, "push + weight * rho0 * ratio * a", "push + weight * rho0 * a"),
    (coterie.loss_metrics, "push + weight * rho0 * ratio * a", "push + weight * ratio * a"),
    (coterie.loss_metrics, "ratio - 1 - (lp - old)", "ratio - 1"),
    (coterie.loss_metrics, "rho0 - 1 - gap", "rho0 - 1"),
    (coterie.loss_metrics, '"k1": -gap', '"k1": gap'),
    (coterie.loss_metrics, "(a > 0) & (used < cfg.c_min)", "(used < cfg.c_min)"),
    (coterie.loss_metrics, "(used < cfg.c_min)", "(used > cfg.c_min)"),
    (coterie.loss_metrics, "(used > cfg.c_max)", "(used > 2 * cfg.c_max)"),
    (coterie.loss_metrics, "gap = gap.clamp(-MAX_LOG, MAX_LOG)", "gap = gap"),
    (coterie.loss_metrics, 'tokens.logprobs - tokens.mu if kind == "ppo_is" else tokens.log_ratio', "tokens.log_ratio"),
    (coterie.loss_metrics, " & ~unweighed", ""),
    (coterie.loss_metrics, "(a > 0) & (ratio > 1 + high)", "(ratio > 1 + high)"),
    (coterie.loss_metrics, "(a < 0) & (ratio < 1 - low)", "(a > 0) & (ratio < 1 - low)"),
    (coterie.loss_metrics, 's["w"] ** 2 / (known * s["w2"])', 's["w"] ** 2 / s["w2"]'),
    (coterie.loss_metrics, '"behavior_chi2": s["w2"] / known - 1', '"behavior_chi2": s["w2"] / known'),
    (coterie.loss_metrics, "batch.role == i", "batch.role >= i"),
    (coterie.loss_metrics, "1 - known / n", "known / n"),
    (coterie.loss_metrics, 's["coef"] / s["abs_a"]', 's["coef"] / n'),
    (coterie.loss_metrics, 's["grad"] / all_grad', 's["grad"]'),
]


def load_copy(module: ModuleType, source: str) -> ModuleType:
    """``source`` as a module of its own; imports in it reach the real package."""
    spec = importlib.util.spec_from_loader(f"{module.__name__}_copy", loader=None)
    assert spec is not None
    copy = importlib.util.module_from_spec(spec)
    sys.modules[copy.__name__] = copy  # dataclasses look their module up
    try:
        exec(compile(source, f"<copy of {module.__name__}>", "exec"), copy.__dict__)
    finally:
        del sys.modules[copy.__name__]
    return copy


@pytest.mark.parametrize(
    ("module", "check"), [(m, c) for m, cs in CHECKS.items() for c in cs], ids=lambda x: x.__name__.split(".")[-1]
)
def test_formula(module: ModuleType, check: Check) -> None:
    check(module)


@pytest.mark.parametrize(("module", "right", "wrong"), MUTATIONS, ids=range(len(MUTATIONS)))
def test_broken_formula_is_noticed(module: ModuleType, right: str, wrong: str) -> None:
    source = inspect.getsource(module)
    assert source.count(right) >= 1, f"the line to break is gone from {module.__name__}: {right!r}"
    broken = load_copy(module, source.replace(right, wrong, 1))
    noticed = [check.__name__ for check in CHECKS[module] if _fails(check, broken)]
    assert noticed, f"no check notices {right!r} -> {wrong!r}"


def _fails(check: Check, module: ModuleType) -> bool:
    try:
        check(module)
    except AssertionError:
        return True
    return False
