"""Every layout gives the numbers of the plain forward pass: log-probs, entropy, loss and gradients."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch
import torch.nn.functional as F
from batch_kit import C, H, P, advantages_for, double, gradients, group, naive_stats, relative_error, trajectory
from engine_models import tiny_model
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

from coterie import attention, trunk
from coterie import rectangles as cutting
from coterie.attention import BlockSparse, ByRectangles
from coterie.batching import Batch, collate, micro_batches
from coterie.config import ModelConfig, Recompute
from coterie.forward import Forward
from coterie.models_io import add_lora
from coterie.packing import Packed, pack
from coterie.rectangles import rectangles
from coterie.trainer import layout_metrics

LAYOUT = {
    "llama": "packed",
    "llama-bias": "packed",
    "qwen2": "packed",
    "qwen3": "packed",
    "mistral": "packed",
    "mistral-window": "padded",
    "gpt2": "tree",
}


def mixed_batch() -> Batch:
    """Two prompts in one group, an empty response, a response of EOS alone, helper and context tokens, two temperatures."""
    plain, tagged = [5, 9, 30, 8], [5, 9, 30, 8, 40, 41]
    first = group(
        "a",
        trajectory(plain, [7, 8, 9, 1]),
        trajectory(plain, [1]),
        trajectory(tagged, [7, 50, 51, 52, 8, 1], [P, C, H, H, P, P]),
        trajectory(plain, []),
        trajectory(tagged, [33, 34]),
        trajectory(plain, [7, 8, 20, 21, 22, 23, 24], [P, P, P, P, P, C, C]),
    )
    second = group("b", *(trajectory([2, 3], r, temperature=0.6) for r in ([4, 5, 6], [4, 5, 6, 7, 8, 9, 10, 11, 1])))
    third = group("c", trajectory([], [12, 13, 14]), trajectory(plain, [15, 1]))
    groups = [first, second, third]
    return collate(groups, advantages_for(groups), "me")


def loss_of(logprobs: torch.Tensor, batch: Batch) -> torch.Tensor:
    return -(logprobs * batch.advantages).sum() / batch.normalizers.policy


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", LAYOUT)
def test_layout_equals_rows_alone(kind: str, lora: bool) -> None:
    model = tiny_model(kind).eval()
    if lora:
        if kind == "gpt2":
            pytest.skip("its projections are not nn.Linear")
        wrapped = add_lora(model, ModelConfig(lora_rank=3, lora_alpha=7.0), seed=1)
        for name, p in wrapped.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, 0, 0.1)
        model = wrapped.get_base_model()
    batch = mixed_batch()
    exact = double(model)
    want = naive_stats(exact, batch)
    loss_of(want[0], batch).backward()

    got = Forward(model)(batch)
    loss_of(got.logprobs, batch).backward()
    assert got.layout == LAYOUT[kind]
    for have, expect in zip((got.logprobs, got.entropy, got.sum_sq), want, strict=True):
        assert torch.allclose(have.double(), expect, rtol=1e-5, atol=2e-5)
    assert abs((loss_of(got.logprobs, batch) - loss_of(want[0], batch)).item()) < 1e-5
    assert relative_error(gradients(model), gradients(exact)) < 1e-5


@pytest.mark.parametrize("layout", ["packed", "tree", "padded"])
def test_all_layouts_of_one_model_agree(layout: str) -> None:
    model = tiny_model("llama").eval()
    batch = mixed_batch()
    exact = double(model)
    loss_of(naive_stats(exact, batch)[0], batch).backward()
    forward = Forward(model)
    forward.verify(batch.device)
    got = forward._stats(batch, pack(batch), layout, "none")
    loss_of(got.logprobs, batch).backward()
    assert relative_error(gradients(model), gradients(exact)) < 1e-5


def dense_scores(q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask, scale: float, enable_gqa: bool) -> Tensor:
    """What FlexAttention computes; it has no backward pass on a CPU."""
    N = q.shape[2]
    seen = create_mask(block_mask.mask_mod, None, None, N, N, device="cpu")
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)


@pytest.mark.parametrize("checkpoint", ["none", "mlp", "layer"])
@pytest.mark.parametrize("kind", [k for k, layout in LAYOUT.items() if layout == "packed"])
def test_one_mask_over_all_tokens_as_on_a_gpu_gives_the_same_numbers(
    kind: str, checkpoint: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []

    def block_sparse(packed: Packed, *_: object) -> BlockSparse:
        used.append(packed.tokens)
        return BlockSparse(packed)

    monkeypatch.setattr(trunk, "attention_over", block_sparse)
    monkeypatch.setattr(attention, "_flex", lambda: dense_scores)
    model = tiny_model(kind).eval()
    exact = double(model)
    for batch in (mixed_batch(), of_lengths((140, [30, 2]), (4, [13, 12, 2]), (5, [11]))):  # more than one tile
        want = naive_stats(exact, batch)
        loss_of(want[0], batch).backward()
        got = Forward(model)(batch, checkpoint=checkpoint)
        loss_of(got.logprobs, batch).backward()
        assert got.layout == "packed" and used[-1] == got.tokens
        assert torch.allclose(got.logprobs.double(), want[0], rtol=1e-5, atol=2e-5)
        assert relative_error(gradients(model), gradients(exact)) < 1e-5


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_sees_what_the_mask_says_and_leaves_blocks_out() -> None:
    """The library's own code, without its compiler: forward only."""
    packed = pack(of_lengths((300, [200, 190, 150]), (20, [130])))
    kind = BlockSparse(packed)
    want = create_block_mask(kind.mask.mask_mod, None, None, kind.rows, kind.rows, device="cpu")
    for have, expect in zip(kind.mask.as_tuple(), want.as_tuple(), strict=True):
        assert callable(have) or (torch.equal(have, expect) if isinstance(have, Tensor) else have == expect)
    assert kind.mask.sparsity() > 40  # per cent; causal attention over as many tiles leaves less out
    q, k, v = (torch.randn(1, heads, kind.rows, 16) for heads in (4, 2, 2))
    got = flex_attention(q, k, v, block_mask=kind.mask, scale=0.3, enable_gqa=True)
    assert torch.allclose(got, dense_scores(q, k, v, block_mask=kind.mask, scale=0.3, enable_gqa=True), atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch compiles it for a CPU with g++")
@torch.no_grad()
def test_compiled_flex_attention_agrees_and_is_not_compiled_again_for_every_size() -> None:
    """For a CPU the library compiles the forward pass only."""
    counters.clear()
    for prompt, answers in (
        (40, [20, 10]),
        (200, [100, 90]),
        (300, [400]),
        (500, [700]),
        (900, [600]),
        (1000, [800, 300]),
    ):
        kind = BlockSparse(pack(of_lengths((prompt, answers))))
        q, k, v = (torch.randn(1, heads, kind.rows, 16) for heads in (4, 2, 2))
        got, want = (
            flex(q, k, v, block_mask=kind.mask, scale=0.3, enable_gqa=True)
            for flex in (attention._flex(), dense_scores)
        )
        assert torch.allclose(got, want, atol=1e-5)
    assert counters["stats"]["unique_graphs"] <= 2  # the first size, then one for all sizes


def test_where_flex_attention_does_not_run_dense_rectangles_are_used_and_that_is_said() -> None:
    attention.flex_runs.cache_clear()
    with pytest.warns(UserWarning, match=r"FlexAttention does not run here \(.*backward on CPU.*\); dense rectangles"):
        assert not attention.flex_runs("cpu")
    attention.flex_runs.cache_clear()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral-window"])
def test_activation_checkpointing_changes_nothing(kind: str) -> None:
    model = tiny_model(kind).eval()
    batch = mixed_batch()
    forward = Forward(model)
    grads = []
    for what in ("none", "mlp", "layer"):
        model.zero_grad()
        loss = loss_of(forward(batch, checkpoint=what).logprobs, batch)
        loss.backward()
        grads.append(gradients(model))
        assert not model.training and not model.is_activation_checkpointing  # RO-13: generation never sees it
    assert relative_error(grads[1], grads[0]) < 1e-6
    assert relative_error(grads[2], grads[0]) < 1e-6


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("padding", [None, 5])
def test_gradients_of_the_vocabulary_add_up_over_micro_batches(padding: int | None, tied: bool) -> None:
    """The library gives a padding id no gradient as an input, also where prompts hold it; as an output it has one."""
    model = tiny_model("llama").eval()
    if not tied:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.model.embed_tokens.padding_idx = padding
    batch = mixed_batch()
    exact = double(model)
    for _ in range(2):
        loss_of(naive_stats(exact, batch)[0], batch).backward()
    forward = Forward(model)
    for _ in range(2):
        for part in micro_batches(batch, 25):
            got = forward(part)
            assert got.layout == "packed"
            loss_of(got.logprobs, part).backward()
    assert exact.model.embed_tokens.weight.grad[7].abs().sum() > 0
    assert relative_error(gradients(model), gradients(exact)) < 1e-5


def test_a_table_that_is_more_than_a_table_is_left_to_the_library() -> None:
    model = tiny_model("llama").eval()
    forward = Forward(model)
    forward(mixed_batch())
    seen = []
    model.model.embed_tokens.register_forward_hook(lambda *_: seen.append(1))
    assert forward(mixed_batch()).layout == "packed"
    assert seen


def test_hooks_on_the_vocabulary_see_every_gradient() -> None:
    model = tiny_model("llama").eval()
    batch = mixed_batch()
    exact = double(model)
    for m in (model, exact):
        m.model.embed_tokens.weight.register_hook(lambda g: g * 0.5)
    forward = Forward(model)
    for _ in range(2):
        loss_of(naive_stats(exact, batch)[0], batch).backward()
        loss_of(forward(batch).logprobs, batch).backward()
    assert relative_error(gradients(model), gradients(exact)) < 1e-5


def test_whether_flex_attention_runs_does_not_depend_on_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first to ask is the check of the layouts, which needs no gradients."""
    monkeypatch.setattr(attention, "_flex", lambda: F.scaled_dot_product_attention)
    attention.flex_runs.cache_clear()
    with torch.no_grad():
        assert attention.flex_runs("cpu")
    attention.flex_runs.cache_clear()


def test_prompt_is_computed_once_and_the_last_token_never() -> None:
    prompt = list(range(2, 12))
    batch = collate([group("a", *(trajectory(prompt, [20 + i, 30, 1]) for i in range(4)))], [[1.0] * 4], "me")
    assert pack(batch).tokens == len(prompt) + 4 * 2
    assert Forward(tiny_model("llama").eval())(batch).tokens == 18


def test_window_models_stay_padded_only_where_the_window_bites() -> None:
    forward = Forward(tiny_model("mistral-window").eval())
    short = collate([group("a", trajectory([2, 3], [4, 1]), trajectory([2, 3], [5, 6, 1]))], [[1.0, -1.0]], "me")
    assert forward(short).layout == "packed"
    assert forward(mixed_batch()).layout == "padded"


@pytest.mark.parametrize(("prompt", "answer", "want"), [(60, 4, "tree"), (2, 60, "padded")])
def test_long_answers_to_a_short_prompt_are_not_worth_a_dense_tree(prompt: int, answer: int, want: str) -> None:
    """A model without the packed layout: one dense mask over all answers against one row each, by cost, and equal either way."""
    model = tiny_model("gpt2").eval()
    ids = [2 + i % 50 for i in range(prompt)]
    rows = [trajectory(ids, [2 + (7 * k + i) % 50 for i in range(answer)]) for k in range(8)]
    batch = collate([group("a", *rows)], [[1.0, -1.0] * 4], "me")
    got = Forward(model)(batch)
    assert got.layout == want
    assert torch.allclose(got.logprobs.double(), naive_stats(double(model), batch)[0], rtol=1e-5, atol=2e-5)
    dense = batch.input_ids.numel() if want == "tree" else prompt + 8 * answer
    assert layout_metrics([(got.layout, got.tokens)])[f"update/layout/{want}"] == 1.0
    assert (got.tokens < dense) == (want == "tree")


def of_lengths(*groups: tuple[int, list[int]]) -> Batch:
    """Groups of one prompt each, given its length and those of the answers."""
    made = []
    for g, (prompt, answers) in enumerate(groups):
        rows = [trajectory([2 + (g + i) % 50 for i in range(prompt)], [3 + (k + i) % 40 for i in range(n)])
                for k, n in enumerate(answers)]  # fmt: skip
        made.append(group(str(g), *rows))
    return collate(made, advantages_for(made), "me")


def one_rectangle(packed: Packed) -> Packed:
    """The same tokens with all responses in one rectangle."""
    cut = rectangles([packed.prompts], [packed.responses], packed.prompt_of)
    return dataclasses.replace(packed, rectangles=cut)


def test_short_answers_to_a_long_prompt_take_no_room_beside_long_answers_to_a_short_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = of_lengths((1000, [10] * 8), (10, [1000] * 8))
    packed = pack(batch)
    alone = 1000 * 1000 + 10 * 10 + 8 * 9 * (1000 + 9) + 8 * 999 * (10 + 999)  # rows; the last token is left out
    assert one_cut(packed, monkeypatch) == alone
    assert packed.cells < 0.65 * alone
    padded = batch.input_ids.numel() * batch.input_ids.shape[1]
    assert alone < 0.6 * padded < 1.2 * padded < one_cut(one_rectangle(packed), monkeypatch)


@pytest.mark.parametrize(("queries", "call", "mask"), [(4, 8192, 1 << 21), (256, 0, 1 << 21), (3, 8192, 0)])
def test_any_cut_into_rectangles_and_blocks_gives_the_same_numbers(
    queries: int, call: int, mask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("QUERIES", queries), ("CALL_CELLS", call), ("MASK_CELLS", mask)):
        monkeypatch.setattr(cutting, name, value)
    model = tiny_model("llama").eval()
    exact = double(model)
    batch = of_lengths((14, [3, 2]), (4, [13, 12, 2]), (5, [11]))
    cuts = [len(r.blocks) for r in pack(batch).rectangles]
    assert max(cuts) > 3 if queries < 256 else len(cuts) > 4
    want = naive_stats(exact, batch)
    loss_of(want[0], batch).backward()
    got = Forward(model)(batch)
    assert got.layout == "packed"
    loss_of(got.logprobs, batch).backward()
    assert torch.allclose(got.logprobs.double(), want[0], rtol=1e-5, atol=2e-5)
    assert relative_error(gradients(model), gradients(exact)) < 1e-5


def test_masks_of_long_answers_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 answers of 2048 tokens to a prompt of 256 with 3 query heads a key head: a whole mask would take 453 MB."""
    packed = pack(of_lengths((256, [2049] * 8)))
    masks = [m for of_rectangle in ByRectangles(packed, 3, packed.tokens).masks for m in of_rectangle]
    held = {m.untyped_storage().data_ptr(): m.untyped_storage().nbytes() for m in masks}
    assert sum(held.values()) < 10e6
    assert packed.cells < 0.62 * one_cut(packed, monkeypatch)


def one_cut(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> int:
    """Cells without blocks of queries."""
    with monkeypatch.context() as m:
        m.setattr(cutting, "QUERIES", 1 << 30)
        return packed.cells


def test_the_shipped_family_takes_the_cheaper_layout() -> None:
    forward = Forward(tiny_model("llama").eval())
    forward.verify(torch.device("cpu"))
    batch = of_lengths((200, [2]), (2, [200]))
    packed = pack(batch)
    assert forward.layout(batch, packed) == "packed"
    assert forward.layout(batch, one_rectangle(packed)) == "padded"


def test_a_model_whose_head_is_not_plain_uses_its_own_logits() -> None:
    model = tiny_model("llama").eval()

    class Capped(type(model)):  # type: ignore[misc]
        def forward(self, *args, **kw):  # type: ignore[no-untyped-def]
            out = super().forward(*args, **kw)
            out.logits = 3.0 * torch.tanh(out.logits / 3.0)
            return out

    model.__class__ = Capped
    batch = mixed_batch()
    exact = double(model)
    want = naive_stats(exact, batch)
    loss_of(want[0], batch).backward()
    forward = Forward(model)
    got = forward(batch)
    loss_of(got.logprobs, batch).backward()
    assert got.layout == "padded" and forward._width == 0  # nothing is asked of a config that no choice depends on
    assert torch.allclose(got.logprobs.double(), want[0], atol=2e-5)
    assert relative_error(gradients(model), gradients(exact)) < 1e-5


def test_ob12_temperature_reaches_the_logprobs() -> None:
    forward = Forward(tiny_model("llama").eval())
    batch = mixed_batch()
    hot = dataclasses.replace(batch, temperature=torch.full_like(batch.temperature, 2.0))
    want = naive_stats(double(forward.model), hot)[0]
    assert torch.allclose(forward(hot).logprobs.double(), want, atol=1e-5)
    assert not torch.allclose(forward(hot).logprobs, forward(batch).logprobs, atol=1e-2)
