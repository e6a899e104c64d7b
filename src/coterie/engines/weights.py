"""The weights of a Llama-family model, laid out for decoding: query, key and value projections fused, query scale and adapters
folded in. Made once per version of the weights; what need not change is shared with the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from coterie.models_io import head_dim

_FAMILY = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"})
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})  # tables that do not depend on the text's length


Linear = tuple[Tensor, Tensor | None]  # weight [out, in], bias [out]


@dataclass(frozen=True)
class Rotary:
    """The model's own rotary embedding, as a table."""

    module: nn.Module
    head_dim: int  # D
    device: torch.device

    def angles(self, length: int) -> Tensor:
        """[length, D / 2] complex64: what position ``t`` multiplies the pairs of a query or key with."""
        positions = torch.arange(length, device=self.device)[None]  # [1, T]
        cos, sin = self.module(torch.zeros((), device=self.device), positions)  # [1, T, D], [1, T, D]
        half = self.head_dim // 2
        return torch.complex(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())


@dataclass(frozen=True)
class Layer:
    attention_norm: Tensor  # [d]
    qkv: Linear  # d -> (H + 2 Hkv) D
    query_norm: Tensor | None  # [D], Qwen3
    key_norm: Tensor | None  # [D]
    out: Linear  # H D -> d
    mlp_norm: Tensor  # [d]
    gate: Linear  # d -> f
    up: Linear  # d -> f
    down: Linear  # f -> d


@dataclass(frozen=True)
class Weights:
    embedding: Tensor  # [V, d], shared with the model
    layers: list[Layer]
    norm: Tensor  # [d]
    head: Linear  # d -> V
    eps: float
    heads: int  # H
    kv_heads: int  # Hkv
    head_dim: int  # D
    rotary: Rotary
    dtype: torch.dtype  # of products; the residual stream keeps the embedding's
    device: torch.device


def why_not(model: Any) -> str | None:
    """Why the fast decoder cannot stand in for this model's own forward pass; None if it can."""
    lm = _causal_lm(model)
    if type(lm).__name__ not in _FAMILY or not type(lm).__module__.startswith("transformers."):
        return f"{type(lm).__name__} is not one of {', '.join(sorted(_FAMILY))}"
    config = lm.config
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return "some layers attend to a window only"
    if type(lm).__name__ == "MistralForCausalLM" and config.sliding_window is not None:
        return "it attends to a window only"
    if lm.model.rotary_emb.rope_type not in _STATIC_ROPE:
        return f"its rotary embedding ({lm.model.rotary_emb.rope_type}) depends on the length"
    if len({p.device for p in lm.parameters()}) != 1:
        return "its weights lie on several devices"
    for name, module in lm.named_modules():
        if name.endswith(("_proj", "lm_head")) and not _plain(module):
            return f"{name} is a {type(module).__name__}"
    return None


def _plain(module: nn.Module) -> bool:
    """An ordinary linear layer, or one with plain LoRA adapters (no DoRA or other variant)."""
    if isinstance(module, LoraLinear):
        return type(module.base_layer) is nn.Linear and not any(module.use_dora.values()) and not module.lora_variant
    return type(module) is nn.Linear


def _causal_lm(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@torch.no_grad()
def version(model: Any) -> tuple[Any, ...]:
    """Changes when any weight changes, or when adapters are switched.

    A sum over the bits of every weight (25 ms a GB on one core): tensors' own version counters are no use, since the
    fused optimisers of PyTorch do not advance them.
    """
    lm = _causal_lm(model)
    adapters = tuple(
        (m.disable_adapters, tuple(m.active_adapters), tuple(m.scaling.values()), m.merged)
        for m in lm.modules()
        if isinstance(m, LoraLinear)
    )
    sums = torch.stack([_words(p).sum(dtype=torch.int64) for p in lm.parameters()])  # [parameters]
    return (tuple(sums.tolist()), adapters)


def _words(p: Tensor) -> Tensor:
    """The bits of a tensor as integers, the widest that divide it."""
    flat = p.detach().reshape(-1)
    size = flat.numel() * flat.element_size()
    return flat.view(torch.int64 if size % 8 == 0 else torch.int32 if size % 4 == 0 else torch.int16)


@torch.no_grad()
def lay_out(model: Any, dtype: torch.dtype) -> Weights:
    """Copy the weights of a model that :func:`why_not` accepts."""
    lm = _causal_lm(model)
    config = lm.config
    width = head_dim(config)
    return Weights(
        embedding=lm.model.embed_tokens.weight.detach(),
        layers=[_layer(layer, dtype) for layer in lm.model.layers],
        norm=lm.model.norm.weight.detach(),
        head=_typed(_dense(lm.lm_head), dtype),
        eps=config.rms_norm_eps,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=width,
        rotary=Rotary(lm.model.rotary_emb, width, lm.model.embed_tokens.weight.device),
        dtype=dtype,
        device=lm.model.embed_tokens.weight.device,
    )


def _layer(layer: Any, dtype: torch.dtype) -> Layer:
    a, m = layer.self_attn, layer.mlp
    scale = float(a.scaling)
    normed = getattr(a, "q_norm", None) is not None
    parts = [_dense(a.q_proj), _dense(a.k_proj), _dense(a.v_proj)]
    biases = list(_biases(parts))
    if not normed:
        parts[0] = (parts[0][0] * scale, None)
        biases[:1] = [b * scale for b in biases[:1]]
    weight = torch.cat([w for w, _ in parts])
    return Layer(
        attention_norm=layer.input_layernorm.weight.detach(),
        qkv=_typed((weight, torch.cat(biases) if biases else None), dtype),
        query_norm=a.q_norm.weight.detach() * scale if normed else None,
        key_norm=a.k_norm.weight.detach() if normed else None,
        out=_typed(_dense(a.o_proj), dtype),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate=_typed(_dense(m.gate_proj), dtype),
        up=_typed(_dense(m.up_proj), dtype),
        down=_typed(_dense(m.down_proj), dtype),
    )


def _typed(layer: Linear, dtype: torch.dtype) -> Linear:
    weight, bias = layer
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def _biases(parts: list[Linear]) -> Iterator[Tensor]:
    """The biases, with zeros where a layer has none; nothing if none has."""
    if any(b is not None for _, b in parts):
        for w, b in parts:
            yield torch.zeros(w.shape[0], device=w.device, dtype=w.dtype) if b is None else b


def _dense(module: Any) -> Linear:
    """Weight and bias of a linear layer with its active adapters added: W + scale * B A."""
    if not isinstance(module, LoraLinear):
        return module.weight.detach(), None if module.bias is None else module.bias.detach()
    weight, bias = _dense(module.base_layer)
    if not module.disable_adapters and not module.merged:
        for name in module.active_adapters:
            if name in module.lora_A:
                weight = weight + module.get_delta_weight(name).to(weight.dtype)
                extra = module.lora_B[name].bias
                if extra is not None:
                    extra = extra.detach() * module.scaling[name]
                    bias = extra if bias is None else bias + extra
    return weight, bias
