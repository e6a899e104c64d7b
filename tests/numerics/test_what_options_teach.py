"""Does an option teach the policy a helper's rare but useful word? Exact expectations, no sampling.

Twelve words; the helper says the key with probability 0.9, the policy with 0.01. After the key the policy answers right
half of the time, otherwise never. Plain gradient ascent, 200 steps, one per batch. What counts is the probability of the
key *without* the helper, so this is the claim of docs/losses.md in numbers.
"""

from __future__ import annotations

import math

import pytest
import torch

from coterie.config import LossConfig
from coterie.external import Tokens
from coterie.losses import TOKEN_LOSSES

V, KEY, START, STEPS, RATE = 12, 0, 0.01, 200, 0.5


def key_probability(option: str, **settings: float) -> float:
    cfg = LossConfig(external_loss=option, **settings)  # type: ignore[arg-type]
    word = torch.full((V,), math.log((1 - START) / (V - 1)), dtype=torch.float64)
    word[KEY] = math.log(START)
    word.requires_grad_()
    mu = torch.full((V,), math.log(0.1 / (V - 1)), dtype=torch.float64)
    mu[KEY] = math.log(0.9)
    right = torch.zeros(V, 2, dtype=torch.float64)  # reward of (word, answer)
    right[KEY, 1] = 1.0
    for _ in range(STEPS):
        sampled = mu.exp()[:, None] * torch.full((V, 2), 0.5, dtype=torch.float64)  # [V, 2]
        advantage = right - (sampled * right).sum()  # [V, 2]
        lp = word.log_softmax(0)[:, None].expand(V, 2)  # [V, 2]
        known = torch.ones(V, 2, dtype=torch.bool)
        tokens = Tokens(lp, lp.detach(), lp - lp.detach(), mu[:, None].expand(V, 2), known, advantage)
        loss = TOKEN_LOSSES[option](tokens, cfg)  # [V, 2]
        if loss.requires_grad:
            (gradient,) = torch.autograd.grad((sampled * loss).sum(), word)
            with torch.no_grad():
                word -= RATE * gradient
    return float(word.detach().softmax(0)[KEY])


@pytest.fixture(scope="module")
def learned() -> dict[str, float]:
    plain = {name: key_probability(name) for name in ("masked", "ppo_is", "luffy", "surrogate", "ce")}
    return plain | {f"aipo {c}": key_probability("aipo", c_min=c) for c in (0.0, 0.2, 0.5, 1.0)}


def test_masked_teaches_nothing_and_the_true_ratio_next_to_nothing(learned: dict[str, float]) -> None:
    assert learned["masked"] == pytest.approx(START)
    assert learned["ppo_is"] < 3 * START


def test_a_larger_floor_teaches_more(learned: dict[str, float]) -> None:
    floors = [learned[f"aipo {c}"] for c in (0.0, 0.2, 0.5, 1.0)]
    assert floors == sorted(floors)
    assert floors[0] < 3 * START  # no floor: as inert as the true ratio
    assert floors[2] > 0.3 > START


def test_the_rest_teach_it(learned: dict[str, float]) -> None:
    assert learned["surrogate"] > 0.3
    assert learned["luffy"] > learned["ppo_is"]
    assert learned["ce"] > START
