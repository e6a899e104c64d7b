"""Helper that is a frozen model in this process: the start model (adapters off, or a copy) or another checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coterie.helpers.prompts import RolePrompt
from coterie.helpers.protocol import HelperFailure, HelperReply, HelperRequest, Outcome
from coterie.types import Sample, Sampling, StopReason

if TYPE_CHECKING:
    from coterie.engines.base import Engine
    from coterie.engines.torch import TorchEngine
    from coterie.policy import Policy
    from coterie.prompting import PromptEncoder


@dataclass
class LocalHelper:
    """Answers a batch of questions with one call of an engine.

    ``same_tokenizer``: the ids it samples are the policy's ids too, so they go into the trajectory as they are, and their
    log-probs are exact (temperature included). ``context``: longest sequence the model takes; None is unlimited.
    """

    name: str
    engine: Engine
    encoder: PromptEncoder
    prompt: RolePrompt
    temperature: float
    same_tokenizer: bool
    context: int | None = None

    def respond_batch(self, requests: Sequence[HelperRequest]) -> list[Outcome]:
        start = time.monotonic()
        new = max(r.max_tokens for r in requests)
        prompts = [self._prompt(r) for r in requests]
        fits = [i for i, p in enumerate(prompts) if self.context is None or len(p) + new <= self.context]
        replies: dict[int, Outcome] = {}
        seeds = [requests[i].seed for i in fits]
        for at, _, sample in self.engine.generate(
            [prompts[i] for i in fits], 1, Sampling(new, self.temperature), seeds
        ):
            replies[fits[at]] = self._reply(sample, time.monotonic() - start)
        too_long = HelperFailure("too_long", f"the question does not fit into {self.context} tokens", self.name)
        return [replies.get(i, too_long) for i in range(len(requests))]

    def _prompt(self, request: HelperRequest) -> list[int]:
        system, user = self.prompt.messages(request)
        if system and not self.encoder.tokenizer.chat_template:
            user = f"{system}\n\n{user}\n"
        return self.encoder.prompt_ids(user, system=system)

    def _reply(self, sample: Sample, latency_s: float) -> Outcome:
        ids = tuple(int(i) for i in sample.token_ids)
        text = self.encoder.decode(ids)
        if not text.strip():
            return HelperFailure("empty", "the model ended its reply at once", self.name, latency_s)
        return HelperReply(
            text,
            self.name,
            token_ids=ids if self.same_tokenizer else None,
            # A greedy reply was not sampled from the distribution whose log-probs an engine could report.
            logprobs=tuple(map(float, sample.logprobs)) if self.same_tokenizer and self.temperature > 0 else None,
            span_logprob=math.fsum(map(float, sample.logprobs)) if self.temperature > 0 else None,
            cut=sample.stop_reason is StopReason.LENGTH,
            latency_s=latency_s,
            offered_logprobs=self.temperature > 0,
        )


class AdaptersOff:
    """An engine that samples from a LoRA policy's base model: adapters are off while a row is decoded, on in between.

    No second copy of the weights is kept: the engine's own, laid out for decoding, is dropped after every batch. Must not
    be used while the policy itself decodes (the dialogue loop asks between its rounds).
    """

    def __init__(self, engine: TorchEngine, policy: Policy) -> None:
        self.engine = engine
        self.policy = policy

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int | Sequence[int], sampling: Sampling, seeds: Sequence[int]
    ) -> Iterator[tuple[int, int, Sample]]:
        """See :meth:`coterie.engines.base.Engine.generate`. All rows are decoded before the first is given out, so that
        nothing of the caller's runs with adapters off."""
        with self.policy.model.disable_adapter():
            rows = list(self.engine.generate(prompts, n, sampling, seeds))
            self.engine.release()
        yield from rows

    def release(self) -> None:
        """Nothing is kept between batches."""
