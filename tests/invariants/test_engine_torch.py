"""What sampling promises, for the reference decoder and the fast one alike."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_models import EOS, PROMPTS, VOCABULARY, CharEncoder, TinyPolicy, tiny_policy
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from coterie.engines import compiled
from coterie.engines.compiled import CompiledDecoder, pack
from coterie.engines.llama import LlamaDecoder
from coterie.engines.reference import ReferenceDecoder
from coterie.engines.torch import TorchEngine
from coterie.engines.weights import lay_out, version, why_not
from coterie.errors import CoterieError, UserError
from coterie.types import Sample, Sampling, StopReason

FAST = ["llama", "llama-bias", "qwen2", "qwen3", "mistral"]
SLOW = ["mistral-window", "gpt2"]
SEEDS = [11, 12, 13, 14]
Samples = dict[tuple[int, int], Sample]


def generate(
    policy: TinyPolicy,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    n: int | Sequence[int] = 5,
    sampling: Sampling = Sampling(20),  # noqa: B008
    seeds: Sequence[int] = SEEDS,
    **options: Any,
) -> Samples:
    engine = TorchEngine(policy, **options)
    return {(i, j): s for i, j, s in engine.generate(prompts, n, sampling, seeds)}


def same(a: Samples, b: Samples) -> bool:
    return a.keys() == b.keys() and all(
        a[k].token_ids.tolist() == b[k].token_ids.tolist()
        and a[k].stop_reason == b[k].stop_reason
        and np.allclose(a[k].logprobs, b[k].logprobs, atol=1e-5)
        for k in a
    )


@torch.no_grad()
def rescored(policy: TinyPolicy, prompt: Sequence[int], sample: Sample, temperature: float = 1.0) -> np.ndarray:
    """Log-probs of the sample by the model's own forward pass, unpadded, without cache."""
    policy.model.eval()
    ids = torch.tensor([*prompt, *sample.token_ids.tolist()])  # [T]
    logits = policy.model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]  # [t, V]
    logprobs = (logits / temperature).log_softmax(-1)  # [t, V]
    return logprobs.gather(-1, ids[len(prompt) :, None])[:, 0].numpy()


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize("kind", FAST + SLOW)
def test_sampling_agrees_with_rescoring(kind: str, reference: bool) -> None:
    policy = tiny_policy(kind)
    assert (why_not(policy.model) is None) == (kind in FAST)
    for temperature in (1.0, 0.7):
        out = generate(policy, sampling=Sampling(20, temperature=temperature), reference=reference)
        assert len(out) == 20
        for (i, _), sample in out.items():
            assert len(sample.token_ids) == len(sample.logprobs)
            expected = rescored(policy, PROMPTS[i], sample, temperature)
            np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)


@torch.no_grad()
def test_ro02_sampling_agrees_with_padded_rescoring() -> None:
    for kind in ("llama", "gpt2"):
        policy = tiny_policy(kind)
        out = generate(policy)
        policy.model.eval()
        rows = [[*PROMPTS[i], *s.token_ids.tolist()] for (i, _), s in out.items()]
        ids = torch.full((len(rows), max(map(len, rows))), EOS)
        mask = torch.zeros_like(ids)
        for r, row in enumerate(rows):
            ids[r, : len(row)] = torch.tensor(row)
            mask[r, : len(row)] = 1
        logprobs = policy.model(input_ids=ids, attention_mask=mask, use_cache=False).logits.log_softmax(-1)
        for r, ((i, _), sample) in enumerate(out.items()):
            p = len(PROMPTS[i])
            expected = [float(logprobs[r, p - 1 + t, token]) for t, token in enumerate(sample.token_ids)]
            np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("in_kernels", [True, False])
@pytest.mark.parametrize("kind", FAST)
def test_fast_decoders_give_the_logits_of_the_reference(kind: str, in_kernels: bool) -> None:
    """Step by step, through rows leaving (in and out of order) and prompts leaving."""
    policy = tiny_policy(kind)
    weights = lay_out(policy.model, torch.float32)
    fast: Any = CompiledDecoder(pack(weights)) if in_kernels else LlamaDecoder(weights)
    slow: Any = ReferenceDecoder(policy.model, policy.device, torch.float32)
    owner = [0] * 8 + [1] * 8 + [2] * 8 + [3] * 8  # in order, a multiple of the row bucket: the straight path
    torch.testing.assert_close(fast.prefill(PROMPTS, owner, 12), slow.prefill(PROMPTS, owner, 12), atol=2e-5, rtol=0)
    assert in_kernels or fast.in_order
    generator = torch.Generator().manual_seed(0)
    orders: dict[int, list[int]] = {
        2: [*range(5), 31, *range(6, 31)],
        4: [0, 30, 2, 3, *range(4, 26)],
        6: [9, 1, 8, 20, 3],  # most rows gone: the buffers shrink
        8: [4, 1],  # prompts gone
        9: [1],
    }
    rows = len(owner)
    for step in range(11):
        if step in orders:
            fast.keep(orders[step])
            slow.keep(orders[step])
            rows = len(orders[step])
        tokens = torch.randint(0, VOCABULARY, (rows,), generator=generator)
        torch.testing.assert_close(fast.step(tokens), slow.step(tokens), atol=2e-5, rtol=0)
    if not in_kernels:
        assert fast.own_kv[0].shape[1] == 8
        assert len(fast.prompt_length) == 1


