"""Optimiser steps: what skips them, and that saving and loading continues them bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from batch_kit import advantages_for, double, naive_stats, random_groups
from engine_models import tiny_model
from test_update_batches import loss_of

from coterie.batching import Batch, collate
from coterie.config import ModelConfig, OptimConfig
from coterie.errors import CoterieError, UserError
from coterie.models_io import add_lora
from coterie.policy import Policy


class NoTokenizer:
    """Enough of a tokenizer for a policy that is only trained."""

    eos_token_id, pad_token_id, bos_token_id, chat_template = 1, 1, None, None
    all_special_ids = (1,)

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "<eos>": 1}


def policy(lora: bool = False, seed: int = 0, **optim: float) -> Policy:
    model = tiny_model("llama").eval()
    if lora:
        model = add_lora(model, ModelConfig(lora_rank=2), seed)
    return Policy(model, NoTokenizer(), optim=OptimConfig(**optim), start=lambda: tiny_model("llama").eval())


def batch(seed: int) -> Batch:
    groups = random_groups(seed)
    return collate(groups, advantages_for(groups, seed), "me")


def train(p: Policy, steps: range) -> None:
    for i in steps:
        part = batch(i)
        p.backward(loss_of(p.logprobs(part).logprobs, part))
        assert p.step(1e-2).skipped is None


def snapshot(p: Policy) -> dict[str, torch.Tensor]:
    state = {f"w.{k}": v for k, v in p.weights().items()} | p.optimizer_state()
    return {k: v.clone() for k, v in state.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_saved_and_loaded_training_continues_bit_for_bit(lora: bool) -> None:
    through = policy(lora)
    train(through, range(2))
    weights = {k: v.clone() for k, v in through.weights().items()}
    state = {k: v.clone() for k, v in through.optimizer_state().items()}
    train(through, range(2, 4))

    resumed = policy(lora, seed=9)  # another start: everything must come from what was saved
    resumed.load_weights(weights)
    resumed.load_optimizer_state(state)
    train(resumed, range(2, 4))
    assert same(snapshot(through), snapshot(resumed))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_ob21_non_finite_loss_or_gradient_skips_the_step(poison: float) -> None:
    p = policy()
    train(p, range(1))
    before = snapshot(p)
    part = batch(1)
    good = loss_of(p.logprobs(part).logprobs, part)
    p.backward(good)
    p.backward(p.logprobs(part).logprobs.sum() * poison)
    result = p.step(1e-2)
    assert result.skipped is not None and "loss" in result.skipped
    assert same(before, snapshot(p))

    p.backward(_poisoned_gradient(p.logprobs(part).logprobs.sum(), poison))
    result = p.step(1e-2)
    assert result.skipped is not None and "gradient" in result.skipped
    assert same(before, snapshot(p))
    assert all(w.grad is None for w in p.model.parameters())
    train(p, range(1, 2))  # and goes on from there
    assert not same(before, snapshot(p))


def _poisoned_gradient(loss: torch.Tensor, poison: float) -> torch.Tensor:
    loss.register_hook(lambda g: g * poison)
    return loss * 1.0


def test_ob10_a_step_without_gradient_is_named_not_taken() -> None:
    p = policy(weight_decay=0.1)
    before = snapshot(p)
    empty = collate([], [], "me")
    p.backward(p.logprobs(empty).logprobs.sum())
    assert p.step(1e-2).skipped == "nothing to train on"
    assert same(before, snapshot(p))


def test_gradient_is_clipped_and_the_norm_reported_before() -> None:
    p = policy(grad_clip=0.5)
    part = batch(0)
    p.backward(100 * loss_of(p.logprobs(part).logprobs, part))
    want = sum(float(w.grad.double().square().sum()) for w in p.model.parameters() if w.grad is not None) ** 0.5
    result = p.step(0.0)
    assert result.grad_norm == pytest.approx(want, rel=1e-4) and want > 0.5
    first = sum(float(v.double().square().sum()) for k, v in p.optimizer_state().items() if k.startswith("exp_avg."))
    assert first**0.5 == pytest.approx(0.1 * 0.5, rel=1e-3)  # (1 - beta1) times the clipped gradient


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_reference_is_the_start_model(lora: bool) -> None:
    p = policy(lora)
    part = batch(5)
    start = naive_stats(double(tiny_model("llama")), part)[0]
    train(p, range(3))
    assert torch.allclose(p.reference_logprobs(part).double(), start, atol=2e-5)
    assert not torch.allclose(p.logprobs(part).logprobs.detach().double(), start, atol=1e-2)


def test_lora_start_depends_on_the_seed_alone() -> None:
    torch.manual_seed(123)
    a = policy(lora=True, seed=4)
    torch.manual_seed(321)
    b, c = policy(lora=True, seed=4), policy(lora=True, seed=5)
    assert same(a.weights(), b.weights()) and not same(a.weights(), c.weights())
    assert all("lora_" in name for name in a.weights())


@pytest.mark.parametrize("targets", ["lm_head", "q_proj,embed_tokens"])
def test_me04_adapters_on_tied_ends_are_refused(targets: str) -> None:
    with pytest.raises(UserError, match="lora_targets"):
        add_lora(tiny_model("llama"), ModelConfig(lora_rank=2, lora_targets=targets), 0)


def test_unknown_lora_target_names_the_linear_modules() -> None:
    with pytest.raises(UserError, match=r"'qproj'.*q_proj"):
        add_lora(tiny_model("llama"), ModelConfig(lora_rank=2, lora_targets="qproj"), 0)


def test_loading_foreign_weights_is_refused_and_changes_nothing() -> None:
    p = policy()
    before = snapshot(p)
    weights = {k: v.clone() for k, v in p.weights().items()}
    name = next(iter(weights))
    for bad in (
        {k: v for k, v in weights.items() if k != name},
        weights | {"other.weight": torch.zeros(2)},
        weights | {name: torch.zeros(3, 3)},
    ):
        with pytest.raises(CoterieError, match="weights:"):
            p.load_weights(bad)
    with pytest.raises(CoterieError, match="optimiser state"):
        p.load_optimizer_state({"step.nobody": torch.zeros(())})
    assert same(before, snapshot(p))


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_saved_folder_reloads_to_the_same_logits(lora: bool, tmp_path) -> None:  # type: ignore[no-untyped-def]
    from transformers import AutoModelForCausalLM

    p = policy(lora)
    train(p, range(2))
    p.tokenizer.save_pretrained = lambda folder: None  # a real tokenizer is not needed here
    before = snapshot(p)
    p.save_pretrained(tmp_path)
    back = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        assert torch.allclose(back(ids).logits, copy.deepcopy(p.model)(ids).logits, atol=1e-4)
    assert same(before, snapshot(p))
