"""The written folder: loads unchanged in transformers and peft, honours dtypes, survives kills, fits memory."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from merge_kit import adapter_delta, load, save, save_adapter, weights
from typer.testing import CliRunner

from coterie.errors import UserError
from coterie.merging.merge import merge
from coterie.merging.recipe import make_recipe
from coterie.merging.writer import OutputFolder, ShardWriter, Slot

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def tiny_llama(seed: int, around=None, tied: bool = False):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
                         vocab_size=40, tie_word_embeddings=tied)  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    if around is not None:
        model.load_state_dict(around.state_dict())
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.01 * torch.randn_like(p))
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_output_loads_in_transformers_unchanged(tmp_path, tied) -> None:
    from transformers import AutoModelForCausalLM

    base = tiny_llama(0, tied=tied)
    experts = [tiny_llama(k, base, tied) for k in (1, 2)]
    base.save_pretrained(tmp_path / "base")
    for k, e in enumerate(experts):
        e.save_pretrained(tmp_path / f"e{k}", max_shard_size="10KB" if k else "1GB")
    merge(make_recipe(tmp_path / "base", [tmp_path / "e0", tmp_path / "e1"]), tmp_path / "out", shard_bytes=8000)
    assert (tmp_path / "out/model.safetensors.index.json").is_file()
    got, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    want = tiny_llama(0, tied=tied)
    with torch.no_grad():
        for p, b, x, y in zip(*(m.parameters() for m in (want, base, *experts)), strict=True):
            p.copy_(x + y - b)
    ids = torch.arange(12).view(1, -1)
    torch.testing.assert_close(got(ids).logits, want(ids).logits, atol=1e-5, rtol=0)
    saved = tmp_path / "saved"
    got.save_pretrained(saved)
    assert set(load(saved)) == set(load(tmp_path / "out"))  # ME-02, ME-13: the names transformers itself would write
    assert (tmp_path / "out/generation_config.json").is_file()


def test_me05_an_untied_result_reloads_with_its_own_head(tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    base, expert = tiny_llama(0, tied=True), tiny_llama(1)
    base.save_pretrained(tmp_path / "base")
    expert.save_pretrained(tmp_path / "e")
    merge(make_recipe(tmp_path / "base", [tmp_path / "e"]), tmp_path / "out")
    got = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(12).view(1, -1)
    torch.testing.assert_close(got(ids).logits, expert(ids).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("targets", [["q_proj", "up_proj"], ["q_proj", "embed_tokens"]])
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`", "ignore:.*is_gradient_checkpointing")
def test_lora_agrees_with_peft_merged_and_concatenated(tmp_path, targets) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    base = tiny_llama(0)
    base.save_pretrained(tmp_path / "base")
    ids = torch.arange(12).view(1, -1)
    deltas = []
    for k in (1, 2):
        config = LoraConfig(r=k + 1, lora_alpha=5, target_modules=targets, use_rslora=k == 2, init_lora_weights=False)
        torch.manual_seed(k)
        model = get_peft_model(tiny_llama(0), config)
        model.save_pretrained(tmp_path / f"a{k}")
        merged = model.merge_and_unload()
        deltas.append(
            {n: p - q for (n, p), q in zip(merged.state_dict().items(), base.state_dict().values(), strict=True)}
        )
    adapters = [tmp_path / "a1", tmp_path / "a2"]
    merge(make_recipe(tmp_path / "base", adapters, weights=[0.5, -0.25]), tmp_path / "out")
    want = {n: p + 0.5 * deltas[0][n] - 0.25 * deltas[1][n] for n, p in base.state_dict().items()}
    for n, t in load(tmp_path / "out").items():
        torch.testing.assert_close(t, want[n], atol=1e-5, rtol=0)
    merge(make_recipe(tmp_path / "base", adapters, "lora_concat", weights=[0.5, -0.25]), tmp_path / "cat")
    joined = PeftModel.from_pretrained(tiny_llama(0), tmp_path / "cat")
    expected = tiny_llama(0)
    expected.load_state_dict(want)
    torch.testing.assert_close(joined(ids).logits, expected(ids).logits, atol=1e-4, rtol=0)


def test_me10_compute_and_output_dtype_are_both_honoured(tmp_path) -> None:
    base = weights(0)
    expert = weights(1, base, scale=1e-4)
    b16 = save(tmp_path / "b16", {n: t.bfloat16() for n, t in base.items()})
    e32 = save(tmp_path / "e32", expert)
    merge(make_recipe(b16, [e32]), tmp_path / "same")
    assert {t.dtype for t in load(tmp_path / "same").values()} == {torch.bfloat16}
    merge(make_recipe(b16, [e32], dtype="float32"), tmp_path / "wide")
    for n, t in load(
        tmp_path / "wide"
    ).items():  # ME-09: the delta is formed in fp32, so the fp32 expert comes back whole
        torch.testing.assert_close(t, expert[n], atol=1e-7, rtol=0)
    assert json.loads((tmp_path / "wide/config.json").read_text())["dtype"] == "float32"
    big = save(tmp_path / "big", {n: t.double() + 1e4 for n, t in base.items()})
    up = save(tmp_path / "up", {n: t.double() + 1e4 + 1e-6 for n, t in base.items()})
    merge(make_recipe(big, [up], compute_dtype="float64"), tmp_path / "d")
    merge(make_recipe(big, [up]), tmp_path / "f")
    exact = {n: load(tmp_path / "d")[n] - load(up)[n] for n in base}
    assert max(float(t.abs().max()) for t in exact.values()) < 1e-11
    assert max(float((load(tmp_path / "f")[n] - load(up)[n]).abs().max()) for n in base) > 1e-7


def test_a_mean_is_not_silently_written_in_16_bits_and_the_loss_is_stated(tmp_path) -> None:
    base = {n: t.bfloat16() for n, t in weights(0).items()}
    b = save(tmp_path / "base", base)
    experts = [
        save(tmp_path / f"e{k}", weights(k, {n: t.float() for n, t in base.items()}, scale=1e-5)) for k in (1, 2, 3, 4)
    ]
    with pytest.raises(UserError, match=r"mean of 4 experts written as bfloat16.*--dtype float32"):
        merge(make_recipe(b, experts, "mean"), tmp_path / "out")
    receipt = merge(make_recipe(b, experts, "mean", allow_rounded_mean=True), tmp_path / "out")
    got, loss = load(tmp_path / "out"), receipt["rounding"]["all"]
    intended = {n: sum(load(e)[n].double() - base[n].double() for e in experts) / 4 for n in base}
    real = {n: got[n].double() - base[n].double() for n in base}
    dot = sum(float((intended[n] * real[n]).sum()) for n in base)
    sizes = [sum(float((d[n] ** 2).sum()) for n in base) for d in (intended, real)]
    assert loss["cosine"] == pytest.approx(dot / (sizes[0] * sizes[1]) ** 0.5, rel=1e-4)
    assert loss["energy_kept"] == pytest.approx(sizes[1] / sizes[0], rel=1e-4)
    assert loss["cosine"] < 0.9 and any(
        w.startswith("rounding: the written update has cosine") for w in receipt["warnings"]
    )
    assert (
        merge(make_recipe(b, experts, "mean", dtype="float32"), tmp_path / "f32")["rounding"]["all"]["cosine"]
        > 0.999999
    )


def test_receipt_states_hashes_norms_and_formula(tmp_path) -> None:
    base = weights(0)
    expert = weights(1, base)
    b, e = save(tmp_path / "base", base), save(tmp_path / "math", expert, shards=2)
    receipt = merge(make_recipe(b, [e], "ties", lam=0.5), tmp_path / "out", command="coterie merge ...")
    assert json.loads((tmp_path / "out/merge_receipt.json").read_text()) == receipt
    for file, digest in receipt["input_sha256"].items():
        assert hashlib.sha256(Path(file).read_bytes()).hexdigest() == digest
    assert len(receipt["input_sha256"]) == 3
    for file, digest in receipt["output_sha256"].items():
        assert hashlib.sha256((tmp_path / "out" / file).read_bytes()).hexdigest() == digest
    norm = sum(float(((expert[n] - base[n]).double() ** 2).sum()) for n in base) ** 0.5
    assert receipt["norms"]["all"]["deltas"]["math"] == pytest.approx(norm, rel=1e-6)
    q = sum(float(((expert[n] - base[n]).double() ** 2).sum()) for n in base if "q_proj" in n) ** 0.5
    assert receipt["norms"]["per_module_type"]["self_attn.q_proj"]["deltas"]["math"] == pytest.approx(q, rel=1e-6)
    assert "ranked over all values" in receipt["recipe"]["formula"] and receipt["recipe"]["density"] == 0.2
    assert receipt["sparsification"]["share_kept"]["math"] == pytest.approx(0.2, abs=0.002)
    card = (tmp_path / "out/README.md").read_text()
    assert "`coterie merge ...`" in card and "| math | 1 |" in card


def test_what_config_and_tokenizer_need_is_copied_and_the_rest_is_named(tmp_path) -> None:
    base = weights(0)
    b, e = save(tmp_path / "base", base), save(tmp_path / "e", weights(1, base))
    needed = ["modeling_own.py", "configuration_own.py", "tokenization_own.py", "vocab.txt", "spiece.model", "tokenizer.model",
              "sentencepiece.bpe.model", "additional_chat_templates/tools.jinja", "chat_template.jinja", "qwen.tiktoken",
              "generation_config.json", "video_preprocessor_config.json", "special_tokens_map.json", "LICENSE"]  # fmt: skip
    replaced = ["README.md", "pytorch_model.bin", "pytorch_model.bin.index.json", ".gitattributes"]
    for name in (*needed, *replaced, "figure.png", "original/params.json", "eval.csv"):
        (b / name).parent.mkdir(exist_ok=True)
        (b / name).write_text(name)
    receipt = merge(make_recipe(b, [e]), tmp_path / "out")
    assert receipt["tokenizer_and_settings"]["files"] == sorted(needed)
    assert all((tmp_path / "out" / name).read_text() == name for name in needed)
    assert [w for w in receipt["warnings"] if "not copied" in w] == [
        "not copied from the base, as it is not known to belong to config or tokenizer: eval.csv, figure.png, original/"
    ]
    assert receipt["warnings"] == json.loads((tmp_path / "out/merge_receipt.json").read_text())["warnings"]
    made = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert made == {*needed, "config.json", "model.safetensors", "README.md", "merge_receipt.json"}
    config = json.loads((b / "config.json").read_text())  # as for a model whose code lies in its folder
    assert json.loads((tmp_path / "out/config.json").read_text()) == config


def test_experts_that_are_no_children_of_the_base_are_pointed_out(tmp_path) -> None:
    b = save(tmp_path / "base", weights(0))
    receipt = merge(make_recipe(b, [save(tmp_path / "stranger", weights(99))]), tmp_path / "out")
    assert any("stranger: its delta is 1." in w and "trained from this base?" in w for w in receipt["warnings"])


KILLED = """
import sys, time
from coterie.merging.merge import merge
from coterie.merging.recipe import make_recipe
def slow(done, total):
    print(done / total, flush=True)
    time.sleep(0.02)
