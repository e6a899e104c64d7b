"""Decoding with any Hugging Face causal LM through its own forward pass and cache: simple, general, the reference.

The fast decoders in :mod:`coterie.engines.compiled` and :mod:`coterie.engines.llama` are tested against this one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache


class ReferenceDecoder:
    """One wave of rows. Prompts are padded on the left, so that sliding windows and absolute positions stay right.

    The prompt's keys and values are computed once per prompt and copied to its rows.
    """

    shares_prompt = False  # every row holds its own copy of the prompt's keys and values

    def __init__(self, model: Any, device: torch.device, dtype: torch.dtype) -> None:
        """``dtype``: of products (autocast), as in the policy's own forward pass."""
        self.model = model
        self.device = device
        self.dtype = dtype
        base = model.get_base_model() if hasattr(model, "get_base_model") else model  # below peft's wrapper
        accepted = inspect.signature(base.forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"  # renamed in transformers 5
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._config = base.config.get_text_config()

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], owner: Sequence[int], max_new_tokens: int) -> Tensor:
        """Run the prompts; row ``r`` continues ``prompts[owner[r]]``. Returns next-token logits [R, V]."""
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.long, device=self.device)  # [P, T]
        mask = torch.zeros_like(ids)  # [P, T]
        for i, prompt in enumerate(prompts):
            ids[i, longest - len(prompt) :] = torch.tensor(prompt, device=self.device)
            mask[i, longest - len(prompt) :] = 1
        positions = (mask.cumsum(-1) - 1).clamp_min(0)  # [P, T]
        self.cache = DynamicCache(config=self._config)
        logits = self._forward(ids, mask, positions)  # [P, V]
        rows = torch.tensor(list(owner), device=self.device)  # [R]
        self.cache.batch_select_indices(rows)
        self.mask = mask[rows]  # [R, T]
        self.position = positions[rows, -1:] + 1  # [R, 1]
        return logits[rows]

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Append ``tokens [R]`` to the rows; returns the logits [R, V] of what follows."""
        self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)  # [R, T + 1]
        logits = self._forward(tokens[:, None], self.mask, self.position)  # [R, V]
        self.position = self.position + 1  # [R, 1]
        return logits

    @torch.inference_mode()
    def keep(self, order: Sequence[int]) -> None:
        """Row ``i`` becomes what row ``order[i]`` was; the others leave, and their memory with them."""
        rows = torch.tensor(list(order), device=self.device)
        self.cache.batch_select_indices(rows)
        self.mask, self.position = self.mask[rows], self.position[rows]

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        with evaluating(self.model), torch.autocast(self.device.type, self.dtype, self.dtype != torch.float32):
            out = self.model(
                input_ids=ids,  # [R, t]
                attention_mask=mask,  # [R, T]
                position_ids=positions,  # [R, t]
                use_cache=True,
                **{self._cache_name: self.cache},
                **self._last_only,
            )
        logits: Tensor = out.logits[:, -1]  # [R, V]
        return logits


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode (no dropout, no gradient checkpointing) inside, and every module's own mode restored after."""
    training = [m for m in model.modules() if m.training]
    for m in training:
        m.training = False
    try:
        yield
    finally:
        for m in training:
            m.training = True
