"""Figures of the interference report against fp64 longhand, planted effects, and data where nothing is there to find."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from merge_kit import save, save_adapter, weights

from coterie.merging import nulls
from coterie.merging.diagnostics import interference
from coterie.merging.gram import gram_pass
from coterie.merging.inputs import open_inputs
from coterie.merging.page import html, sparsity_curves, write_report
from coterie.merging.recipe import make_recipe
from coterie.merging.verdict import CAVEAT

WIDE = {
    "model.layers.0.mlp.up_proj.weight": (120, 90),
    "model.layers.1.mlp.up_proj.weight": (120, 90),
    "model.norm.weight": (90,),
}
EMBED = "model.embed_tokens.weight"


def report(base: dict, experts: list[dict], tmp_path: Path, dtype=torch.float32, **how) -> dict:
    b = save(tmp_path / "base", {n: t.to(dtype) for n, t in base.items()})
    paths = [save(tmp_path / f"e{k}", {n: t.to(dtype) for n, t in e.items()}) for k, e in enumerate(experts)]
    return interference(make_recipe(b, paths), **{"top_k": 0, **how})


def flat(e: dict, base: dict, names=None) -> np.ndarray:
    return np.concatenate([(e[n] - base[n]).double().numpy().reshape(-1) for n in sorted(names or base)])


@pytest.mark.parametrize("cut", [False, True])
def test_figures_equal_the_dense_longhand(tmp_path, monkeypatch, cut) -> None:
    if cut:
        monkeypatch.setattr("coterie.merging.deltas.block_values", lambda *_: 17)
    base = weights(0)
    experts = [weights(k, base) for k in (1, 2, 3)]
    experts[1][EMBED] = base[EMBED].clone()  # one expert leaves a tensor alone
    got = report(base, experts, tmp_path)
    d = [flat(e, base) for e in experts]
    for p, (i, j) in zip(got["all"]["pairs"], itertools.combinations(range(3), 2), strict=True):
        inner = float(d[i] @ d[j])
        norm = float(np.linalg.norm(d[i]) * np.linalg.norm(d[j]))
        assert p["inner_product"] == pytest.approx(inner, abs=1e-7 * norm)
        assert p["cosine"] == pytest.approx(inner / norm, abs=1e-7)
        assert p["z_sign_flip"] == pytest.approx(inner / math.sqrt(float((d[i] ** 2) @ (d[j] ** 2))), abs=1e-5)
        by_row = [
            ((experts[i][n] - base[n]).double() * (experts[j][n] - base[n]).double()).view(len(base[n]), -1).sum(1)
            for n in base
        ]
        assert p["z_row_flip"] == pytest.approx(inner / math.sqrt(float(sum((r**2).sum() for r in by_row))), abs=1e-5)
        both = (d[i] != 0) & (d[j] != 0)
        assert p["sign_conflict_share"] == pytest.approx(float(((d[i] * d[j] < 0) & both).sum() / both.sum()), abs=1e-9)
        negative = -(d[i] * d[j])[d[i] * d[j] < 0].sum() / np.abs(d[i] * d[j]).sum()
        assert p["sign_conflict_energy"] == pytest.approx(float(negative), abs=1e-6)
    for k, label in enumerate(("e0", "e1", "e2")):
        e = got["all"]["experts"][label]
        assert e["l2_norm"] == pytest.approx(float(np.linalg.norm(d[k])), rel=1e-6)
        assert e["share_nonzero"] == pytest.approx(float((d[k] != 0).mean()), abs=1e-9)
        assert e["share_above"]["0.001"] == pytest.approx(float((np.abs(d[k]) > 1e-3).mean()), abs=1e-9)
        names = [n for n in base if "q_proj" in n]
        q = got["per_module_type"]["self_attn.q_proj"]["experts"][label]["l2_norm"]
        assert q == pytest.approx(float(np.linalg.norm(flat(experts[k], base, names))), rel=1e-6)
        layer = got["per_layer"]["1"]["experts"][label]["l2_norm"]
        assert layer == pytest.approx(
            float(np.linalg.norm(flat(experts[k], base, [n for n in base if ".1." in n]))), rel=1e-6
        )


def test_gram_pass_keeps_cosines_to_1e_minus_8(tmp_path) -> None:
    shapes = {"model.layers.0.w.weight": (700, 300)}
    base = weights(0, shapes=shapes)
    experts = [weights(k, base, shapes=shapes) for k in (1, 2)]
    b = save(tmp_path / "base", base)
    recipe = make_recipe(b, [save(tmp_path / str(k), e) for k, e in enumerate(experts)])
    got = gram_pass(open_inputs(b, recipe.experts)).numpy()
    d = [flat(e, base) for e in experts]
    want = np.array([[float(x @ y) for x in d] for y in d])
    norms = np.sqrt(np.outer(np.diag(want), np.diag(want)))
    error = np.abs((got - want) / norms)
    assert error[0, 1] < 1e-8 and error.max() < 1e-7


def test_planted_cosine_is_found_and_scale_does_not_matter(tmp_path) -> None:
    base = weights(0, shapes=WIDE)
    one, noise = weights(1, base, shapes=WIDE), weights(2, base, shapes=WIDE)
    two = {n: base[n] + 7 * (0.3 * (one[n] - base[n]) + math.sqrt(1 - 0.09) * (noise[n] - base[n])) for n in base}
    p = report(base, [one, two], tmp_path)["all"]["pairs"][0]
    assert p["cosine"] == pytest.approx(0.3, abs=0.02) and p["z_row_flip"] > 10 and p["z_sign_flip"] > 30


def test_opposing_modules_are_not_hidden_by_a_zero_total(tmp_path) -> None:
    base = weights(0, shapes=WIDE | {f"model.layers.{i}.self_attn.q_proj.weight": (120, 90) for i in (0, 1)})
    one = {n: t + 0.01 * torch.randn(t.shape, generator=torch.Generator().manual_seed(len(n))) for n, t in base.items()}
    two = {n: base[n] + (one[n] - base[n]) * (-1 if "q_proj" in n else 1) for n in base}
    got = report(base, [one, two], tmp_path)
    assert abs(got["all"]["pairs"][0]["cosine"]) < 0.1
    assert got["all"]["pairs"][0]["conflict_mass"] == pytest.approx(0.5, abs=0.05)
    assert any("opposed in self_attn.q_proj: the total hides a conflict" in line for line in got["reading"])


def test_z_is_standard_normal_when_nothing_is_there() -> None:
    from coterie.merging.gram import row_grams

    g = torch.Generator().manual_seed(0)
    scale = torch.rand(40, 30, generator=g) ** 4  # a few weights carry most of the energy
    zs, chances, cosines = [], [], []
    for _ in range(600):
        d = torch.randn(2, 40, 30, generator=g) * scale
        grams = row_grams(d)
        inner = grams.sum(0)
        q = row_grams(d * d).sum(0)
        zs.append([float(inner[0, 1] / q[0, 1].sqrt()), float(inner[0, 1] / grams.square().sum(0)[0, 1].sqrt())])
        norm = float((inner[0, 0] * inner[1, 1]).sqrt())
        cosines.append(float(inner[0, 1]) / norm)
        chances.append(float(q[0, 1].sqrt()) / norm)
    z = np.array(zs)
    assert np.abs(z.mean(0)).max() < 0.15 and np.abs(z.std(0) - 1).max() < 0.1
    assert np.std(cosines) == pytest.approx(np.mean(chances), rel=0.1)  # and wider than 1 / sqrt(n) = .029
    assert np.mean(chances) > 1.3 / math.sqrt(1200)


def test_dense_drift_stored_in_bf16_looks_sparse_and_the_null_says_so(tmp_path) -> None:
    # 400 steps of 1e-6 in random directions: dense, but bf16 shows about 20% above 1e-5
    g = torch.Generator().manual_seed(0)
    shapes = {f"model.layers.{i}.mlp.up_proj.weight": (400, 500) for i in range(2)}
    base = {n: (torch.randn(s, generator=g) * 0.02).bfloat16().float() for n, s in shapes.items()}
    experts = [
        {n: t + 1e-6 * math.sqrt(400) * torch.randn(t.shape, generator=g) for n, t in base.items()} for _ in range(2)
    ]
    fine = report(base, experts, tmp_path / "fp32")
    e = fine["all"]["experts"]["e0"]
    assert e["share_nonzero"] > 0.999  # dense in fp32
    assert e["share_above_in_bf16"]["1e-05"] == pytest.approx(0.201, abs=0.01)
    assert e["share_above_in_bf16_null"]["1e-05"] == pytest.approx(e["share_above_in_bf16"]["1e-05"], rel=0.03)
    assert any("e0: 22." in x and "no sign of a sparse update" in x for x in fine["reading"])
    coarse = report(base, experts, tmp_path / "bf16", dtype=torch.bfloat16)
    c = coarse["all"]["experts"]["e0"]
    assert c["share_above"] == c["share_above_in_bf16"] == e["share_above_in_bf16"]
    assert c["share_above_in_bf16_null"]["1e-05"] == pytest.approx(e["share_above_in_bf16"]["1e-05"], rel=0.03)
    assert "fitted" in coarse["null_of_sparsity"]["e0"] and "rms" in fine["null_of_sparsity"]["e0"]
    # independent updates share far more of their visible support than p * p, and the stratified null knows
    p = coarse["all"]["pairs"][0]
    assert p["support_jaccard"] > 2 * (0.22 * 0.22 / (0.44 - 0.22 * 0.22))
    assert p["support_overlap_over_null"] == pytest.approx(1, abs=0.03)


def test_a_truly_sparse_update_is_told_from_drift(tmp_path) -> None:
    g = torch.Generator().manual_seed(0)
    shapes = {"model.layers.0.mlp.up_proj.weight": (400, 500)}
    base = {n: (torch.randn(s, generator=g) * 0.02).bfloat16().float() for n, s in shapes.items()}
    mask = torch.rand(400, 500, generator=g) < 0.02
    experts = [{n: t + 2e-4 * mask * torch.randn(t.shape, generator=g) for n, t in base.items()} for _ in range(2)]
    got = report(base, experts, tmp_path)
    e = got["all"]["experts"]["e0"]
    assert e["share_above_in_bf16"]["1e-05"] < 0.2 * e["share_above_in_bf16_null"]["1e-05"]
    assert got["all"]["pairs"][0]["support_overlap_over_null"] > 20  # and both sit on the same weights
    assert any("fewer than dense drift" in x for x in got["reading"])


def test_fitted_sigma_is_the_one_that_was_used() -> None:
    g = torch.Generator().manual_seed(3)
    base = (torch.randn(200_000, generator=g) * 0.02).bfloat16().float()
    for sigma in (3e-6, 3e-5, 3e-4):
        drift = (base + sigma * torch.randn(200_000, generator=g)).bfloat16().float() - base
        rms = float(drift.square().mean().sqrt())
        fitted = nulls.fit_sigma(base, nulls.normal("x", 200_000), float(drift.ne(0).float().mean()), rms)
        assert fitted == pytest.approx(sigma, rel=0.03)
        if sigma == 3e-6:
            assert abs(rms / sigma - 1) > 0.3  # why the rms of a bf16 difference will not do


def test_subspaces_planted_and_random(tmp_path) -> None:
    g = torch.Generator().manual_seed(0)
    base = weights(0, shapes=WIDE)
    name = "model.layers.0.mlp.up_proj.weight"
    u, v, w = torch.randn(120, 2, generator=g), torch.randn(2, 90, generator=g), torch.randn(2, 90, generator=g)
    experts = [dict(base), dict(base), {n: t + 0.01 * torch.randn(t.shape, generator=g) for n, t in base.items()}]
    experts[0][name], experts[1][name] = (
        base[name] + 0.01 * u @ v,
        base[name] + 0.01 * (u * torch.tensor([2.0, -1])) @ w,
    )
    got = report(base, experts, tmp_path, top_k=2)["subspaces"]["matrices"]
    first = next(m for m in got if m["tensor"] == name and m["experts"] == ["e0", "e1"])
    assert first["left"]["overlap"] == pytest.approx(1, abs=1e-3) and first["left"]["chance"] == pytest.approx(2 / 120)
    assert first["right"]["overlap"] < 0.2
    mixed = next(m for m in got if m["tensor"] == name and m["experts"] == ["e0", "e2"])
    assert mixed["left"]["overlap"] < 0.2
    assert not any(
        m["experts"] == ["e0", "e1"] and ".1." in m["tensor"] for m in got
    )  # both zero there: nothing to compare


def test_lora_experts_are_compared_as_updates_and_a_shared_start_is_flagged(tmp_path) -> None:
    base = weights(0)
    b = save(tmp_path / "base", base)
    q = "model.layers.0.self_attn.q_proj"
    one = save_adapter(tmp_path / "a", {q: 6}, base, 3)
    two = save_adapter(tmp_path / "b", {q: 6}, base, 4)
    from merge_kit import adapter_delta
    from safetensors.torch import load_file, save_file

    got = interference(make_recipe(b, [one, two]), top_k=2)
    x, y = (adapter_delta(p, q, 6).reshape(-1) for p in (one, two))
    assert got["all"]["pairs"][0]["cosine"] == pytest.approx(
        float(x @ y / np.linalg.norm(x) / np.linalg.norm(y)), abs=1e-6
    )
    assert not got["adapters"][0]["same_start"]
    mixed = {**load_file(two / "adapter_model.safetensors")}
    key = f"base_model.model.{q}.lora_A.weight"
    mixed[key] = load_file(one / "adapter_model.safetensors")[key] * 1.01
    save_file(mixed, two / "adapter_model.safetensors")
    again = interference(make_recipe(b, [one, two]), top_k=2)
    assert again["adapters"][0]["same_start"] and any("same random numbers" in x for x in again["reading"])


def test_reading_never_calls_a_merge_safe_and_the_page_holds_the_figures(tmp_path) -> None:
    base = weights(0)
    got = report(base, [weights(k, base) for k in (1, 2)], tmp_path)
    assert got["reading"][0] == CAVEAT and not any("safe" in line for line in got["reading"][1:])
    assert any("within chance" in line and "not compatibility" in line for line in got["reading"])
    write_report(got, tmp_path / "out")
    assert json.loads((tmp_path / "out/interference.json").read_text()) == got
    page = (tmp_path / "out/interference.html").read_text()
    assert page.count("<svg") == 6 and "<script" not in page and f"{got['all']['pairs'][0]['cosine']:+.2e}" in page
    named = json.loads(json.dumps(got).replace("e0", "<b>x"))
    assert "<b>x" not in html(named)


def test_curves_of_sparsity_have_a_measured_and_a_null_line_per_expert_at_the_right_heights() -> None:
    share = {"1e-08": 1.0, "1e-05": 0.5}
    null = {"1e-08": 1.0, "1e-05": 0.25}
    svg = sparsity_curves(
        {
            n: {"share_above": share, "share_above_in_bf16": share, "share_above_in_bf16_null": null}
            for n in ("a", "<b>")
        }
    )
    assert svg.count("<polyline") == 4 and svg.count("stroke-dasharray") == 2 and "<b>" not in svg
    assert 'points="40,10.0 130,100.0"' in svg and 'points="40,10.0 130,145.0"' in svg


def test_order_of_experts_changes_nothing(tmp_path) -> None:
    base = weights(0)
    b = save(tmp_path / "base", base)
    paths = [save(tmp_path / f"e{k}", weights(k, base)) for k in (1, 2, 3)]
    one, two = (interference(make_recipe(b, p), top_k=2) for p in (paths, paths[::-1]))
    assert one["all"] == two["all"] and one["subspaces"] == two["subspaces"]