merge(make_recipe(sys.argv[1], [sys.argv[2]]), sys.argv[3], chunk_mib=1, shard_bytes=200_000, progress=slow)
"""


def test_a_merge_killed_midway_leaves_nothing_that_looks_valid(tmp_path) -> None:
    shapes = {f"model.layers.{i}.mlp.up_proj.weight": (250, 200) for i in range(16)}
    base = weights(0, shapes=shapes)
    b, e = save(tmp_path / "base", base), save(tmp_path / "e", weights(1, base, shapes=shapes))
    out = tmp_path / "out"
    for share in (0.1, 0.6):
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, b, e, out], stdout=subprocess.PIPE, text=True, env=ENV
        ) as process:
            assert process.stdout is not None
            while float(process.stdout.readline()) < share:
                pass
            os.kill(process.pid, signal.SIGKILL)
        assert not out.exists()
        left = [p for p in tmp_path.rglob("*") if p.is_file() and ".out.partial" in str(p)]
        assert any(p.name.endswith(".safetensors.partial") for p in left)  # it was really in the middle of writing
        assert not any(p.name.endswith((".safetensors", ".json")) for p in left)
    merge(make_recipe(b, [e]), out)  # the remains are swept away, the lock of the dead does not hold
    assert not list(tmp_path.glob(".out.partial*"))
    torch.testing.assert_close(load(out), load(e))


def test_existing_output_is_never_overwritten_and_failure_leaves_nothing(tmp_path) -> None:
    b = save(tmp_path / "base", weights(0))
    (tmp_path / "out").mkdir()
    (tmp_path / "out/precious").write_text("x")
    with pytest.raises(UserError, match="nothing is overwritten"):
        merge(make_recipe(b, [b]), tmp_path / "out")
    with pytest.raises(RuntimeError, match="power"), OutputFolder(tmp_path / "new") as folder:
        (folder.path / "config.json").write_text("{}")
        raise RuntimeError("power")
    assert not (tmp_path / "new").exists() and not list(tmp_path.glob(".new*"))
    with (
        OutputFolder(tmp_path / "twice"),
        pytest.raises(UserError, match="another process"),
        OutputFolder(tmp_path / "twice"),
    ):
        pass


FULL = """
import resource, sys
from coterie.errors import CoterieError
from coterie.merging.merge import merge
from coterie.merging.recipe import make_recipe
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # writes beyond this fail, as on a full disk
try:
    merge(make_recipe(sys.argv[1], [sys.argv[1]]), sys.argv[2])