@pytest.mark.parametrize("in_kernels", [True, False])
@pytest.mark.parametrize("n", [[7, 1], [4, 4], [1, 7], [8, 0], [15, 1]])
def test_unequal_numbers_of_rows_per_prompt(n: list[int], in_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in slot order, yet fewer rows than slots: what is left of two prompts after most rows ended."""
    monkeypatch.setattr("coterie.engines.torch.packable", lambda weights: in_kernels)
    policy = tiny_policy("llama")
    fast = generate(policy, PROMPTS[:2], n=n, seeds=SEEDS[:2])
    assert same(fast, generate(policy, PROMPTS[:2], n=n, seeds=SEEDS[:2], reference=True))


@pytest.mark.parametrize("kind", [*FAST, "gpt2"])
def test_ro12_results_do_not_depend_on_batch_order_or_neighbours(kind: str) -> None:
    policy = tiny_policy(kind)
    together = generate(policy)
    assert same(together, generate(policy, token_budget=60))  # many small waves
    assert same(together, generate(policy, token_budget=1))  # every row alone
    if kind in FAST:
        assert same(together, generate(policy, reference=True))
    back = generate(policy, PROMPTS[::-1], seeds=SEEDS[::-1])
    assert same(together, {(3 - i, j): s for (i, j), s in back.items()})
    alone = generate(policy, PROMPTS[2:3], n=2, seeds=SEEDS[2:3])
    assert same({(0, j): together[2, j] for j in range(2)}, alone)
    texts = {tuple(s.token_ids.tolist()) for (i, _), s in together.items() if i == 2}
    assert len(texts) == 5  # and no two samples are copies


def test_ro12_to_the_last_bit_at_real_sizes() -> None:
    """Grouped heads of a real width, prompts on both sides of the length at which kernels cut their sums."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 6, "num_key_value_heads": 2}
    config = LlamaConfig(
        **sizes, head_dim=64, vocab_size=4099, num_hidden_layers=2, max_position_embeddings=512, initializer_range=0.2
    )
    policy = TinyPolicy(LlamaForCausalLM(config), CharEncoder())
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, 4099, (n,), generator=generator).tolist() for n in (400, 215, 30, 7)]
    together = generate(policy, prompts, n=[3, 1, 4, 2], sampling=Sampling(9))
    alone = generate(policy, prompts, n=[3, 1, 4, 2], sampling=Sampling(9), token_budget=1)
    for key, sample in together.items():
        assert sample.token_ids.tolist() == alone[key].token_ids.tolist()
        np.testing.assert_allclose(sample.logprobs, alone[key].logprobs, atol=1e-4)
        assert np.array_equal(sample.logprobs, alone[key].logprobs)
    for (i, _), sample in together.items():
        np.testing.assert_allclose(sample.logprobs, rescored(policy, prompts[i], sample), atol=1e-4)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(7, 1, 20), (5, 5, 6), (6, 2, 48)])
def test_widths_that_are_no_multiple_of_a_vector(heads: int, kv_heads: int, head_dim: int) -> None:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 6 * heads,
        "intermediate_size": 50,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
    config = LlamaConfig(**sizes, head_dim=head_dim, vocab_size=71, num_hidden_layers=2, initializer_range=0.3)
    policy = TinyPolicy(LlamaForCausalLM(config), CharEncoder(71))
    prompts = [list(range(2, 2 + n)) for n in (1, 16, 17, 40)]
    for (i, _), sample in generate(policy, prompts, n=3, sampling=Sampling(35)).items():
        np.testing.assert_allclose(sample.logprobs, rescored(policy, prompts[i], sample), atol=1e-4)


