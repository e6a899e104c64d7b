"""Inputs of projections are computed again in the backward pass: less memory, the same gradients to the last bit."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from batch_kit import group, trajectory
from torch import nn
from torch.profiler import ProfilerActivity, profile

from coterie import trunk
from coterie.batching import collate
from coterie.config import ModelConfig, OptimConfig, Recompute
from coterie.cpu_linear import even_rows
from coterie.forward import Forward, _probe_batch
from coterie.policy import Policy
from coterie.recompute import Again, not_kept


def _gradients(rank: int, checkpoint: Recompute = "none", dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    policy = Policy.load(
        ModelConfig(name="tiny", lora_rank=rank), optim=OptimConfig(activation_checkpointing=checkpoint)
    )
    policy.dtype = dtype or policy.dtype
    batch = _probe_batch(60, torch.device("cpu"))
    policy.backward(policy.logprobs(batch).logprobs.square().sum())
    return {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("rank", [0, 4])
def test_gradients_are_the_same_bits_with_everything_kept(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    less = _gradients(rank)

    @contextmanager
    def kept(*_: object):  # type: ignore[no-untyped-def]
        yield

    monkeypatch.setattr(trunk, "not_kept", kept)
    for name, grad in _gradients(rank).items():
        assert torch.equal(less[name], grad), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpoint", ["mlp", "layer"])
@pytest.mark.parametrize("rank", [0, 4])
def test_gradients_are_the_same_bits_whatever_is_computed_again(
    rank: int, checkpoint: Recompute, dtype: torch.dtype
) -> None:
    less = _gradients(rank, checkpoint, dtype)
    assert less
    for name, grad in _gradients(rank, "none", dtype).items():
        assert torch.equal(less[name], grad), name


def test_values_of_one_function_are_made_together_and_each_is_dropped_after_its_last_use() -> None:
    a, b, c = nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(4, 3)
    x = torch.randn(6, 5, requires_grad=True)
    calls: list[int] = []

    def make() -> tuple[torch.Tensor, ...]:
        calls.append(1)
        h = x.detach().exp()
        return h, a(h)

    again = Again(make, "cpu")
    h = x.exp()
    with again.instead_of(h):
        half = a(h)
    with again.instead_of(half):
        parts = b(half).sum(), c(half).sum()
    sum(parts).backward(retain_graph=True)
    assert (len(calls), again._made) == (1, {})
    parts[0].backward(retain_graph=True)
    assert set(again._made) == {1}  # for c, which did not come
    sum(parts).backward()
    want = torch.autograd.grad(3 * b(a(x.exp())).sum() + 2 * c(a(x.exp())).sum(), x)[0]
    torch.testing.assert_close(x.grad, want)


def test_a_value_is_made_again_once_for_all_its_uses_and_each_backward_pass() -> None:
    a, b = nn.Linear(5, 4), nn.Linear(5, 3)
    x = torch.randn(6, 5, requires_grad=True)
    calls = []

    def make() -> torch.Tensor:
        calls.append(1)
        return x.detach().exp()

    h = x.exp()
    with not_kept(h, make):
        loss = a(h).sum() + b(h).sum()
    assert not calls
    for _ in range(2):
        loss.backward(retain_graph=True)
    assert len(calls) == 2
    want = torch.autograd.grad(a(x.exp()).sum() + b(x.exp()).sum(), x)[0]
    torch.testing.assert_close(x.grad, 2 * want)


def test_the_value_is_gone_after_the_forward_pass_and_nothing_lives_on_after_the_backward_pass() -> None:
    a = nn.Linear(5, 4)
    x = torch.randn(6, 5, requires_grad=True)
    h = x * 2
    with not_kept(h, lambda: x.detach() * 2):
        out = torch.sigmoid(a(h))  # keeps its own output
    loss = out.sum()
    seen, kept = weakref.ref(h), weakref.ref(out)
    gc.disable()
    try:
        del h
        assert seen() is None
        loss.backward()
        del out, loss
        assert kept() is None
    finally:
        gc.enable()


def test_each_kind_of_recomputation_keeps_less() -> None:
    policy = Policy.load(ModelConfig(name="tiny"))
    prompt, answers = list(range(2, 12)), [list(range(20, 60)) for _ in range(8)]
    batch = collate([group("a", *(trajectory(prompt, answer) for answer in answers))], [[1.0] * 8], "me")
    forward = Forward(policy.causal_lm)
    forward(batch)  # layouts are verified

    def kept(checkpoint: Any) -> int:
        """Bytes a forward pass leaves allocated."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            stats = forward(batch, checkpoint=checkpoint)
        assert stats.logprobs.requires_grad
        return sum(e.self_cpu_memory_usage for e in seen.key_averages())

    none, mlp, layer = kept("none"), kept("mlp"), kept("layer")
    assert mlp < 0.75 * none
    assert layer < 0.5 * mlp


def test_products_of_an_update_come_in_few_sizes() -> None:
    sizes = {even_rows(torch.empty(n, 1)) for n in range(1, 4097)}
    assert len(sizes) < 130
    for n in range(1, 4097):
        rows = even_rows(torch.empty(n, 1))
        assert n <= rows <= max(n + 3, 1.07 * n)
