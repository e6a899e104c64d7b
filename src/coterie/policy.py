"""The model being trained: log-probs of batches, optimiser steps, saving and loading."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coterie.batching import Batch
from coterie.config import ModelConfig, OptimConfig
from coterie.errors import CoterieError
from coterie.forward import Forward, TokenStats
from coterie.memory import hand_back
from coterie.models_io import add_lora, load_model, load_tokenizer, pick_device
from coterie.prompting import PromptEncoder

HEAD = "value_head."  # prefix of the value head's weights in checkpoints; they are no part of the saved model


@dataclass(frozen=True, slots=True)
class StepResult:
    grad_norm: float  # L2 norm over all trained weights, before clipping; NaN or inf if that is why it was skipped
    skipped: str | None  # None, or why the weights did not move


class Policy:
    """A causal LM with float32 master weights, its tokenizer, and AdamW."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        system_prompt: str = "",
        dtype: torch.dtype = torch.float32,
        optim: OptimConfig | None = None,
        start: Callable[[], Any] | None = None,
        value_head: bool = False,
    ) -> None:
        """``model``: a Hugging Face causal LM or a PEFT wrapper of one, float32. ``start`` loads the model as it was
        before training, for :meth:`reference_logprobs` of a fully trained model. ``value_head``: learn values of
        states too (PPO); a linear map of the last hidden state, zero at the start, trained with the weights."""
        self.model = model.eval()  # no dropout: the learner's log-probs are the sampler's
        self.tokenizer = tokenizer
        self.dtype = dtype
        self.optim = optim or OptimConfig()
        self.lora = hasattr(model, "peft_config")
        generation = getattr(self.causal_lm, "generation_config", None)
        self.encoder = PromptEncoder(
            tokenizer, system_prompt, eos_ids=_as_ids(getattr(generation, "eos_token_id", None))
        )
        self._start = start
        self.value_head = zero_head(self.causal_lm) if value_head else None
        self._forward = Forward(self.causal_lm, self.value_head)
        self._reference: Forward | None = None
        self._bad: str | None = None
        self._trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if self.value_head is not None:
            self._trained |= {f"{HEAD}{n}": p for n, p in self.value_head.named_parameters()}
        self._optimizer = torch.optim.AdamW(
            list(self._trained.values()),
            lr=self.optim.lr,
            betas=(self.optim.beta1, self.optim.beta2),
            weight_decay=self.optim.weight_decay,
            fused=True,
        )

    @classmethod
    def load(
        cls, cfg: ModelConfig, *, seed: int = 0, optim: OptimConfig | None = None, value_head: bool = False
    ) -> Policy:
        """Load `tiny`, `smollm2`, a Hugging Face id or a folder; with adapters if ``cfg.lora_rank`` > 0.

        Raises:
            UserError: the model, its extra package, a LoRA target or the device is missing.
        """
        device = pick_device(cfg.device)
        model = load_model(cfg.name, device)
        if cfg.lora_rank:
            model = add_lora(model, cfg, seed)
        return cls(
            model,
            load_tokenizer(cfg.name),
            system_prompt=cfg.system_prompt,
            dtype=torch.bfloat16 if cfg.dtype == "bfloat16" else torch.float32,
            optim=optim,
            start=lambda: load_model(cfg.name, device),
            value_head=value_head,
        )

    @property
    def causal_lm(self) -> Any:
        """The Hugging Face model itself (inside the PEFT wrapper, adapters in place)."""
        return self.model.get_base_model() if self.lora else self.model

    @property
    def device(self) -> torch.device:
        return next(iter(self.model.parameters())).device  # type: ignore[no-any-return]

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Computes in ``dtype`` over float32 weights; does nothing for float32."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def logprobs(self, batch: Batch) -> TokenStats:
        """Log-probs of the tokens under ``batch.loss_mask``, at each row's temperature; differentiable."""
        with self.autocast():
            return self._forward(batch.to(self.device), checkpoint=self.optim.activation_checkpointing)

    @torch.no_grad()
    def reference_logprobs(self, batch: Batch) -> Tensor:
        """[B, T] log-probs under the model before training: adapters off, or (full training) a second, frozen copy,
        loaded at the first call."""
        with self.autocast(), self._reference_forward() as forward:
            return forward(batch.to(self.device)).logprobs

    @contextlib.contextmanager
    def _reference_forward(self) -> Iterator[Forward]:
        if self.lora:
            with self.model.disable_adapter():
                yield self._forward
            return
        if self._reference is None:
            if self._start is None:
                raise CoterieError("reference log-probs need the start model; build the policy with Policy.load")
            self._reference = Forward(self._start().requires_grad_(False))
        yield self._reference

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss`` (one micro-batch's share). A non-finite loss makes the next step skip."""
        if not bool(torch.isfinite(loss.detach())):
            self._bad = self._bad or f"non-finite loss ({loss.item()})"
        elif loss.requires_grad and self._bad is None:
            loss.backward()  # type: ignore[no-untyped-call]
            hand_back(self.model)

    def step(self, lr: float) -> StepResult:
        """One AdamW step with gradients clipped to ``optim.grad_clip``, then gradients are dropped.

        A non-finite loss or gradient, or no gradient at all, skips the step: weights and moments stay as they are
        (verl-project/verl issue 721).
        """
        grads = [p.grad for p in self._trained.values() if p.grad is not None]
        norm = nn.utils.get_total_norm(grads) if grads else torch.zeros(())
        skipped = self._bad
        if skipped is None and not grads:
            skipped = "nothing to train on"
        if skipped is None and not bool(torch.isfinite(norm)):
            skipped = f"non-finite gradient ({norm.item()})"
        if skipped is None:
            nn.utils.clip_grads_with_norm_(self._trained.values(), self.optim.grad_clip, norm)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        del grads
        hand_back(self.model)
        self._bad = None
        return StepResult(float(norm), skipped)

    def weights(self) -> dict[str, Tensor]:
        """The trained weights by name (adapters only, for LoRA; with those of the value head), sharing memory with the
        model."""
        return {n: p.detach() for n, p in self._trained.items()}

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Raises CoterieError, and changes nothing, if names or shapes differ from :meth:`weights`."""
        _check("weights", {n: tuple(p.shape) for n, p in self._trained.items()}, weights)
        with torch.no_grad():
            for name, p in self._trained.items():
                p.copy_(weights[name])

    def optimizer_state(self) -> dict[str, Tensor]:
        """AdamW's moments and step counts, flat: `exp_avg.<name>`, `exp_avg_sq.<name>`, `step.<name>`. Empty before
        the first step."""
        state = self._optimizer.state
        return {f"{k}.{n}": v for n, p in self._trained.items() if p in state for k, v in state[p].items()}

    def load_optimizer_state(self, state: dict[str, Tensor]) -> None:
        """Raises CoterieError, and changes nothing, if names or shapes do not fit the trained weights."""
        kinds = ("exp_avg", "exp_avg_sq", "step")
        names = [n for n in self._trained if f"step.{n}" in state]
        want = {f"{k}.{n}": () if k == "step" else tuple(self._trained[n].shape) for n in names for k in kinds}
        _check("optimiser state", want, state)
        self._optimizer.state.clear()
        for n in names:
            p = self._trained[n]
            self._optimizer.state[p] = {
                k: state[f"{k}.{n}"].to(device=p.device, dtype=torch.float32, copy=True) for k in kinds
            }

    def save_pretrained(self, folder: str | Path, *, merged: bool = True) -> None:
        """Write a Hugging Face folder with tokenizer. LoRA: the merged model, or (``merged=False``) the adapters."""
        model = self.model
        if self.lora and merged:
            model = copy.deepcopy(self.model).merge_and_unload()
        model.save_pretrained(str(folder))
        self.tokenizer.save_pretrained(str(folder))


def zero_head(model: Any) -> nn.Linear:
    """One value per hidden state; all zero, so that the first advantages are the returns themselves."""
    head = nn.Linear(model.config.get_text_config().hidden_size, 1, device=next(model.parameters()).device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def _as_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(i) for i in value) if isinstance(value, (list, tuple)) else (int(value),)


def _check(what: str, want: dict[str, tuple[int, ...]], got: dict[str, Tensor]) -> None:
    if missing := sorted(want.keys() - got.keys()):
        raise CoterieError(f"{what}: {len(missing)} entries are missing, for example {missing[0]}")
    if extra := sorted(got.keys() - want.keys()):
        raise CoterieError(f"{what}: {len(extra)} entries belong to another model, for example {extra[0]}")
    for name, shape in want.items():
        if tuple(got[name].shape) != shape:
            raise CoterieError(f"{what}: {name} has shape {tuple(got[name].shape)}, this model has {shape}")