except CoterieError as e:
    print(e)
"""


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(tmp_path) -> None:
    b = save(tmp_path / "base", weights(0, shapes={"w.weight": (300, 200)}))
    done = subprocess.run(
        [sys.executable, "-c", FULL, b, tmp_path / "out"], capture_output=True, text=True, check=True, env=ENV
    )
    assert f"cannot write {tmp_path / 'out'}" in done.stdout and "free some space" in done.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base"]


def test_writer_files_are_what_safetensors_reads(tmp_path) -> None:
    tensors = {"b": torch.randn(5, 3, dtype=torch.float64), "a": torch.randn(7), "c": torch.randn(3, 3).bfloat16(),
               "e": torch.zeros(0, 4), "d": torch.tensor([True, False])}  # fmt: skip
    codes = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.bool: "BOOL"}
    order = sorted(tensors, key=lambda n: (-tensors[n].element_size(), n))
    for limit in (10**9, 60):
        folder = tmp_path / str(limit)
        folder.mkdir()
        writer = ShardWriter(folder, [Slot(n, codes[tensors[n].dtype], tuple(tensors[n].shape)) for n in order], limit)
        for n in order:
            for row in tensors[n].split(2):
                if row.numel():
                    writer.write(n, row)
        writer.close()
        for f in folder.glob("*.partial"):
            f.rename(f.with_suffix(""))
        got = load(folder)
        assert set(got) == set(tensors) and all(torch.equal(got[n], tensors[n]) for n in tensors)


PEAK = """
import re, sys, torch
torch.set_num_threads(1)
from coterie.merging.merge import merge
from coterie.merging.recipe import make_recipe
from coterie.merging.update import Update
def read(what):
    return int(re.search(what + r":\\s+(\\d+) kB", open("/proc/self/status").read()).group(1)) / 1024
