"""The sampler: exact log-probs, an unbiased draw, and randomness that is a function of (seed, sample, step)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from coterie.engines.base import check_request
from coterie.engines.sampling import Sampler, cut, invert_cdf, uniforms
from coterie.errors import UserError
from coterie.types import Sampling

LOGITS = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.4]]))


def _draw(sampling: Sampling, uniform: float, logits: torch.Tensor = LOGITS) -> tuple[int, float]:
    token, logprob = Sampler(sampling).draw(logits, torch.tensor([uniform], dtype=torch.float64))
    return int(token), float(logprob)


def test_uniforms_are_a_function_of_seed_sample_and_step() -> None:
    assert np.array_equal(uniforms(7, 3, 10), uniforms(7, 3, 500)[:10])
    streams = {uniforms(seed, j, 1)[0] for seed in range(30) for j in range(30)}
    assert len(streams) == 900
    u = uniforms(1, 0, 20000)
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.01


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 0), (0.0999, 0), (0.1001, 1), (0.2999, 1), (0.3001, 2), (0.5999, 2), (0.6001, 3)]
)
def test_the_cdf_is_inverted(uniform: float, token: int) -> None:
    got, logprob = _draw(Sampling(1), uniform)
    assert got == token
    assert logprob == pytest.approx(math.log((token + 1) / 10), abs=1e-6)


def test_the_largest_uniform_takes_a_possible_token() -> None:
    largest = float(np.nextafter(1.0, 0.0))
    capped = min(largest, 1 - 2.0**-52)
    for size in (4, 5000):
        logits = torch.full((1, size), -torch.inf)
        logits[0, 1] = 0.0
        assert _draw(Sampling(1), capped, logits) == (1, 0.0)


@pytest.mark.parametrize("size", [600, 1000, 4096])
def test_two_levels_take_the_same_token_as_one(size: int) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(500, size) * 4).exp()
    weight[:, ::3] = 0
    u = torch.rand(500, 1, dtype=torch.float64)
    token, total = invert_cdf(weight, u)
    cumulative = weight.double().cumsum(-1)
    plain = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)
    torch.testing.assert_close(total, cumulative[:, -1:], rtol=1e-6, atol=0)
    assert bool((weight.gather(-1, token) > 0).all())
    # Sums are rounded differently, so a uniform on a boundary may go to the neighbour; no more than that.
    assert int((token != plain).sum()) <= 1


def test_temperature_is_part_of_the_logprob() -> None:
    p = np.array([0.1, 0.2, 0.3, 0.4]) ** 2
    token, logprob = _draw(Sampling(1, temperature=0.5), 0.5)
    assert token == 3  # cumulative .033 .167 .467 1
    assert logprob == pytest.approx(math.log(p[3] / p.sum()), abs=1e-6)


def test_top_k_renormalises_and_keeps_ties() -> None:
    token, logprob = _draw(Sampling(1, top_k=2), 0.0)
    assert (token, logprob) == (2, pytest.approx(math.log(3 / 7), abs=1e-6))
    tied = cut(torch.tensor([[1.0, 1.0, 0.0]]), 1, 1.0)
    assert tied.tolist() == [[1.0, 1.0, -math.inf]]


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    assert torch.isfinite(cut(LOGITS, 0, 0.65)).tolist() == [[False, False, True, True]]  # .4 + .3 reaches .65
    assert torch.isfinite(cut(LOGITS, 0, 0.35)).tolist() == [[False, False, False, True]]
    token, logprob = _draw(Sampling(1, top_p=0.65), 0.0)
    assert (token, logprob) == (2, pytest.approx(math.log(3 / 7), abs=1e-6))


def test_greedy_takes_the_most_likely_and_reports_its_probability() -> None:
    assert _draw(Sampling(1, temperature=0.0), 0.01) == (3, pytest.approx(math.log(0.4), abs=1e-6))


@pytest.mark.parametrize("size", [50, 1000])
def test_frequencies_are_the_probabilities(size: int) -> None:
    torch.manual_seed(1)
    logits = torch.randn(1, size) * 2
    u = torch.from_numpy(uniforms(5, 0, 40000))
    tokens, logprobs = Sampler(Sampling(1)).draw(logits.expand(40000, -1), u)
    p = logits[0].double().softmax(-1)
    torch.testing.assert_close(logprobs.double(), p.log()[tokens], rtol=0, atol=1e-5)
    seen = torch.bincount(tokens, minlength=size) / 40000
    z = (seen - p).abs() / (p * (1 - p) / 40000).sqrt().clamp_min(1e-4)
    assert float(z.max()) < 5


def test_a_wrong_request_is_one_clear_line() -> None:
    good = Sampling(4)
    wrong: list[tuple[tuple[object, ...], str]] = [
        (([[1]], [1, 2], good, [0]), "sample counts"),
        (([[1]], 1, good, []), "seeds"),
        (([[1]], 1, good, [-1]), "seed"),
        (([[]], 1, good, [0]), "no tokens"),
        (([[1]], -1, good, [0]), "negative"),
        (([[1]], 1, Sampling(0), [0]), "max_new_tokens"),
        (([[1]], 1, Sampling(1, temperature=-1.0), [0]), "temperature"),
        (([[1]], 1, Sampling(1, temperature=float("nan")), [0]), "temperature"),
        (([[1]], 1, Sampling(1, top_p=0.0), [0]), "top_p"),
        (([[1]], 1, Sampling(1, top_k=-1), [0]), "top_k"),
        (([[1]], 1, Sampling(1, stop=("",)), [0]), "stop string"),
    ]
    for request, what in wrong:
        with pytest.raises(UserError, match=what):
            check_request(*request)  # type: ignore[arg-type]
    assert check_request([[1], [2]], 3, good, [0, 1]) == [3, 3]
