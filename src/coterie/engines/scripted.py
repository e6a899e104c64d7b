"""An engine that answers from a script: for tests of everything around an engine, with exact ids and log-probs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from coterie.engines.base import check_request
from coterie.engines.stopping import Stopping
from coterie.errors import UserError
from coterie.types import Sample, Sampling, StopReason


class Encoder(Protocol):
    """The part of :class:`coterie.prompting.PromptEncoder` an engine needs."""

    @property
    def eos_ids(self) -> frozenset[int]: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Answer:
    """One scripted answer. ``eos=False``: it is repeated until the token budget cuts it."""

    text: str
    logprob: float = -1.0  # of every token
    eos: bool = True


Script = Callable[[str, int], "str | Answer"] | Mapping[str, Sequence["str | Answer"]]


class ScriptedEngine:
    """Answers prompts by a function of (decoded prompt, sample index), or by a table.

    Table keys are looked for in the decoded prompt (the longest that occurs wins); sample ``j`` takes answer ``j``
    modulo their number. Token budget and stop strings hold as for a real engine. ``requests`` records every call.

    Raises:
        UserError: no key of the table occurs in a prompt.
    """

    def __init__(self, encoder: Encoder, script: Script) -> None:
        self.encoder = encoder
        self.script = script
        self.requests: list[tuple[tuple[tuple[int, ...], ...], Sampling, tuple[int, ...]]] = []

    def release(self) -> None:
        """Nothing is kept."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int | Sequence[int],
        sampling: Sampling,
        seeds: Sequence[int],
    ) -> Iterator[tuple[int, int, Sample]]:
        """See :meth:`coterie.engines.base.Engine.generate`; rows come in order."""
        counts = check_request(prompts, n, sampling, seeds)
        self.requests.append((tuple(tuple(p) for p in prompts), sampling, tuple(seeds)))
        return self._generate(prompts, counts, sampling)

    def _generate(
        self, prompts: Sequence[Sequence[int]], counts: Sequence[int], sampling: Sampling
    ) -> Iterator[tuple[int, int, Sample]]:
        stopping = Stopping(self.encoder.eos_ids, sampling.stop, sampling.max_new_tokens, self.encoder.decode)
        for i, prompt in enumerate(prompts):
            text = self.encoder.decode(prompt)
            for j in range(counts[i]):
                yield i, j, self._sample(self._answer(text, j), stopping)

    def _answer(self, prompt: str, sample: int) -> Answer:
        if callable(self.script):
            found = self.script(prompt, sample)
        else:
            keys = [k for k in self.script if k in prompt]
            if not keys:
                raise UserError(f"script: no answer for the prompt {prompt[-200:]!r}")
            answers = self.script[max(keys, key=len)]
            found = answers[sample % len(answers)]
        return Answer(found) if isinstance(found, str) else found

    def _sample(self, answer: Answer, stopping: Stopping) -> Sample:
        written = self.encoder.encode(answer.text)
        if answer.eos:
            written = [*written, min(self.encoder.eos_ids)]
        elif not written:
            raise UserError("script: an answer without end token needs some text")
        ids: list[int] = []
        ended: tuple[StopReason, str | None] | None = None
        while ended is None:  # ends: with EOS, or when the budget is used up
            ids.append(written[len(ids) % len(written)])
            ended = stopping.check(ids)
        logprobs = np.full(len(ids), answer.logprob, np.float32)  # [t]
        return Sample(np.array(ids, np.int32), logprobs, *ended)