def merged(folder):
    merge(make_recipe(f"{folder}/0", [f"{folder}/1", f"{folder}/2"], sys.argv[3]), f"{folder}/{sys.argv[3]}{hold}", chunk_mib=8)
hold, kept, real = sys.argv[4] == "hold", [], Update.__call__
merged(sys.argv[1])  # everything that the first merge of a process loads or keeps
if hold:
    def call(self, block):
        found = real(self, block)
        kept.extend([found.clone()] if len(kept) % 2 == 0 else [None])
        return found
    Update.__call__ = call
open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew from what is resident now
before = read("VmHWM")
merged(sys.argv[2])
print(read("VmHWM") - before)
"""


def growth_mib(small: Path, large: Path, method: str, how: str) -> float:
    args = [sys.executable, "-c", PEAK, small, large, method, how]
    return float(subprocess.run(args, capture_output=True, text=True, check=True, env=ENV).stdout)


@pytest.mark.parametrize("method", ["sum", pytest.param("ties", marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_model(tmp_path, method) -> None:
    """Peak of a merge of 32 MB models over what a process holds after one of 4 MB. Holding half of the update would show."""
    for name, rows in (("small", 4_000), ("large", 32_000)):  # one tensor is half of the model
        shapes = {
            "model.embed_tokens.weight": (rows, 256),
            **{f"model.layers.{i}.w.weight": (rows // 8, 256) for i in range(8)},
        }
        g = torch.Generator().manual_seed(0)
        for k in range(3):
            t = {n: torch.randn(s, generator=g).bfloat16() * (0.01 if k == 0 else 0.011) for n, s in shapes.items()}
            save(tmp_path / name / str(k), t)
    small, large = tmp_path / "small", tmp_path / "large"
    streamed, held = growth_mib(small, large, method, ""), growth_mib(small, large, method, "hold")
    assert streamed < 10 < 30 < held, (streamed, held)


def run(*args: object):
    import typer

    from coterie.merging.cli import register

    app = typer.Typer()
    register(app)
    return CliRunner().invoke(app, [str(a) for a in args])


def test_cli_merge_dry_run_json_and_usage_errors(tmp_path) -> None:
    base = weights(0)
    b = save(tmp_path / "base", base)
    e = save(tmp_path / "e", weights(1, base))
    a = save_adapter(tmp_path / "a", {"model.layers.0.self_attn.q_proj": 2}, base, 1)
    dry = run("merge", b, e, a, "--lambda", 0.6, "--out", tmp_path / "out", "--dry-run", "--json")
    planned = json.loads(dry.stdout)
    assert planned["recipe"]["lambda"] == 0.6 and planned["tensors"] == 7 and not (tmp_path / "out").exists()
    done = run("merge", b, e, a, "--weights", "1,0.5", "--method", "ties", "--out", tmp_path / "out")
    assert done.exit_code == 0 and "written:" in done.stdout, done.output
    assert json.loads((tmp_path / "out/merge_receipt.json").read_text())["recipe"]["experts"][1]["weight"] == 1.0
    for bad, words in [
        (["--method", "nope"], "choose one of"),
        (["--weights", "1,x"], "numbers separated"),
        (["--vocab", "x"], "same or base"),
    ]:
        failed = run("merge", b, e, a, *bad, "--out", tmp_path / "o2")
        assert (
            isinstance(failed.exception, UserError)
            and words in str(failed.exception)
            and failed.exception.exit_code == 2
        )
    assert "Example: coterie merge" in run("merge", "--help").output


def test_a_long_merge_shows_its_progress_on_stderr(tmp_path, monkeypatch) -> None:
    base = weights(0)
    b, e = save(tmp_path / "base", base), save(tmp_path / "e", weights(1, base))
    monkeypatch.setattr("coterie.merging.cli.EVERY", 0.0)
    done = run("merge", b, e, "--out", tmp_path / "out", "--json")
    lines, values = done.stderr.splitlines(), sum(t.numel() for t in base.values())
    assert lines[-1] == f"merge: 100% of {values:,} values" and lines[0] == f"merge: 27% of {values:,} values"
    assert json.loads(done.stdout)["output_bytes"] == 4 * values
    monkeypatch.setattr("coterie.merging.cli.EVERY", 60.0)
    assert run("merge", b, e, "--out", tmp_path / "out2").stderr == ""


def test_importing_the_commands_loads_no_torch() -> None:
    code = "import sys, coterie.merging.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=ENV, check=False).returncode == 0


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
def test_me06_peft_cat_agrees_and_peft_linear_has_cross_terms(tmp_path) -> None:
    from peft import LoraConfig, get_peft_model

    base = tiny_llama(0)
    base.save_pretrained(tmp_path / "base")
    model = get_peft_model(
        tiny_llama(0), LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj"], init_lora_weights=False), "one"
    )
    model.add_adapter("two", LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path / "peft")
    adapters = [tmp_path / "peft/one", tmp_path / "peft/two"]
    module = "model.layers.0.self_attn.q_proj"
    exact = adapter_delta(adapters[0], module, 2) + adapter_delta(adapters[1], module, 2)
    merge(make_recipe(tmp_path / "base", adapters, "lora_concat"), tmp_path / "out")
    ours = adapter_delta(tmp_path / "out", module, 4)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    model.add_weighted_adapter(["one", "two"], [1.0, 1.0], "joined", combination_type="cat")
    model.add_weighted_adapter(["one", "two"], [1.0, 1.0], "mixed", combination_type="linear")
    cat, linear = (layer.get_delta_weight(n).detach().double().numpy() for n in ("joined", "mixed"))
    size = float((exact**2).sum()) ** 0.5
    assert float(((ours - exact) ** 2).sum()) ** 0.5 < 1e-6 * size
    assert float(((cat - exact) ** 2).sum()) ** 0.5 < 1e-6 * size
    assert float(((linear - exact) ** 2).sum()) ** 0.5 > 0.5 * size  # the documented disagreement


PROGRAM = Path(os.environ.get("COTERIE_BENCH_ENV", ".venv-bench")).absolute() / "bin" / "mergekit-yaml"


@pytest.mark.slow
@pytest.mark.skipif(not PROGRAM.is_file(), reason="mergekit is not installed in .venv-bench (or COTERIE_BENCH_ENV)")
def test_mergekit_agrees_where_formulas_do_and_differs_where_documented(tmp_path) -> None:
    from coterie.bench.merge import agreement

    found = agreement(PROGRAM, tmp_path)
    assert found["sum_largest_difference"] < 1e-7
    assert found["ties_tensor_largest_difference"] < 1e-7
    assert found["ties_global_against_per_tensor_largest_difference"] > 1e-4
    assert found["dare_factor_ours"] == [4.0, 4.0]
    low, high = found["dare_factor_mergekit"]
    assert low < 4.0 < high


def test_cli_interference_prints_writes_and_refuses_to_overwrite(tmp_path) -> None:
    base = weights(0)
    b = save(tmp_path / "base", base)
    e = [save(tmp_path / n, weights(k, base)) for k, n in ((1, "math"), (2, "logic"))]
    dry = json.loads(run("interference", b, *e, "--dry-run", "--json").stdout)
    assert dry["experts"] == ["logic", "math"] and dry["values"] == sum(t.numel() for t in base.values())
    printed = json.loads(run("interference", b, *e, "--top-k", 2, "--json").stdout)
    assert printed["all"]["pairs"][0]["experts"] == ["logic", "math"] and len(printed["subspaces"]["matrices"]) == 4
    shown = run("interference", b, *e, "--top-k", 0, "--out", tmp_path / "out")
    assert shown.exit_code == 0 and "Weights alone never show that a merge is safe" in shown.stdout, shown.output
    verdict = (
        "verdict: logic and math: not enough data; missing: scores of each on the other's tasks and resolved gradients"
    )
    assert verdict in shown.stdout and verdict[9:60] in (tmp_path / "out/interference.html").read_text()
    assert (tmp_path / "out/interference.html").is_file() and (tmp_path / "out/interference.json").is_file()
    again = run("interference", b, *e, "--out", tmp_path / "out")
    assert isinstance(again.exception, UserError) and "holds a report already" in str(again.exception)
    assert "Example: coterie interference" in run("interference", "--help").output


SMALL_BENCH = """
import json, sys
from coterie.bench.merge import run
if __name__ == "__main__":
    print(json.dumps(run(millions=0.5, repeats=1, env="/nowhere")))
