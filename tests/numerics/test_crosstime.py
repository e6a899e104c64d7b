"""Sketches and updates across time against the plain sums they stand for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from coterie.errors import CoterieError
from coterie.merging.crosstime import UpdateLog, coherence, cross_time, load_updates
from coterie.merging.sketch import CountSketch, Whole


def image(p: CountSketch | Whole, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    out = torch.zeros(p.width)
    for name, t in tensors.items():
        p.add(out, name, t)
    return out


def draw(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {"m.w": torch.randn(40, 50, generator=g), "m.b": torch.randn(50, generator=g)}


def test_whole_keeps_every_value_and_a_sketch_is_linear_and_keyed_by_name() -> None:
    x, y = draw(0), draw(1)
    assert torch.equal(image(Whole(x), x), torch.cat([t.flatten() for t in x.values()]))
    p = CountSketch(64)
    both = {n: x[n] + 2 * y[n] for n in x}
    torch.testing.assert_close(image(p, both), image(p, x) + 2 * image(p, y), rtol=1e-4, atol=1e-4)
    again = image(CountSketch(64), dict(reversed(x.items())))  # another process, another order
    torch.testing.assert_close(again, image(p, x), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(image(p, {"other": x["m.w"]}), image(p, {"m.w": x["m.w"]}))


def test_sketched_inner_products_are_unbiased_with_the_stated_deviation() -> None:
    """Over 300 names (so 300 independent hashes): mean within 4 standard errors, deviation near |x||y|/sqrt(k)."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(500, generator=g)
    y = 0.3 * x + torch.randn(500, generator=g)
    p, k = CountSketch(256), 256
    got = np.array([float(image(p, {f"n{i}": x}) @ image(p, {f"n{i}": y})) for i in range(300)])
    want, scale = float(x @ y), float(x.norm() * y.norm()) / k**0.5
    assert abs(got.mean() - want) < 4 * got.std() / 300**0.5
    assert 0.7 < got.std() / scale < 1.5


def runs() -> tuple[np.ndarray, np.ndarray]:
    """Small drift under large noise: steps are nearly orthogonal, the wholes are not."""
    rng = np.random.default_rng(0)
    drift = rng.normal(size=400)
    return tuple(0.15 * drift + rng.normal(size=(100, 400)) for _ in range(2))  # type: ignore[return-value]


def test_sums_over_all_pairs_of_steps_are_the_inner_product_of_the_wholes() -> None:
    a, b = runs()
    got = cross_time(a, b[:80])
    assert got["total"] == pytest.approx(float(a.sum(0) @ b[:80].sum(0)))
    assert got["same_step"] == pytest.approx(sum(float(a[t] @ b[t]) for t in range(80)))
    within = sum(float(a[t] @ b[s]) for t in range(100) for s in range(80) if abs(t - s) < 10)
    assert got["bands"]["10"] == pytest.approx(within / got["total"])
    assert got["step_cosine_mean"] < 0.05 and got["cosine"] > 0.5
    assert got["same_step_share"] < 0.05


def test_coherence_of_a_line_and_of_a_random_walk() -> None:
    assert coherence(np.tile([1.0, 2.0], (7, 1))) == pytest.approx(7)
    walk = np.random.default_rng(1).normal(size=(50, 4000))
    assert coherence(walk) == pytest.approx(1, abs=0.3)
    assert coherence(np.zeros((3, 2))) == 0


class Weights:
    def __init__(self) -> None:
        self.w = {"a": torch.zeros(3), "value_head.weight": torch.zeros(2)}

    def weights(self) -> dict[str, torch.Tensor]:
        return self.w


def test_a_log_is_cut_back_with_its_run_and_refuses_to_go_ahead_of_it(tmp_path: Path) -> None:
    policy = Weights()
    log = UpdateLog(tmp_path, 8, policy)  # type: ignore[arg-type]
    log.rewind(0)
    for step in range(3):
        log.watch()
        policy.w["a"] += torch.tensor([3.0, 0.0, 4.0]) * (step + 1)
        policy.w["value_head.weight"] += 1  # no part of the model
        assert log.append() == {"update/l2": pytest.approx(5.0 * (step + 1))}
    rows = load_updates(tmp_path)
    assert rows.shape == (3, 8)
    np.testing.assert_allclose(rows[2], 3 * rows[0], rtol=1e-5)
    log.rewind(2)
    assert len(load_updates(tmp_path)) == 2
    with pytest.raises(CoterieError, match="fewer updates"):
        log.rewind(3)
    with pytest.raises(CoterieError, match="no updates"):
        load_updates(tmp_path / "elsewhere")
