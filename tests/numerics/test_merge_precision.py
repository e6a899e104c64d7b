"""What 16 bits do to an update: drift over many merges, small updates that vanish, names after a merge."""

from __future__ import annotations

import pytest
import torch
from merge_kit import load, save, save_adapter, weights

from coterie.merging.gram import gram_pass
from coterie.merging.inputs import open_inputs
from coterie.merging.merge import merge
from coterie.merging.recipe import make_recipe

Q = "model.layers.0.self_attn.q_proj"
UP = "model.layers.0.mlp.up_proj"


def test_me08_merging_from_the_kept_base_does_not_drift(tmp_path) -> None:
    base = {n: t.bfloat16() for n, t in weights(0).items()}
    b = save(tmp_path / "base", base)
    a = save_adapter(tmp_path / "adapter", {Q: 2}, base, 1)
    merge(make_recipe(b, [a], dtype="float32"), tmp_path / "wide")
    delta = load(tmp_path / "wide")[f"{Q}.weight"] - base[f"{Q}.weight"].float()

    drifting = base[f"{Q}.weight"].clone()  # the fault: add and take away in place, in bf16
    for _ in range(100):
        drifting = (drifting.float() + delta).bfloat16()
        drifting = (drifting.float() - delta).bfloat16()
    assert float((drifting != base[f"{Q}.weight"]).double().mean()) > 0.1

    first = None
    for k in range(5):  # ours: every merge starts from the base and rounds once, so the next one is the same
        merge(make_recipe(b, [a]), tmp_path / f"m{k}")
        got = load(tmp_path / f"m{k}")
        first = got if first is None else first
        assert all(torch.equal(got[n], first[n]) for n in got)
    assert first is not None
    assert torch.equal(first[f"{Q}.weight"], (base[f"{Q}.weight"].float() + delta).bfloat16())
    merge(make_recipe(b, [a], lam=0.0), tmp_path / "back")
    assert all(torch.equal(t, base[n]) for n, t in load(tmp_path / "back").items())

    at = b
    for k in range(10):  # even merge upon merge stays flat when written in fp32
        merge(make_recipe(at, [a], lam=1.0 if k % 2 == 0 else -1.0, dtype="float32"), tmp_path / f"c{k}")
        at = tmp_path / f"c{k}"
    assert max(float((t - base[n].float()).abs().max()) for n, t in load(at).items()) < 1e-6


def test_me09_an_update_of_a_thousandth_of_the_weight_is_kept_in_fp32_and_its_loss_in_bf16_is_stated(tmp_path) -> None:
    base = {n: t.bfloat16() for n, t in weights(0).items()}
    expert = {n: t.float() * 1.001 for n, t in base.items()}
    b, e = save(tmp_path / "base", base), save(tmp_path / "expert", expert)
    loss = merge(make_recipe(b, [e]), tmp_path / "narrow")
    changed = [float((t != base[n]).double().mean()) for n, t in load(tmp_path / "narrow").items()]
    assert max(changed) < 0.05  # nearly all of it vanished
    assert loss["rounding"]["all"]["energy_kept"] < 0.5 or loss["rounding"]["all"]["cosine"] < 0.9
    assert any("rounding" in w for w in loss["warnings"])
    kept = merge(make_recipe(b, [e], dtype="float32"), tmp_path / "wide")
    assert kept["rounding"]["all"]["cosine"] > 0.999999
    for n, t in load(tmp_path / "wide").items():
        torch.testing.assert_close(t, expert[n], atol=1e-7, rtol=0)


def test_me13_a_merged_adapter_leaves_the_bases_tensor_names_and_shapes(tmp_path) -> None:
    base = weights(0)
    b = save(tmp_path / "base", base)
    merge(make_recipe(b, [save_adapter(tmp_path / "a", {Q: 2, UP: 3}, base, 1)]), tmp_path / "out")
    assert {n: t.shape for n, t in load(tmp_path / "out").items()} == {n: t.shape for n, t in base.items()}
    assert not list((tmp_path / "out").glob("adapter*"))


@pytest.mark.parametrize("kind", ["same types", "bf16", "f16", "other types", "adapter"])
def test_the_gram_pass_is_exact_whoever_stores_what_and_however_the_work_is_shared(tmp_path, kind) -> None:
    shapes = {f"{Q}.weight": (400, 700), "model.norm.weight": (5000,)}  # pieces, a rest, several spans under 8 MiB
    stored = {"bf16": torch.bfloat16, "f16": torch.float16}.get(kind, torch.float32)
    base = {n: t.to(stored) for n, t in weights(0, shapes=shapes).items()}
    full = [weights(k, base, shapes=shapes) for k in range(1, 7 if stored == torch.bfloat16 else 3)]
    full = [{n: t.to(stored) for n, t in e.items()} for e in full]
    b = save(tmp_path / "base", base)
    if kind == "other types":
        full[1] = {n: t.bfloat16() for n, t in full[1].items()}
    paths = [save(tmp_path / f"e{k}", e) for k, e in enumerate(full)]
    if kind == "adapter":
        paths[1] = save_adapter(tmp_path / "e1_adapter", {Q: 3}, base, 2)
        merge(make_recipe(b, paths[1:], dtype="float32"), tmp_path / "whole")
        full[1] = load(tmp_path / "whole")
    inputs = open_inputs(b, make_recipe(b, paths).experts)
    flat = torch.stack([torch.cat([(e[n].double() - base[n].double()).flatten() for n in shapes]) for e in full])
    want = flat @ flat.T
    scale = want.diagonal().sqrt().outer(want.diagonal().sqrt())
    got = {(t, mib): gram_pass(inputs, mib, t) for t, mib in ((1, 64), (3, 64), (2, 1))}
    assert torch.equal(got[1, 64], got[3, 64])
    for g in got.values():
        assert float(((g - want) / scale).abs().max()) < 1e-7


def test_the_gram_pass_does_not_hide_a_nan(tmp_path) -> None:
    base = weights(0)
    broken = {n: t.clone() for n, t in weights(1, base).items()}
    broken[f"{Q}.weight"][0, 3] = float("nan")
    b = save(tmp_path / "base", base)
    paths = [save(tmp_path / "a_good", weights(2, base)), save(tmp_path / "broken", broken)]
    got = gram_pass(open_inputs(b, make_recipe(b, paths).experts))
    assert got.isnan().tolist() == [[False, True], [True, True]]
