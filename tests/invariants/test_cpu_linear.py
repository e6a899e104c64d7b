"""oneDNN's products against PyTorch's own in float64, for every layer the update sends there."""

from __future__ import annotations

import pytest
import torch
from engine_models import tiny_model
from torch import nn

from coterie import cpu_linear
from coterie.config import ModelConfig
from coterie.models_io import add_lora


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return float((got.double() - want).detach().norm() / want.detach().norm()) < 1e-5


@pytest.mark.parametrize("views", ["plain", "left", "right", "both"])
def test_product_of_any_memory_order(views: str) -> None:
    a, b = torch.randn(37, 53), torch.randn(29, 53)
    left = a.T.contiguous().T if views in ("left", "both") else a
    right = b.T.contiguous().T if views in ("right", "both") else b
    assert close(cpu_linear.product(left, right), a.double() @ b.double().T)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_values_and_gradients(bias: bool, lora: bool) -> None:
    torch.manual_seed(0)
    module: nn.Module = nn.Sequential(nn.Linear(24, 40, bias=bias))
    if lora:
        from peft import LoraConfig, get_peft_model

        module = get_peft_model(module, LoraConfig(r=3, lora_alpha=7, target_modules=["0"])).base_model.model
        nn.init.normal_(module[0].lora_B["default"].weight)
    layer = module[0]
    x = torch.randn(11, 24, requires_grad=True)
    up = torch.randn(11, 40)
    leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
    assert cpu_linear.available(x) or not torch.backends.mkldnn.is_available()
    got = cpu_linear.linear(layer, x)
    grads = torch.autograd.grad((got * up).sum(), leaves)
    layer.double()
    exact = [x.detach().double().requires_grad_(), *(p for p in layer.parameters() if p.requires_grad)]
    want = layer(exact[0])
    assert close(got, want)
    for have, expect in zip(grads, torch.autograd.grad((want * up.double()).sum(), exact), strict=True):
        assert close(have, expect)


def test_everything_else_stays_with_pytorch() -> None:
    x = torch.randn(2, 4)
    assert not cpu_linear.available(x.double()) and not cpu_linear.available(x[:0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not cpu_linear.available(x)
    layer = nn.Linear(4, 3).double()
    assert torch.equal(cpu_linear.linear(layer, x.double()), layer(x.double()))


def test_switched_off_adapters_do_nothing() -> None:
    wrapped = add_lora(tiny_model("llama").eval(), ModelConfig(lora_rank=2), seed=0)
    layer = wrapped.get_base_model().model.layers[0].self_attn.q_proj
    nn.init.normal_(layer.lora_B["default"].weight)
    x = torch.randn(5, 32)
    with wrapped.disable_adapter():
        assert close(cpu_linear.linear(layer, x), layer.base_layer(x).double())
    assert close(cpu_linear.linear(layer, x), layer(x).double())
    assert not close(cpu_linear.linear(layer, x), layer.base_layer(x).double())
