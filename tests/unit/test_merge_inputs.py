"""Inputs that do not fit are refused by name before a weight is read; those that can be matched are matched rightly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from merge_kit import SHAPES, load, save, save_adapter, weights
from safetensors.torch import load_file, save_file

from coterie.errors import CoterieError, UserError
from coterie.merging.checkpoints import Reader
from coterie.merging.merge import merge, plan
from coterie.merging.recipe import label_paths, make_recipe

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
Q = "model.layers.0.self_attn.q_proj"
TIED_SHAPES = {n: s for n, s in SHAPES.items() if n != HEAD}


@pytest.fixture
def no_reads(monkeypatch):
    def refuse(*_):
        raise AssertionError("a weight was read before the recipe was checked")

    monkeypatch.setattr(Reader, "rows", refuse)


def pair(tmp_path: Path, **config) -> tuple[Path, dict]:
    base = weights(0)
    return save(tmp_path / "base", base, **config), base


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"method": "summ"}, "choose one of sum"), ({"density": 0.2}, "does not belong to --method sum"),
     ({"method": "svd"}, "needs --rank"), ({"weights": [1, 2]}, "one number per expert"), ({"lam": float("nan")}, "finite"),
     ({"method": "ties", "density": 1.5}, "share that is kept"), ({"method": "ties", "weights": [-1]}, "positive weights"),
     ({"dtype": "int8"}, "choose one of base"), ({"labels": ["a", "a"]}, "distinct name"), ({"seed": 1}, "does not belong")],
)  # fmt: skip
def test_me11_the_recipe_is_checked_before_any_file_is_opened(settings, words) -> None:
    with pytest.raises(UserError, match=words):
        make_recipe("/nowhere/base", ["/nowhere/e"], **settings)


def test_me11_inputs_are_checked_before_any_weight_is_read(tmp_path, no_reads) -> None:
    base_path, base = pair(tmp_path)
    wrong = {n: t for n, t in weights(1, base).items() if n != f"{Q}.weight"}
    with pytest.raises(UserError, match=r"1 tensors of the base are missing \(model.layers.0.self_attn.q_proj"):
        merge(make_recipe(base_path, [save(tmp_path / "e", wrong)]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def broken(kind: str, tmp_path: Path, base: dict) -> Path:
    e = weights(1, base)
    if kind == "renamed":
        e = {f"_orig_mod.{n}": t for n, t in e.items()}
    if kind == "extra":
        e["v_head.weight"] = torch.zeros(1, 8)
    if kind == "shape":
        e[f"{Q}.weight"] = torch.zeros(8, 4)
    if kind == "int8":
        e[f"{Q}.weight"] = torch.zeros(8, 8, dtype=torch.int8)
    if kind == "fp8":
        e[f"{Q}.weight"] = torch.zeros(8, 8).to(torch.float8_e4m3fn)
    config = {"arch": {"model_type": "qwen2"}, "quant": {"quantization_config": {"quant_method": "awq"}}}.get(kind, {})
    folder = save(tmp_path / "e", e, shards=2 if kind in ("lost shard", "two sets") else 1, **config)
    if kind == "lost shard":
        (folder / "model-00002-of-00002.safetensors").unlink()
    if kind == "two sets":
        save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
    if kind == "cut":
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-8])
    if kind == "pickle":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize(
    ("kind", "words"),
    [("renamed", "rename its tensors"), ("extra", r"tensors the base lacks \(v_head"),
     ("shape", r"shape \[8, 4\], the base \[8, 8\]"),
     ("int8", "is I8, the base has F32"), ("fp8", "F8_E4M3.* is quantised"),
     ("arch", "model_type is 'qwen2', the base has 'llama'"),
     ("quant", r"quantised \(awq\)"), ("lost shard", "shards are missing"), ("two sets", "two sets of weights"),
     ("cut", "cut short"), ("pickle", "only pickled weights")],
)  # fmt: skip
def test_inputs_that_do_not_fit_are_refused_by_name(tmp_path, no_reads, kind, words) -> None:
    base_path, base = pair(tmp_path)
    with pytest.raises(UserError, match=words):
        plan(make_recipe(base_path, [broken(kind, tmp_path, base)]))


@pytest.mark.parametrize(
    ("config", "words"),
    [({"use_dora": True}, "DoRA"), ({"bias": "all"}, "biases"), ({"peft_type": "IA3"}, "only LORA"),
     ({"lora_bias": True}, "biases"),
     ({"init_lora_weights": "pissa"}, "changed its base"), ({"trainable_token_indices": [1]}, "embedding rows")],
)  # fmt: skip
def test_adapters_that_are_not_plain_lora_are_refused_by_name(tmp_path, no_reads, config, words) -> None:
    base_path, base = pair(tmp_path)
    with pytest.raises(UserError, match=words):
        plan(make_recipe(base_path, [save_adapter(tmp_path / "a", {Q: 2}, base, 1, **config)]))


def test_adapter_of_another_base_and_lora_concat_of_full_models_are_refused(tmp_path) -> None:
    base_path, base = pair(tmp_path)
    other = {f"{Q}.weight": torch.zeros(8, 6)}
    with pytest.raises(UserError, match=r"updates a \[8, 6\] matrix, the base has \[8, 8\]"):
        plan(make_recipe(base_path, [save_adapter(tmp_path / "a", {Q: 2}, other, 1)]))
    with pytest.raises(UserError, match="e is a full model"):
        plan(make_recipe(base_path, [save(tmp_path / "e", weights(1, base))], "lora_concat"))


def test_me12_adapter_with_added_tokens_is_refused(tmp_path) -> None:
    base_path, base = pair(tmp_path)
    folder = save_adapter(tmp_path / "a", {Q: 2}, base, 1)
    file = folder / "adapter_model.safetensors"
    save_file({**load_file(file), "base_model.model.model.embed_tokens.base_layer.weight": torch.zeros(26, 8)}, file)
    with pytest.raises(UserError, match="tokens were added"):
        plan(make_recipe(base_path, [folder]))


def test_me15_stray_files_are_left_out_and_named(tmp_path) -> None:
    base_path, base = pair(tmp_path)
    expert = save(tmp_path / "e", weights(1, base), shards=2)
    save_file({f"{Q}.weight": torch.full((8, 8), 9.0)}, expert / "model-4bit.safetensors")
    receipt = merge(make_recipe(base_path, [expert]), tmp_path / "out")
    assert "e: file model-4bit.safetensors: not named by the index; ignored" in receipt["notes"]
    assert float(load(tmp_path / "out")[f"{Q}.weight"].abs().max()) < 1


def test_me02_tied_models_keep_their_names_and_size(tmp_path) -> None:
    base = weights(0, shapes=TIED_SHAPES)
    b = save(tmp_path / "base", base, tie_word_embeddings=True)
    stray = weights(1, base, shapes=TIED_SHAPES)
    one = save(
        tmp_path / "a", {**stray, HEAD: stray[EMBED].clone()}, tie_word_embeddings=True
    )  # a copy of the embedding
    receipt = merge(make_recipe(b, [one]), tmp_path / "out")
    assert set(load(tmp_path / "out")) == set(TIED_SHAPES)
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is True
    assert any("copy of the tied embedding" in n for n in receipt["notes"])


def test_me05_a_trained_head_under_a_tied_config_is_refused(tmp_path) -> None:
    base = weights(0, shapes=TIED_SHAPES)
    b = save(tmp_path / "base", base, tie_word_embeddings=True)
    e = weights(1, base, shapes=TIED_SHAPES)
    with pytest.raises(UserError, match=r"lm_head.weight differs from model.embed_tokens.weight.*throw one away"):
        plan(make_recipe(b, [save(tmp_path / "e", {**e, HEAD: e[EMBED] + 1e-3}, tie_word_embeddings=True)]))


@pytest.mark.parametrize("base_tied", [True, False])
def test_me03_one_tied_one_not_gives_an_explicit_head(tmp_path, base_tied) -> None:
    tied = weights(0, shapes=TIED_SHAPES)
    untied = weights(5)
    base, expert = (tied, untied) if base_tied else (untied, tied)
    b = save(tmp_path / "base", base, tie_word_embeddings=base_tied)
    e = save(tmp_path / "e", expert, tie_word_embeddings=not base_tied)
    merge(make_recipe(b, [e], lam=0.5), tmp_path / "out")
    got = load(tmp_path / "out")
    heads = [m.get(HEAD, m[EMBED]) for m in (base, expert)]
    torch.testing.assert_close(got[HEAD], (heads[0] + heads[1]) / 2)
    torch.testing.assert_close(got[EMBED], (base[EMBED] + expert[EMBED]) / 2)
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("module", ["lm_head", "model.embed_tokens"])
def test_me04_adapter_on_one_of_tied_embedding_and_head_leaves_the_other(tmp_path, module) -> None:
    base = weights(0, shapes=TIED_SHAPES)
    b = save(tmp_path / "base", base, tie_word_embeddings=True)
    adapter = save_adapter(tmp_path / "a", {module: 2}, {f"{module}.weight": base[EMBED]}, 1)
    merge(make_recipe(b, [adapter]), tmp_path / "out")
    got = load(tmp_path / "out")
    touched, other = (HEAD, EMBED) if module == "lm_head" else (EMBED, HEAD)
    assert torch.equal(got[other], base[EMBED])
    assert float((got[touched] - base[EMBED]).abs().max()) > 1e-3


def test_me04_one_adapter_for_both_of_a_tied_pair_is_refused(tmp_path) -> None:
    base = weights(0, shapes=TIED_SHAPES)
    b = save(tmp_path / "base", base, tie_word_embeddings=True)
    adapter = save_adapter(tmp_path / "a", {"lm_head": 2}, {HEAD: base[EMBED]}, 1, ensure_weight_tying=True)
    with pytest.raises(UserError, match="ensure_weight_tying"):
        plan(make_recipe(b, [adapter]))


def words(n: int) -> list[str]:
    return [f"w{i}" for i in range(n)]


def test_me01_rows_are_matched_by_token_text(tmp_path) -> None:
    base = weights(0)
    b = save(tmp_path / "base", base, tokens=words(24))
    order = [(7 * i) % 24 for i in range(24)]  # the expert's row i is the base's token order[i]
    straight = weights(1, base)
    moved = {n: (t[order] if n in (HEAD, EMBED) else t) for n, t in straight.items()}
    e = save(tmp_path / "e", moved, tokens=[f"w{i}" for i in order])
    receipt = merge(make_recipe(b, [e]), tmp_path / "out")
    for n, t in load(tmp_path / "out").items():
        torch.testing.assert_close(t, straight[n])
    assert any("rows moved to the base's order" in n for n in receipt["notes"])


def test_me01_added_tokens_are_refused_or_left_out_by_name(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("coterie.merging.deltas.block_values", lambda *_: 40)
    base = weights(0)
    b = save(tmp_path / "base", base, tokens=words(24))
    grown = {**SHAPES, HEAD: (27, 8), EMBED: (27, 8)}
    expert = weights(1, shapes=grown)
    e = save(tmp_path / "e", expert, tokens=[*words(20), "new", *words(24)[20:], "z1", "z2"])
    with pytest.raises(UserError, match=r"tokens the base lacks \(new, z1, z2\).*--vocab base"):
        plan(make_recipe(b, [e]))
    receipt = merge(make_recipe(b, [e], keep_base_vocab=True), tmp_path / "out")
    rows = [*range(20), *range(21, 25)]
    for name in (HEAD, EMBED):
        torch.testing.assert_close(load(tmp_path / "out")[name], expert[name][rows])
    assert any("left out: new, z1, z2" in n for n in receipt["notes"])
    # the other way round: tokens the expert lacks keep the base's rows
    merge(make_recipe(e, [b], keep_base_vocab=True), tmp_path / "back")
    got = load(tmp_path / "back")[EMBED]
    torch.testing.assert_close(got[rows], base[EMBED])
    assert torch.equal(got[[20, 25, 26]], expert[EMBED][[20, 25, 26]])


def test_me01_without_tokenizers_other_row_counts_are_refused_and_padding_is_not(tmp_path) -> None:
    base_path, base = pair(tmp_path)
    padded = {**SHAPES, HEAD: (32, 8), EMBED: (32, 8)}
    with pytest.raises(UserError, match=r"32 vocabulary rows, base 24, and no tokenizer.json"):
        plan(make_recipe(base_path, [save(tmp_path / "e", weights(1, shapes=padded))]))
    b = save(tmp_path / "b2", base, tokens=words(24))
    e = weights(1, shapes=padded)
    merge(make_recipe(b, [save(tmp_path / "e2", e, tokens=words(24))]), tmp_path / "out")
    torch.testing.assert_close(load(tmp_path / "out")[EMBED], e[EMBED][:24])


def test_buffers_are_copied_or_refused(tmp_path) -> None:
    base = {**weights(0), "model.steps": torch.arange(4)}
    b = save(tmp_path / "base", base)
    same = {**weights(1, {n: t for n, t in base.items() if n in SHAPES}), "model.steps": torch.arange(4)}
    merge(make_recipe(b, [save(tmp_path / "e", same)]), tmp_path / "out")
    assert torch.equal(load(tmp_path / "out")["model.steps"], torch.arange(4))
    with pytest.raises(CoterieError, match=r"buffer model.steps \(I64\) differs"):
        merge(make_recipe(b, [save(tmp_path / "x", {**same, "model.steps": torch.ones(4).long()})]), tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


def test_values_that_are_not_finite_are_named(tmp_path) -> None:
    base_path, base = pair(tmp_path)
    e = weights(1, base)
    e[f"{Q}.weight"][3, 3] = float("inf")
    with pytest.raises(CoterieError, match=f"expert e: tensor {Q}.weight holds values that are not finite"):
        merge(make_recipe(base_path, [save(tmp_path / "e", e)]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_labels_are_the_shortest_distinct_names() -> None:
    assert label_paths([Path("r/math"), Path("r/code")]) == ["math", "code"]
    assert label_paths([Path("a/final"), Path("b/final")]) == ["a/final", "b/final"]
    assert label_paths([Path("a/x"), Path("a/x")]) == ["x#1", "x#2"]
