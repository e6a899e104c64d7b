"""Small random models and a one-character-a-token encoder, shared by the engine tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 61
EOS = 1
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "pad_token_id": EOS,  # pad = eos on purpose: masks must come from lengths
}


class CharEncoder:
    """Id k is the character chr(k + 46); EOS shows as nothing."""

    def __init__(self, eos: int = EOS) -> None:
        self.eos_ids = frozenset({eos})

    def encode(self, text: str) -> list[int]:
        return [ord(c) - 46 for c in text]

    def decode(self, ids: Any) -> str:
        return "".join(chr(int(i) + 46) for i in ids if int(i) not in self.eos_ids)


@dataclass
class TinyPolicy:
    model: Any
    encoder: Any
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32


def tiny_model(kind: str, seed: int = 0) -> Any:
    """A random model whose distribution is far from flat and whose EOS is not rare."""
    torch.manual_seed(seed)
    makers: dict[str, Any] = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=True)),
        "llama-bias": lambda: LlamaForCausalLM(
            LlamaConfig(**_SIZES, attention_bias=True, mlp_bias=True, rope_theta=500.0, tie_word_embeddings=False)
        ),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_SIZES)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SIZES, head_dim=16)),
        "mistral": lambda: MistralForCausalLM(MistralConfig(**_SIZES, sliding_window=None)),
        "mistral-window": lambda: MistralForCausalLM(MistralConfig(**_SIZES, sliding_window=6)),
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY, n_positions=128, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=EOS
            )
        ),
    }
    model = makers[kind]()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.mul_(6.0)
            elif "bias" in name:
                p.normal_(0, 0.5)
            else:
                p.add_(0.3 * torch.randn_like(p))
    return model.train()


def tiny_policy(kind: str, seed: int = 0) -> TinyPolicy:
    return TinyPolicy(tiny_model(kind, seed), CharEncoder())


PROMPTS = [[5, 9, 30], [7], [2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [5, 9, 31]]