def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_SHARE", 1.0)  # however little work
    parts: list[int] = []
    step = CompiledDecoder._step
    monkeypatch.setattr(CompiledDecoder, "_step", lambda self, *a: (parts.append(a[-1]), step(self, *a))[1])
    policy = tiny_policy("qwen3")
    before = torch.get_num_threads()
    out = {}
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            out[threads] = generate(policy, n=9)
    finally:
        torch.set_num_threads(before)
    assert set(parts) == {0, 1, 2}
    for key, sample in out[1].items():
        assert sample.token_ids.tolist() == out[3][key].token_ids.tolist()
        assert np.array_equal(sample.logprobs, out[3][key].logprobs)


def test_equal_prompts_are_prefilled_once_and_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy("llama")
    seen: list[int] = []
    prefill = CompiledDecoder.prefill
    monkeypatch.setattr(CompiledDecoder, "prefill", lambda self, p, *a: (seen.append(len(p)), prefill(self, p, *a))[1])
    out = generate(policy, [PROMPTS[0], PROMPTS[1], PROMPTS[0]], n=[3, 2, 1], seeds=[1, 2, 3])
    assert seen == [2]
    assert sorted(out) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0)]
    assert out[0, 0].token_ids.tolist() != out[2, 0].token_ids.tolist()
    assert not generate(policy, n=0)
    assert not generate(policy, [], seeds=[])


def test_waves_stay_in_the_token_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy("llama")
    held: list[int] = []
    prefill = CompiledDecoder.prefill

    def watch(self: CompiledDecoder, prompts: Any, owner: Any, new: int) -> Any:
        held.append(len(prompts) * max(map(len, prompts)) + len(owner) * new)
        return prefill(self, prompts, owner, new)

    monkeypatch.setattr(CompiledDecoder, "prefill", watch)
    out = generate(policy, token_budget=130)
    assert len(out) == 20
    assert len(held) > 2
    assert max(held) <= 130


@pytest.mark.parametrize("reference", [True, False])
def test_ro03_the_checkpoints_generation_config_is_not_consulted(reference: bool) -> None:
    policy = tiny_policy("llama")
    plain = generate(policy, reference=reference)
    g = policy.model.generation_config
    g.repetition_penalty, g.top_k, g.top_p, g.temperature, g.do_sample, g.max_new_tokens = 1.9, 1, 0.1, 0.1, True, 2
    assert same(plain, generate(policy, reference=reference))


@pytest.mark.parametrize("reference", [True, False])
def test_ro07_truncated_rows_hold_exactly_what_was_sampled(reference: bool) -> None:
    policy = tiny_policy("llama")
    policy.encoder = CharEncoder(eos=VOCABULARY + 1)  # never sampled
    for sample in generate(policy, sampling=Sampling(8), reference=reference).values():
        assert (len(sample.token_ids), sample.stop_reason) == (8, StopReason.LENGTH)


def test_ro01_eos_is_kept_with_its_logprob_though_pad_equals_eos() -> None:
    policy = tiny_policy("llama")
    ended = [s for s in generate(policy, sampling=Sampling(60)).values() if s.stop_reason is StopReason.EOS]
    assert ended
    for sample in ended:
        assert sample.token_ids[-1] == EOS
        assert EOS not in sample.token_ids[:-1]
        assert len(sample.token_ids) == len(sample.logprobs)


def test_ro16_eos_first_is_a_sample_of_one_token() -> None:
    policy = tiny_policy("llama")
    everything = frozenset(range(VOCABULARY))
    policy.encoder.eos_ids = everything
    for sample in generate(policy).values():
        assert (len(sample.token_ids), sample.stop_reason) == (1, StopReason.EOS)


@pytest.mark.parametrize("reference", [True, False])
def test_ro08_stop_strings_cut_after_the_completing_token(reference: bool) -> None:
    policy = tiny_policy("llama")
    free = generate(policy, sampling=Sampling(60), reference=reference)
    whole = policy.encoder.decode(free[2, 3].token_ids)
    stop = whole[5:7]
    out = generate(policy, sampling=Sampling(60, stop=(stop, "never")), reference=reference)
    stopped = 0
    for key, sample in out.items():
        text = policy.encoder.decode(free[key].token_ids)
        end = text.find(stop) + 2
        if end >= 2:
            stopped += 1
            assert (sample.stop_reason, sample.stop_string) == (StopReason.STOP, stop)
            assert sample.token_ids.tolist() == free[key].token_ids[:end].tolist()
            assert len(sample.logprobs) == end
        else:
            assert same({key: sample}, {key: free[key]})
    assert stopped


