"""bfloat16 compute over float32 weights: the same update, at that type's precision."""

from __future__ import annotations

import pytest
import torch
from batch_kit import double, gradients, naive_stats, relative_error
from engine_models import tiny_model
from test_update_layouts import loss_of, mixed_batch
from test_update_step import NoTokenizer

from coterie.policy import Policy


@pytest.mark.parametrize("kind", ["llama", "llama-bias", "qwen3", "gpt2"])
def test_bf16_compute_stays_near_float32(kind: str) -> None:
    model = tiny_model(kind).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5 if p.dim() > 1 else 1.0)  # the other tests' weights are too sharp for 8 bits of mantissa
    batch = mixed_batch()
    exact = double(model)
    want = naive_stats(exact, batch)[0]
    loss_of(want, batch).backward()
    policy = Policy(model, NoTokenizer(), dtype=torch.bfloat16)
    got = policy.logprobs(batch).logprobs
    policy.backward(loss_of(got, batch))
    assert got.dtype == torch.float32 and all(
        p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters()
    )
    assert (got.double() - want)[batch.loss_mask].abs().mean().item() < 0.05
    assert relative_error(gradients(model), gradients(exact)) < 0.1
    assert policy.step(1e-3).skipped is None
