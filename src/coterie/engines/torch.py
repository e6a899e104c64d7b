"""The engine that samples from the policy's own weights, in this process, with PyTorch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from coterie.engines.base import check_request
from coterie.engines.compiled import CompiledDecoder, Packed, pack, packable
from coterie.engines.llama import LlamaDecoder
from coterie.engines.reference import ReferenceDecoder
from coterie.engines.sampling import Sampler, uniforms
from coterie.engines.scripted import Encoder
from coterie.engines.stopping import Stopping
from coterie.engines.weights import Weights, lay_out, version, why_not
from coterie.errors import CoterieError, UserError
from coterie.memory import hand_back
from coterie.types import Sample, Sampling, StopReason

_LEAVE = 8  # finished rows leave when that makes one such step fewer: decoders compute rows in steps of this size


class Samplable(Protocol):
    """The part of :class:`coterie.policy.Policy` the engine needs. The model may be wrapped by peft."""

    model: Any
    dtype: torch.dtype

    @property
    def encoder(self) -> Encoder: ...
    @property
    def device(self) -> torch.device: ...


class Decoder(Protocol):
    """Logits for a wave of rows, one token a step."""

    shares_prompt: bool

    def prefill(self, prompts: Sequence[Sequence[int]], owner: Sequence[int], max_new_tokens: int) -> Tensor: ...
    def step(self, tokens: Tensor) -> Tensor: ...
    def keep(self, order: Sequence[int]) -> None: ...


@dataclass(frozen=True)
class _Row:
    """One sample to be made."""

    places: tuple[int, int]  # (prompt index, sample index) of the request
    prompt: tuple[int, ...]
    seed: int


class TorchEngine:
    """Samples from ``policy`` as its weights are when :meth:`generate` is called.

    Rows are decoded in waves of at most ``token_budget`` tokens held in the key/value cache (a single row longer than
    that still runs). Prompts of similar length share a wave; finished rows leave it.
    """

    def __init__(self, policy: Samplable, token_budget: int = 16384, *, reference: bool = False) -> None:
        """``reference=True``: decode by the model's own forward pass even where the fast decoder could."""
        self.policy = policy
        self.token_budget = token_budget
        self.reference = reference
        self._laid_out: tuple[tuple[Any, ...], Packed | Weights] | None = None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int | Sequence[int],
        sampling: Sampling,
        seeds: Sequence[int],
    ) -> Iterator[tuple[int, int, Sample]]:
        """See :meth:`coterie.engines.base.Engine.generate`. Weights must not change while the iterator is in use."""
        counts = check_request(prompts, n, sampling, seeds)
        self._check_context(prompts, sampling)
        rows = [
            _Row((i, j), tuple(prompt), seed)
            for i, (prompt, seed, count) in enumerate(zip(prompts, seeds, counts, strict=True))
            for j in range(count)
        ]
        return self._generate(rows, sampling)

    def _generate(self, rows: list[_Row], sampling: Sampling) -> Iterator[tuple[int, int, Sample]]:
        decoder = self._decoder()
        encoder = self.policy.encoder
        stopping = Stopping(encoder.eos_ids, sampling.stop, sampling.max_new_tokens, encoder.decode)
        for wave in waves(rows, sampling.max_new_tokens, self.token_budget, decoder.shares_prompt):
            yield from self._decode(decoder, wave, Sampler(sampling), stopping)

    def _decoder(self) -> Decoder:
        model = self.policy.model
        if self.reference or why_not(model) is not None:
            return ReferenceDecoder(model, self.policy.device, self.policy.dtype)
        current = version(model)
        if self._laid_out is None or self._laid_out[0] != current:
            self._laid_out = None  # not two copies at once
            weights = lay_out(model, self.policy.dtype)
            self._laid_out = (current, pack(weights) if packable(weights) else weights)
            del weights
            hand_back(model)
        ready = self._laid_out[1]
        return CompiledDecoder(ready) if isinstance(ready, Packed) else LlamaDecoder(ready)

    def release(self) -> None:
        """Drop the copy of the weights kept for decoding; the next :meth:`generate` makes it again."""
        if self._laid_out is None:
            return
        self._laid_out = None
        hand_back(self.policy.model)

    def _decode(
        self, decoder: Decoder, rows: list[_Row], sampler: Sampler, stopping: Stopping
    ) -> Iterator[tuple[int, int, Sample]]:
        prompts = list(dict.fromkeys(r.prompt for r in rows))
        number = {p: i for i, p in enumerate(prompts)}
        wave = _Wave(rows, stopping)
        logits = decoder.prefill(prompts, [number[r.prompt] for r in rows], stopping.max_new_tokens)  # [R, V]
        while True:
            tokens, ended = wave.advance(sampler, logits)  # [R]
            yield from ended
            count = len(wave.rows)
            if len(wave.ended) == count:
                return
            if (count - len(wave.ended) + _LEAVE - 1) // _LEAVE < (count + _LEAVE - 1) // _LEAVE:
                order = fill_holes(count, wave.ended)
                decoder.keep(order)
                wave.keep(order)
                tokens = tokens[order]  # [R]
            logits = decoder.step(tokens)  # [R, V]

    def _check_context(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        limit = getattr(self.policy.model.config.get_text_config(), "max_position_embeddings", None)
        longest = max(map(len, prompts), default=0)
        if limit is not None and longest + sampling.max_new_tokens > limit:
            raise UserError(
                f"generate: a prompt of {longest} tokens and {sampling.max_new_tokens} new ones exceed the model's "
                f"context of {limit}; lower rollout.max_new_tokens (--max-new-tokens of `coterie eval`), or choose task "
                "parameters that make shorter prompts. rollout.max_prompt_tokens drops longer prompts in training only: "
                "held-out problems are never dropped"
            )


class _Wave:
    """Rows decoded together: what each has sampled so far, the uniforms it will use, and which have ended."""

    def __init__(self, rows: list[_Row], stopping: Stopping) -> None:
        self.rows = rows
        self.stopping = stopping
        self.step = 0
        self.ended: set[int] = set()  # rows that are decoded on, unheard, until enough of them leave together
        self.uniforms = np.stack([uniforms(r.seed, r.places[1], stopping.max_new_tokens) for r in rows])  # [R, max]
        self.ids = np.empty(self.uniforms.shape, np.int32)  # [R, max]
        self.logprobs = np.empty(self.uniforms.shape, np.float32)  # [R, max]

    @torch.inference_mode()
    def advance(self, sampler: Sampler, logits: Tensor) -> tuple[Tensor, list[tuple[int, int, Sample]]]:
        """Sample one token of every row. Returns the tokens [R] and what the rows that ended now have become."""
        uniform = torch.tensor(self.uniforms[:, self.step], device=logits.device)  # [R]
        tokens, logprobs = sampler.draw(logits, uniform)  # [R], [R]
        self.ids[:, self.step] = tokens.cpu().numpy()
        self.logprobs[:, self.step] = logprobs.cpu().numpy()
        if not np.isfinite(self.logprobs[:, self.step]).all():
            raise CoterieError(f"generate: the policy's logits are not finite after {self.step} tokens")
        self.step += 1
        ended = {k: (*self.rows[k].places, self._sample(k, *why)) for k, why in self._newly_ended()}
        self.ended |= ended.keys()
        return tokens, list(ended.values())

    def keep(self, order: list[int]) -> None:
        self.rows = [self.rows[k] for k in order]
        self.uniforms, self.ids, self.logprobs = self.uniforms[order], self.ids[order], self.logprobs[order]
        self.ended.clear()

    def _newly_ended(self) -> Iterator[tuple[int, tuple[StopReason, str | None]]]:
        newest = self.ids[:, self.step - 1].tolist()
        suspects: Iterable[int] = range(len(self.rows))
        if not self.stopping.stop and self.step < self.stopping.max_new_tokens:  # only an end token can end a row
            suspects = [k for k, token in enumerate(newest) if token in self.stopping.eos_ids]
        for k in suspects:
            if k in self.ended:
                continue
            why = self.stopping.check(self.ids[k, : self.step].tolist())
            if why is not None:
                yield k, why

    def _sample(self, k: int, reason: StopReason, stop: str | None) -> Sample:
        return Sample(self.ids[k, : self.step].copy(), self.logprobs[k, : self.step].copy(), reason, stop)


def fill_holes(count: int, ended: Collection[int]) -> list[int]:
    """Places of the rows that stay, in an order that moves as few as possible: the last ones fill the holes."""
    left = count - len(ended)
    movers = (k for k in range(left, count) if k not in ended)
    return [next(movers) if k in ended else k for k in range(left)]


def waves(rows: Sequence[_Row], max_new_tokens: int, budget: int, shares_prompt: bool) -> Iterator[list[_Row]]:
    """Cut rows into waves of at most ``budget`` tokens: rows of one prompt together, then prompts of similar length.

    A prompt is padded to the longest of its wave. Only a prompt whose own rows exceed the budget is spread over several
    waves (and prefilled in each).
    """
    ordered = sorted(rows, key=lambda r: (len(r.prompt), r.prompt))  # stable: samples stay in order
    groups: dict[tuple[int, ...], list[_Row]] = {}
    for row in ordered:
        groups.setdefault(row.prompt, []).append(row)
    wave: list[_Row] = []
    held = 0  # prompts in the wave
    for prompt, group in groups.items():
        if wave and _tokens(len(prompt), held + 1, len(wave) + len(group), max_new_tokens, shares_prompt) > budget:
            yield wave
            wave, held = [], 0
        for row in group:
            if wave and _tokens(len(prompt), held + 1, len(wave) + 1, max_new_tokens, shares_prompt) > budget:
                yield wave
                wave, held = [], 0
            wave.append(row)
        held += 1
    if wave:
        yield wave


def _tokens(prompt: int, prompts: int, rows: int, max_new_tokens: int, shares_prompt: bool) -> int:
    """Tokens in the cache when every row runs to its budget."""
    return prompt * (prompts if shares_prompt else rows) + rows * max_new_tokens
