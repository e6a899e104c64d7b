"""The weights of a Llama-family model, laid out for decoding: fused, adapters folded in, packed for the CPU's matrix kernels.

A copy is made once per version of the weights. What the copy changes, it changes exactly: the query scale and the order
of each head's dimensions are folded into the query and key projections, so that rotary embedding is one complex product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

_FAMILY = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"})
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})  # tables that do not depend on the text's length
_ROWS = 64  # the row count oneDNN packs for; a constant, so that results do not depend on how many rows there are


class Projection:
    """``x @ W.T + b``, followed by what usually follows it, in one kernel where the device has one.

    On a CPU in float32 the weight is packed for oneDNN: measured 2.3 times the rate of the default kernel on AVX-512, and
    a row's result does not depend, to the last bit, on how many rows are multiplied with it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.bias = None if bias is None else bias.to(dtype)  # [out]
        onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        self.packed = onednn and weight.device.type == "cpu" and dtype == torch.float32
        if self.packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.float().contiguous(), _ROWS)
        else:
            self.weight = weight.to(dtype)  # [out, in]
        self.dtype = dtype

    def __call__(self, x: Tensor) -> Tensor:
        """[N, in] -> [N, out]"""
        if self.packed:
            return _onednn(x, self.weight, self.bias, "none", [], "")  # type: ignore[no-any-return]
        return F.linear(x.to(self.dtype), self.weight, self.bias)

    def silu(self, x: Tensor) -> Tensor:
        """silu(self(x)) [N, out]"""
        if self.packed:
            return _onednn(x, self.weight, self.bias, "swish", [], "")  # type: ignore[no-any-return]
        return F.silu(self(x))

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """self(x) * other [N, out]"""
        if self.packed:
            return _onednn.binary(x, other, self.weight, self.bias, "mul")  # type: ignore[no-any-return]
        return self(x) * other

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """self(x) + other [N, out]"""
        if self.packed:
            return _onednn.binary(x, other, self.weight, self.bias, "add")  # type: ignore[no-any-return]
        return self(x) + other


_onednn: Any = torch.ops.mkldnn._linear_pointwise


@dataclass(frozen=True)
class Layer:
    attention_norm: Tensor  # [d]
    qkv: Projection  # d -> (H + 2 Hkv) D
    query_norm: Tensor | None  # [D], Qwen3
    key_norm: Tensor | None  # [D]
    out: Projection  # H D -> d
    mlp_norm: Tensor  # [d]
    gate: Projection  # d -> f
    up: Projection  # d -> f
    down: Projection  # f -> d


@dataclass(frozen=True)
class Weights:
    embedding: Tensor  # [V, d], shared with the model
    layers: list[Layer]
    norm: Tensor  # [d]
    head: Projection  # d -> V
    eps: float
    heads: int  # H
    kv_heads: int  # Hkv
    head_dim: int  # D
    rotary: nn.Module  # the model's own, for its table of angles
    dtype: torch.dtype  # of products; the residual stream keeps the embedding's
    device: torch.device

    def angles(self, length: int) -> Tensor:
        """[length, D / 2] complex64: what position ``t`` multiplies the pairs of a query or key with."""
        positions = torch.arange(length, device=self.device)[None]  # [1, T]
        cos, sin = self.rotary(torch.zeros((), device=self.device), positions)  # [1, T, D], [1, T, D]
        half = self.head_dim // 2
        return torch.complex(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())


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
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Weights(
        embedding=lm.model.embed_tokens.weight.detach(),
        layers=[_layer(layer, head_dim, dtype) for layer in lm.model.layers],
        norm=lm.model.norm.weight.detach(),
        head=Projection(*_dense(lm.lm_head), dtype),
        eps=config.rms_norm_eps,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        rotary=lm.model.rotary_emb,
        dtype=dtype,
        device=lm.model.embed_tokens.weight.device,
    )


def _layer(layer: Any, head_dim: int, dtype: torch.dtype) -> Layer:
    a, m = layer.self_attn, layer.mlp
    scale = float(a.scaling)
    normed = getattr(a, "q_norm", None) is not None
    parts = [_dense(a.q_proj), _dense(a.k_proj), _dense(a.v_proj)]
    weights = [_paired(parts[0][0], head_dim) * (1.0 if normed else scale), _paired(parts[1][0], head_dim), parts[2][0]]
    biases = list(_biases(parts))
    if biases:
        biases = [
            _paired(biases[0], head_dim) * (1.0 if normed else scale), _paired(biases[1], head_dim), biases[2]
        ]  # fmt: skip
    return Layer(
        attention_norm=layer.input_layernorm.weight.detach(),
        qkv=Projection(torch.cat(weights), torch.cat(biases) if biases else None, dtype),
        query_norm=_paired(a.q_norm.weight.detach(), head_dim) * scale if normed else None,
        key_norm=_paired(a.k_norm.weight.detach(), head_dim) if normed else None,
        out=Projection(*_dense(a.o_proj), dtype),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate=Projection(*_dense(m.gate_proj), dtype),
        up=Projection(*_dense(m.up_proj), dtype),
        down=Projection(*_dense(m.down_proj), dtype),
    )


def _biases(parts: list[tuple[Tensor, Tensor | None]]) -> Iterator[Tensor]:
    """The biases, with zeros where a layer has none; nothing if none has."""
    if any(b is not None for _, b in parts):
        for w, b in parts:
            yield torch.zeros(w.shape[0], device=w.device, dtype=w.dtype) if b is None else b


def _dense(module: Any) -> tuple[Tensor, Tensor | None]:
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


def _paired(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder each head's dimensions from (0 .. D/2-1, D/2 .. D-1) to (0, D/2, 1, D/2+1, ..): pairs side by side.

    Rotary embedding turns dimension i together with i + D/2; queries and keys reordered alike have the same products.
    """
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])  # [heads, 2, D/2, ..]
    return halves.transpose(1, 2).reshape(rows.shape)