"""


@pytest.mark.slow
def test_bench_runs_without_mergekit_and_says_so(tmp_path) -> None:
    (tmp_path / "bench.py").write_text(SMALL_BENCH)
    done = subprocess.run([sys.executable, tmp_path / "bench.py"], capture_output=True, text=True, check=True, env=ENV)
    found = json.loads(done.stdout)
    assert "mergekit-yaml is not there" in found["mergekit_missing"] and "ratios" not in found
    assert set(found["arms"]) == {"sum", "ties_tensor", "ties_global"}
    assert all(arm["wall_s"] > 0 and arm["peak_mib"] > 50 for arm in found["arms"].values())


def test_what_the_gram_pass_is_compared_with_converts_every_value_once(tmp_path) -> None:
    from coterie.bench.merge import models, read_and_convert
    from coterie.merging.inputs import open_inputs

    base, experts = models(tmp_path / "in", 0.5, "bfloat16")
    inputs = open_inputs(base, make_recipe(base, experts).experts)
    values = sum(t.numel() for t in load(base).values())
    assert read_and_convert(inputs, 1000) == read_and_convert(inputs, 1 << 17) == 5 * values


@pytest.mark.slow
def test_the_gram_pass_runs_at_the_rate_of_reading_and_converting(tmp_path) -> None:
    from coterie.bench.merge import gram_rate, models

    found = gram_rate(*models(tmp_path / "in", 50, "bfloat16"), 5)
    assert found["rate_share_on_one_core"] >= 0.6, found
