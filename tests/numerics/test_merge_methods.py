"""Every merge method against a dense longhand in fp64, vectors worked by hand, and identities."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from merge_kit import SHAPES, adapter_delta, kth, load, oracle, save, save_adapter, weights

from coterie.merging import methods
from coterie.merging.lowrank import compress, truncate
from coterie.merging.merge import merge
from coterie.merging.recipe import make_recipe
from coterie.merging.threshold import KthLargest

W = [1.0, 0.5, 2.0]


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, list[Path], dict, list[dict]]:
    base = weights(0)
    experts = [weights(i + 1, base) for i in range(3)]
    paths = [save(tmp_path / f"e{i}", e, shards=i + 1) for i, e in enumerate(experts)]
    return save(tmp_path / "base", base, shards=2), paths, base, experts


def f64(t: torch.Tensor) -> np.ndarray:
    return t.double().numpy()


@pytest.mark.parametrize(
    ("method", "settings"),
    [("sum", {}), ("mean", {}), ("svd", {"rank": 2}), ("dare", {"density": 0.3, "seed": 5}), ("dare_ties", {"density": 0.4}),
     ("ties", {"density": 0.25, "trim": "tensor"}), ("ties", {"density": 0.25, "trim": "global"})],
)  # fmt: skip
@pytest.mark.parametrize("chunk", [1, 64])
def test_methods_equal_the_dense_longhand(models, tmp_path, monkeypatch, method, settings, chunk) -> None:
    base_path, paths, base, experts = models
    if chunk == 1:  # blocks of a row or two, so that every tensor is cut
        monkeypatch.setattr("coterie.merging.deltas.block_values", lambda *_: 20)
    merge(make_recipe(base_path, paths, method, weights=W, lam=0.7, **settings), tmp_path / "out")
    got = load(tmp_path / "out")
    assert set(got) == set(base)
    deltas = [{n: f64(e[n]) - f64(base[n]) for n in base} for e in experts]
    for name in base:
        how: dict = dict(settings)
        if method == "ties":
            scope = [
                d[name] if settings["trim"] == "tensor" else np.concatenate([v.reshape(-1) for v in d.values()])
                for d in deltas
            ]
            how["thresholds"] = [kth(s, 0.25) - 1e-9 for s in scope]
        if method.startswith("dare"):
            keys = [methods.dare_key(settings.get("seed", 0), f"e{i}", name) for i in range(3)]
            how["masks"] = [
                methods.dare_mask(k, 0, base[name].numel(), settings["density"]).view(base[name].shape).numpy()
                for k in keys
            ]
        want = oracle(method, f64(base[name]), [f64(e[name]) for e in experts], W, 0.7, **how)
        np.testing.assert_allclose(f64(got[name]), want, atol=2e-7, rtol=0)


def test_ties_vector_worked_by_hand() -> None:
    # density 1/2 of 4 values keeps two: |d1| -> {4, 3}, |d2| -> {5, 2}
    d1 = torch.tensor([4.0, -1.0, 3.0, 0.5])
    d2 = torch.tensor([-2.0, 1.0, 5.0, 0.1])
    cut = []
    for d in (d1, d2):
        k = KthLargest(0.5)
        k.count(d)
        k.next_pass()
        k.count(d)
        cut.append(methods.trim(d, k.value))
    assert cut[0].tolist() == [4, 0, 3, 0] and cut[1].tolist() == [-2, 0, 5, 0]
    # place 0: 4 - 2 > 0, plus wins, only d1 agrees -> 4; place 2: both agree -> (3 + 5) / 2 = 4; lambda 1/2
    assert methods.elect_and_average(cut, [1, 1], 0.5).tolist() == [2, 0, 2, 0]
    # weights 1 and 3: place 0: 4 - 6 < 0, minus wins -> -2; place 2: (3 + 15) / 4 = 4.5
    assert methods.elect_and_average(cut, [1, 3], 1.0).tolist() == [-2, 0, 4.5, 0]
    # an exact tie elects plus
    tie = methods.elect_and_average([torch.tensor([2.0]), torch.tensor([-2.0])], [1, 1], 1.0)
    assert tie.tolist() == [2]


def test_dare_mask_is_pinned_and_free_of_blocks() -> None:
    key = methods.dare_key(7, "math", "model.layers.0.mlp.up_proj.weight")
    assert key == 0x97CC1DA343D507B6E9B84CB384DB5D44
    whole = methods.dare_mask(key, 0, 1000, 0.3)
    assert whole[:16].int().tolist() == [0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0]
    for first, last in [(0, 1), (1, 9), (9, 24), (24, 1000)]:
        assert torch.equal(methods.dare_mask(key, first, last - first, 0.3), whole[first:last])
    many = methods.dare_mask(key, 0, 200_000, 0.3).double().mean().item()
    assert abs(many - 0.3) < 5 * (0.3 * 0.7 / 200_000) ** 0.5
    kept = methods.dare(torch.full((1000,), 3.0), key, 0, 0.3)
    assert kept.unique().tolist() == [0.0, pytest.approx(10.0)]  # exactly 1 / density, not matched to a norm


def test_svd_vector_worked_by_hand() -> None:
    # [[3, 0], [0, 1]]: rank 1 keeps 3; energy 9 of 10
    d = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
    got = truncate(lambda: [(0, 2, d)], 2, 2, 1, "x")
    torch.testing.assert_close(got.left @ got.right, torch.tensor([[3.0, 0.0], [0.0, 0.0]]))
    assert (got.kept, got.energy) == (pytest.approx(9), pytest.approx(10))


def test_the_working_memory_changes_no_merged_weight(tmp_path) -> None:
    """300 x 400 values are decomposed exactly, 520 x 600 are not; a MiB holds neither whole."""
    shapes = {"model.layers.0.mlp.up_proj.weight": (300, 400), "model.layers.1.mlp.up_proj.weight": (520, 600)}
    base = weights(0, shapes=shapes)
    b, e = save(tmp_path / "base", base), save(tmp_path / "e", weights(1, base, shapes=shapes))
    receipts = [merge(make_recipe(b, [e], "svd", rank=3), tmp_path / f"{m}", chunk_mib=m) for m in (1, 64)]
    assert [r["svd"]["matrices_exact"] for r in receipts] == [1, 1]
    assert receipts[0]["output_sha256"] == receipts[1]["output_sha256"]


def test_randomised_svd_comes_close_to_the_exact_one(monkeypatch) -> None:
    monkeypatch.setattr("coterie.merging.lowrank.EXACT_VALUES", 0)
    g = torch.Generator().manual_seed(0)
    d = (
        torch.randn(90, 6, generator=g)
        @ torch.diag(torch.tensor([9.0, 8, 5, 3, 2, 1]))
        @ torch.randn(6, 70, generator=g)
    )
    d += 0.05 * torch.randn(90, 70, generator=g)
    pieces = [(r, min(r + 13, 90), d[r : r + 13]) for r in range(0, 90, 13)]
    got = truncate(lambda: pieces, 90, 70, 4, "x")
    s = torch.linalg.svdvals(d.double())
    assert not got.exact
    assert got.energy == pytest.approx(float((s**2).sum()), rel=1e-6)
    assert got.kept == pytest.approx(float((s[:4] ** 2).sum()), rel=1e-4)
    left_out = float((d - got.left @ got.right).double().pow(2).sum())
    assert left_out == pytest.approx(got.energy - got.kept, rel=1e-3)  # the stated error is the true one


@pytest.mark.parametrize("density", [0.0001, 0.2, 0.5, 1.0])
def test_kth_largest_is_exact(density: float) -> None:
    g = torch.Generator().manual_seed(1)
    v = torch.randn(5000, generator=g) * 10 ** torch.randint(-9, 3, (5000,), generator=g)
    v[:500] = 0
    k = KthLargest(density)
    for _ in range(2):
        for piece in v.split(777):
            k.count(piece)
        if _ == 0:
            k.next_pass()
    assert k.value == pytest.approx(kth(v.double().numpy(), density), rel=1e-7, abs=0)


def test_lora_experts_merge_exactly_and_mix_with_full_ones(tmp_path) -> None:
    base = weights(0)
    full = weights(1, base)
    q, up = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"
    b = save(tmp_path / "base", base)
    one = save_adapter(tmp_path / "a", {q: 2, up: 2}, base, 3)
    two = save_adapter(tmp_path / "b", {q: 4}, base, 4, use_rslora=True, alpha_pattern={"q_proj": 3, q: 3})
    merge(make_recipe(b, [one, two, save(tmp_path / "c", full)], weights=[1, -2, 1], lam=0.5), tmp_path / "out")
    got = load(tmp_path / "out")
    for n in base:
        want = f64(base[n]) + 0.5 * (f64(full[n]) - f64(base[n]))
        if n == f"{q}.weight":
            want += 0.5 * adapter_delta(one, q, 2) - 1.0 * adapter_delta(two, q, 4)
        if n == f"{up}.weight":
            want += 0.5 * adapter_delta(one, up, 2)
        np.testing.assert_allclose(f64(got[n]), want, atol=2e-7, rtol=0)


def test_me06_me07_lora_concat_is_the_exact_signed_sum(tmp_path) -> None:
    base = weights(0)
    q, up = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"
    b = save(tmp_path / "base", base)
    one, two = save_adapter(tmp_path / "a", {q: 2, up: 2}, base, 3), save_adapter(tmp_path / "b", {q: 3}, base, 4)
    receipt = merge(make_recipe(b, [one, two], "lora_concat", weights=[1, -1]), tmp_path / "cat")
    want = adapter_delta(one, q, 2) - adapter_delta(two, q, 3)
    np.testing.assert_allclose(adapter_delta_of(tmp_path / "cat", q), want, atol=1e-7)
    np.testing.assert_allclose(adapter_delta_of(tmp_path / "cat", up), adapter_delta(one, up, 2), atol=1e-7)
    assert receipt["lora"]["relative_error"] == 0 and receipt["lora"]["ranks"] == {"smallest": 2, "largest": 5}
    # compressed: the best possible at that rank, and the stated error is the true one
    receipt = merge(make_recipe(b, [one, two], "lora_concat", weights=[1, -1], rank=2), tmp_path / "cut")
    got = {m: adapter_delta_of(tmp_path / "cut", m) for m in (q, up)}
    s = np.linalg.svd(want, compute_uv=False)
    np.testing.assert_allclose(np.linalg.norm(got[q] - want), np.linalg.norm(s[2:]), rtol=1e-4)
    total = np.linalg.norm(want) ** 2 + np.linalg.norm(adapter_delta(one, up, 2)) ** 2
    assert receipt["lora"]["relative_error"] == pytest.approx(np.linalg.norm(s[2:]) / total**0.5, rel=1e-4)


def adapter_delta_of(folder: Path, module: str) -> np.ndarray:
    import json

    config = json.loads((folder / "adapter_config.json").read_text())
    r = config["rank_pattern"].get(module, config["r"])
    return adapter_delta(folder, module, r)


def test_compress_matches_dense_svd() -> None:
    g = torch.Generator().manual_seed(2)
    left, right = torch.randn(9, 5, generator=g), torch.randn(5, 7, generator=g)
    got = compress(left, right, 2)
    s = torch.linalg.svdvals((left @ right).double())
    assert float((left @ right - got.left @ got.right).norm()) == pytest.approx(float(s[2:].norm()), rel=1e-5)


@pytest.mark.parametrize("method", ["sum", "mean", "ties", "dare", "dare_ties", "svd"])
def test_identities(models, tmp_path, method) -> None:
    base_path, paths, base, experts = models
    whole = {
        "ties": {"density": 1.0},
        "dare": {"density": 1.0},
        "dare_ties": {"density": 1.0},
        "svd": {"rank": 99},
    }.get(method, {})
    merge(make_recipe(base_path, paths[:1], method, **whole), tmp_path / "one")
    merge(make_recipe(base_path, paths, method, lam=0.0, **whole), tmp_path / "zero")
    for n in base:
        torch.testing.assert_close(
            load(tmp_path / "one")[n], experts[0][n], atol=1e-6 if method == "svd" else 1e-8, rtol=0
        )
        assert torch.equal(load(tmp_path / "zero")[n], base[n])
    forward, backward = tmp_path / "f", tmp_path / "b"
    merge(make_recipe(base_path, paths, method, weights=W, **whole), forward)
    merge(make_recipe(base_path, paths[::-1], method, weights=W[::-1], **whole), backward)
    assert all(torch.equal(load(forward)[n], load(backward)[n]) for n in SHAPES)


def test_me14_merging_a_model_with_itself_gives_it_back(models, tmp_path) -> None:
    base_path, paths, _, experts = models
    for k, (method, w) in enumerate([("mean", [1, 1]), ("sum", [0.3, 0.7]), ("sum", [1.5, -0.5])]):
        merge(make_recipe(base_path, [paths[0]] * 2, method, weights=w), tmp_path / str(k))
        for n, t in load(tmp_path / str(k)).items():
            torch.testing.assert_close(t, experts[0][n], atol=1e-7, rtol=0)


def test_shrink_control_is_base_plus_lambda_delta(models, tmp_path) -> None:
    base_path, paths, base, experts = models
    merge(make_recipe(base_path, paths[1:2], lam=0.6), tmp_path / "shrunk")
    for n, t in load(tmp_path / "shrunk").items():
        np.testing.assert_allclose(f64(t), f64(base[n]) + 0.6 * (f64(experts[1][n]) - f64(base[n])), atol=1e-7)