def test_ro13_modes_and_checkpointing_stay_as_they_were() -> None:
    for reference in (True, False):
        policy = tiny_policy("llama")
        policy.model.eval()
        expected = generate(policy, reference=reference)
        policy.model.train()
        policy.model.model.layers[0].eval()
        model = policy.model
        getattr(model, "activation_checkpointing_enable", getattr(model, "gradient_checkpointing_enable", None))()
        before = {name: m.training for name, m in policy.model.named_modules()}
        rows = TorchEngine(policy, reference=reference).generate(PROMPTS, 5, Sampling(20), SEEDS)
        first = next(rows)
        assert {name: m.training for name, m in policy.model.named_modules()} == before  # between rows, too
        assert not torch.is_inference_mode_enabled()
        assert same(expected, {(i, j): s for i, j, s in [first, *rows]})
        assert {name: m.training for name, m in policy.model.named_modules()} == before
        assert policy.model.model.layers[0].gradient_checkpointing


def _lora(policy: TinyPolicy, **options: Any) -> TinyPolicy:
    torch.manual_seed(3)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.3, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by a deprecated name
        model = get_peft_model(policy.model, config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.2)
    return TinyPolicy(model, policy.encoder)


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"lora_bias": True}, {"use_dora": True}])
def test_lora_is_folded_in_and_can_be_switched_off(options: dict[str, Any]) -> None:
    plain = generate(tiny_policy("llama-bias"))
    policy = _lora(tiny_policy("llama-bias"), **options)
    assert (why_not(policy.model) is None) == ("use_dora" not in options)
    engine = TorchEngine(policy)
    out = {(i, j): s for i, j, s in engine.generate(PROMPTS, 5, Sampling(20), SEEDS)}
    assert not same(out, plain)
    assert same(out, generate(policy, reference=True))
    for (i, _), sample in out.items():
        np.testing.assert_allclose(sample.logprobs, rescored(policy, PROMPTS[i], sample), atol=1e-4)
    with policy.model.disable_adapter():
        off = {(i, j): s for i, j, s in engine.generate(PROMPTS, 5, Sampling(20), SEEDS)}
    assert same(off, plain)


def test_new_weights_are_noticed() -> None:
    policy = tiny_policy("llama")
    engine = TorchEngine(policy)
    before = {(i, j): s for i, j, s in engine.generate(PROMPTS, 5, Sampling(20), SEEDS)}
    laid_out = engine._laid_out
    again = {(i, j): s for i, j, s in engine.generate(PROMPTS, 5, Sampling(20), SEEDS)}
    assert same(before, again)
    assert engine._laid_out is laid_out  # same weights: not copied again
    old = version(policy.model)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=0.05, fused=True)
    policy.model(input_ids=torch.tensor([PROMPTS[2]])).logits.logsumexp(-1).sum().backward()
    optimizer.step()
    assert version(policy.model) != old
    after = {(i, j): s for i, j, s in engine.generate(PROMPTS, 5, Sampling(20), SEEDS)}
    assert same(after, generate(policy, reference=True))
    assert not same(after, before)
    engine.release()
    assert engine._laid_out is None


def test_bfloat16_products_agree_with_the_reference() -> None:
    policy = replace(tiny_policy("qwen3"), dtype=torch.bfloat16)
    fast = LlamaDecoder(lay_out(policy.model, torch.bfloat16))
    slow = ReferenceDecoder(policy.model, policy.device, torch.bfloat16)
    exact = ReferenceDecoder(policy.model, policy.device, torch.float32)
    owner = [0, 1, 2, 3]
    tokens = torch.tensor([3, 4, 5, 6])
    for got, near, truth in [
        (fast.prefill(PROMPTS, owner, 4), slow.prefill(PROMPTS, owner, 4), exact.prefill(PROMPTS, owner, 4)),
        (fast.step(tokens), slow.step(tokens), exact.step(tokens)),
    ]:
        noise = (near.float() - truth).abs().mean()
        assert float((got.float() - truth).abs().mean()) < 1.5 * float(noise)


def test_greedy_is_the_models_own_choice() -> None:
    policy = tiny_policy("llama")
    out = generate(policy, n=1, sampling=Sampling(10, temperature=0.0))
    policy.model.eval()
    for (i, _), sample in out.items():
        ids = list(PROMPTS[i])
        for token in sample.token_ids:
            assert int(policy.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()) == token
            ids.append(int(token))


def test_too_long_for_the_model_is_refused() -> None:
    policy = tiny_policy("gpt2")
    with pytest.raises(UserError, match="context of 128"):
        generate(policy, [[5] * 100], seeds=[0], sampling=Sampling(29))
    assert generate(policy, [[5] * 100], n=1, seeds=[0], sampling=Sampling(28))


@pytest.mark.parametrize("reference", [True, False])
def test_logits_that_are_not_finite_are_an_error(reference: bool) -> None:
    policy = tiny_policy("llama")
    with torch.no_grad():
        policy.model.model.norm.weight[3] = torch.nan
    with pytest.raises(CoterieError, match="not finite"):
        generate(policy, reference=reference)
