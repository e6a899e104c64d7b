"""Randomness without state: every random number is a function of the run's seed, the step and the purpose.

Nothing has to be saved or restored, so a resumed run draws what the uninterrupted one would have drawn, and two purposes
never share a stream by accident.
"""

from __future__ import annotations

import hashlib


def derive(*parts: object) -> int:
    """A 63-bit integer that depends on every part (``derive(seed, "rollout", step)``).

    Parts are told apart by type and length, so ``derive("a", "bc") != derive("ab", "c")`` and ``derive(1) != derive("1")``.
    """
    h = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = f"{type(part).__name__}:{part}".encode()
        h.update(len(text).to_bytes(8, "little"))
        h.update(text)
    return int.from_bytes(h.digest(), "little") >> 1
