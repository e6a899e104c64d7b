"""What every engine promises: token ids in, the sampled token ids and their log-probs out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from coterie.errors import UserError
from coterie.types import Sample, Sampling


class Engine(Protocol):
    """Samples continuations of prompts given as token ids."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int | Sequence[int],
        sampling: Sampling,
        seeds: Sequence[int],
    ) -> Iterator[tuple[int, int, Sample]]:
        """Yield ``(prompt_index, sample_index, Sample)`` as rows finish, in no promised order.

        Args:
            prompts: token ids of each prompt, passed to the model as they are.
            n: samples per prompt: one number for all, or one per prompt.
            sampling: every setting of the sampler.
            seeds: one per prompt, 0 <= seed < 2**64. Sample ``j`` of a prompt draws from the counter-based stream
                ``(seed, j)``, so what it samples depends on nothing else that is generated with it.

        Raises:
            UserError: an empty prompt, a wrong number of seeds, a setting outside its range, or a prompt that leaves no
                room for ``max_new_tokens`` in the model's context.
        """
        ...

    def release(self) -> None:
        """Drop what is kept between calls only to save time; the next :meth:`generate` makes it again."""
        ...


def check_request(
    prompts: Sequence[Sequence[int]], n: int | Sequence[int], sampling: Sampling, seeds: Sequence[int]
) -> list[int]:
    """Refuse a request no engine can carry out; return the samples wanted of each prompt.

    Raises:
        UserError: see :meth:`Engine.generate`.
    """
    counts = [n] * len(prompts) if isinstance(n, int) else list(n)
    if not (len(counts) == len(seeds) == len(prompts)):
        raise UserError(f"generate: {len(prompts)} prompts, {len(counts)} sample counts and {len(seeds)} seeds")
    if any(c < 0 for c in counts):
        raise UserError("generate: a negative number of samples was asked for")
    if any(not 0 <= s < 2**64 for s in seeds):
        raise UserError("generate: a seed is outside [0, 2**64)")
    empty = [i for i, p in enumerate(prompts) if len(p) == 0]
    if empty:
        raise UserError(f"generate: prompt {empty[0]} has no tokens; give at least one (for example the BOS token)")
    if sampling.max_new_tokens < 1:
        raise UserError(f"sampling: max_new_tokens must be at least 1 (got {sampling.max_new_tokens})")
    if not sampling.temperature >= 0:
        raise UserError(f"sampling: temperature must be 0 (greedy) or positive (got {sampling.temperature})")
    if not 0 < sampling.top_p <= 1:
        raise UserError(f"sampling: top_p must be in (0, 1] (got {sampling.top_p})")
    if sampling.top_k < 0:
        raise UserError(f"sampling: top_k must be 0 (off) or positive (got {sampling.top_k})")
    if any(not s for s in sampling.stop):
        raise UserError("sampling: a stop string is empty")
    return counts
