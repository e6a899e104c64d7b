"""Chunked log-probs against the full logits written out."""

from __future__ import annotations

import math

import pytest
import torch

from coterie import lmhead


@pytest.mark.parametrize("block", [1, 4, 17, 100])
@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("bias", [False, True])
def test_blocks_equal_full_logits(chunk: int, bias: bool, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    N, D, V = 10, 6, 17
    monkeypatch.setattr(lmhead, "CHUNK_ELEMENTS", chunk * min(block, V))
    monkeypatch.setattr(lmhead, "CPU_BLOCK", block)
    make = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=make, requires_grad=True)
    weight = torch.randn(V, D, generator=make, requires_grad=True)
    b = torch.randn(V, generator=make, requires_grad=True) if bias else None
    targets = torch.randint(0, V, (N,), generator=make)
    temperature = torch.linspace(0.5, 1.5, N)
    upstream = torch.randn(N, generator=make).double()

    leaves = [x for x in (hidden, weight, b) if x is not None]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    logits = exact[0] @ exact[1].T + (exact[2] if bias else 0)
    logp = torch.log_softmax(logits / temperature[:, None], -1)  # [N, V]
    want = logp.gather(1, targets[:, None]).squeeze(1)
    want_grads = torch.autograd.grad((want * upstream).sum(), exact)

    got, entropy, sum_sq = lmhead.token_logprobs(hidden, weight, b, targets, temperature)
    grads = torch.autograd.grad((got * upstream.float()).sum(), leaves)
    assert torch.allclose(got.double(), want, atol=1e-5)
    assert torch.allclose(entropy.double(), -(logp.exp() * logp).sum(-1), atol=1e-5)
    assert torch.allclose(sum_sq.double(), (logp.exp() ** 2).sum(-1), atol=1e-5)
    for have, expect in zip(grads, want_grads, strict=True):
        assert float((have.double() - expect).norm() / expect.norm()) < 1e-5


def test_two_tokens_by_hand() -> None:
    """Logits (0, ln 3): p = (1/4, 3/4); d log p(1) = (-1/4, 1/4)."""
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[0.0], [math.log(3)]])
    one = torch.tensor([1.0])
    logprob, entropy, sum_sq = lmhead.token_logprobs(hidden, weight, None, torch.tensor([1]), one)
    logprob.sum().backward()
    assert logprob.item() == pytest.approx(math.log(0.75), abs=1e-6)
    assert entropy.item() == pytest.approx(0.25 * math.log(4) + 0.75 * math.log(4 / 3), abs=1e-6)
    assert sum_sq.item() == pytest.approx(10 / 16, abs=1e-6)
    assert hidden.grad is not None and hidden.grad.item() == pytest.approx(0.25 * math.log(3), abs=1e-6)


def test_logits_never_exceed_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    true = lmhead._logits

    def spy(*args: torch.Tensor) -> torch.Tensor:
        logits = true(*args)
        seen.append(logits.numel())
        return logits

    monkeypatch.setattr(lmhead, "_logits", spy)
    monkeypatch.setattr(lmhead, "CHUNK_ELEMENTS", 64)
    monkeypatch.setattr(lmhead, "CPU_BLOCK", 8)
    hidden = torch.randn(52, 4, requires_grad=True)
    out = lmhead.token_logprobs(hidden, torch.randn(16, 4), None, torch.zeros(52, dtype=torch.long), torch.ones(52))
    out[0].sum().backward()
    assert max(seen) <= 64 and sum(seen) == 2 * 52 * 16


def test_later_micro_batches_add_to_the_gradient_that_is_there() -> None:
    torch.manual_seed(0)
    weight = torch.randn(50, 8, requires_grad=True)
    parts = [(torch.randn(n, 8), torch.randint(50, (n,)), torch.full((n,), 0.7)) for n in (3, 5, 4)]
    held = []
    for hidden, targets, temperature in parts:
        lmhead.token_logprobs(hidden, weight, None, targets, temperature)[0].sum().backward()
        held.append(weight.grad)
    assert held[0] is held[2]
    whole = torch.cat([torch.log_softmax(h @ weight.T / t[:, None], -1)[range(len(y)), y] for h, y, t in parts])
    torch.testing.assert_close(held[2], torch.autograd.grad(whole.sum(), weight)[0])
