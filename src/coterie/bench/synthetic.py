"""Groups of realistic size and entropy without a model, for measuring the swarm and for light peers.

Ids follow a Zipf law over a vocabulary of 49,152 (as natural text does), log-probs are those of a policy that is mostly
sure of itself, and every id has a made-up word of 1 to 8 letters as its text.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from coterie.types import Group, Problem, Segment, Source, StopReason, Trajectory

VOCABULARY = 49_152
PROMPT = 64


def synthetic_problem(index: int) -> Problem:
    return Problem(f"synthetic:{index}", "synthetic", f"What is {index} + {index % 97}?", str(index + index % 97))


def synthetic_group(
    author: str, index: int, version: int = 0, *, trajectories: int = 8, tokens: int = 200, seed: int = 0
) -> Group:
    """One group; a function of its arguments."""
    rng = np.random.default_rng([seed, index, version, int(author[:8], 16)])
    rows = tuple(_trajectory(rng, tokens, i) for i in range(trajectories))
    return Group(f"{author[:8]}-{version}-{index}", synthetic_problem(index), author, version, "synthetic", rows)


def _trajectory(rng: np.random.Generator, tokens: int, i: int) -> Trajectory:
    ids = np.minimum(rng.zipf(1.15, PROMPT + tokens), VOCABULARY - 1).astype(np.int32)
    sure = rng.random(tokens) < 0.7
    logprobs = np.where(sure, -rng.exponential(0.02, tokens), -rng.exponential(1.5, tokens)).astype(np.float32)
    text = " ".join(_words()[k] for k in ids[PROMPT:])
    return Trajectory(
        token_ids=ids,
        source=np.repeat(np.array([Source.CONTEXT, Source.POLICY], np.uint8), [PROMPT, tokens]),
        behavior_logprobs=np.concatenate([np.full(PROMPT, np.nan, np.float32), logprobs]),
        prompt_length=PROMPT,
        segments=(Segment(Source.POLICY, text),),
        stop_reason=StopReason.EOS,
        reward=float(i % 2),
    )


@functools.cache
def _words() -> list[str]:
    rng = np.random.default_rng(0)
    letters: NDArray[np.int64] = rng.integers(97, 123, (VOCABULARY, 8))
    lengths = rng.integers(1, 9, VOCABULARY)
    return ["".join(map(chr, row[:n])) for row, n in zip(letters, lengths, strict=True)]
