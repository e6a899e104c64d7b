"""The network: a Hugging Face Llama, and a slim forward pass over its weights for training and sampling.

The slim pass runs on the very parameters of the model (nothing is copied), so what it trains is what is saved;
:func:`check_same` asserts that both give the same logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HEADS, EPS, THETA, LONGEST = 4, 1e-5, 10000.0, 256


def make_model(tokenizer: PreTrainedTokenizerFast, layers: int, width: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        intermediate_size=3 * width,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=True,
        max_position_embeddings=LONGEST,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


@dataclass
class Cache:
    """Keys and values of all layers, ``[L, 2, B, heads, T, head width]``, filled up to ``length``."""

    store: Tensor
    length: int = 0


@cache
def rope_table(width: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine, ``[T, head width]``, for heads of ``width``."""
    half = width // 2
    angle = torch.arange(LONGEST)[:, None] / THETA ** (torch.arange(half) / half)  # [T, half]
    angle = torch.cat([angle, angle], dim=-1)  # [T, head width]
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


def hidden_states(
    model: LlamaForCausalLM,
    ids: Tensor,
    positions: Tensor | None = None,
    mask: Tensor | None = None,
    cache: Cache | None = None,
) -> Tensor:
    """Last hidden states ``[B, T, width]`` of ``ids [B, T]``; causal, or by ``mask [B, 1, T, S]`` where a cache is used."""
    rows, length = ids.shape
    width = model.config.hidden_size
    all_cos, all_sin = rope_table(width // HEADS)
    at = slice(0, length) if positions is None else positions
    cos, sin = all_cos[at], all_sin[at]  # [T, head width] or [B, T, head width]
    if positions is not None:
        cos, sin = cos[:, None], sin[:, None]  # [B, 1, T, head width]
    x = model.model.embed_tokens.weight[ids]  # [B, T, width]
    for i, layer in enumerate(model.model.layers):
        att, mlp = layer.self_attn, layer.mlp
        h = F.rms_norm(x, (width,), layer.input_layernorm.weight, EPS)  # [B, T, width]
        qkv = F.linear(h, torch.cat([att.q_proj.weight, att.k_proj.weight, att.v_proj.weight]))  # [B, T, 3 width]
        q, k, v = qkv.view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)  # each [B, heads, T, head width]
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        if cache is not None:
            end = cache.length + length
            cache.store[i, 0, :, :, cache.length : end], cache.store[i, 1, :, :, cache.length : end] = k, v
            k, v = cache.store[i, 0, :, :, :end], cache.store[i, 1, :, :, :end]  # [B, heads, S, head width]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)  # [B, heads, T, head width]
        x = x + att.o_proj(y.transpose(1, 2).reshape(rows, length, width))
        h = F.rms_norm(x, (width,), layer.post_attention_layernorm.weight, EPS)
        gate, up = F.linear(h, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])).chunk(
            2, dim=-1
        )  # [B, T, 3 width]
        x = x + mlp.down_proj(F.silu(gate) * up)
    if cache is not None:
        cache.length += length
    return F.rms_norm(x, (width,), model.model.norm.weight, EPS)  # [B, T, width]


@torch.no_grad()
def sample(
    model: LlamaForCausalLM,
    prompts: list[list[int]],
    new: int,
    generator: torch.Generator,
    eos: int,
    greedy: bool = False,
) -> list[list[int]]:
    """One answer to each prompt at temperature 1 (or the likeliest), at most ``new`` tokens, the end token included."""
    rows, longest = len(prompts), max(map(len, prompts))
    lengths = torch.tensor([len(p) for p in prompts])  # [B]
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])  # [B, T] padded on the left
    width, layers = model.config.hidden_size, model.config.num_hidden_layers
    cache = Cache(torch.zeros(layers, 2, rows, HEADS, longest + new, width // HEADS))
    real = torch.arange(longest + new)[None] >= (longest - lengths)[:, None]  # [B, S]
    causal = torch.ones(longest, longest, dtype=torch.bool).tril()  # [T, T]
    mask = (real[:, None, None, :longest] & causal) | torch.eye(longest, dtype=torch.bool)  # [B, 1, T, T]
    positions = (torch.arange(longest)[None] - (longest - lengths)[:, None]).clamp(min=0)  # [B, T]
    h = hidden_states(model, ids, positions, mask, cache)[:, -1]  # [B, width]
    done, written = torch.zeros(rows, dtype=torch.bool), []
    for step in range(new):
        logits = h @ model.model.embed_tokens.weight.T  # [B, V]
        noise = -torch.empty_like(logits).exponential_(generator=generator).log()  # [B, V] Gumbel
        token = (logits if greedy else logits + noise).argmax(-1)  # [B]
        written.append(token)
        done |= token == eos
        if bool(done.all()) or step == new - 1:
            break
        mask = real[:, None, None, : longest + step + 1]  # [B, 1, 1, S]
        h = hidden_states(model, token[:, None], (lengths + step)[:, None], mask, cache)[:, 0]  # [B, width]
    answers = torch.stack(written, dim=1).tolist()
    return [a[: a.index(eos) + 1] if eos in a else a for a in answers]


@torch.no_grad()
def check_same(model: LlamaForCausalLM, ids: Tensor) -> float:
    """Largest difference between the slim pass's logits and the library's. Raises AssertionError above 1e-4."""
    slim = hidden_states(model, ids) @ model.model.embed_tokens.weight.T  # [B, T, V]
    gap = float((slim - model(ids).logits).abs().max())
    assert gap < 1e-4, f"the slim forward pass differs from the Hugging Face model by {gap}"
    return gap
