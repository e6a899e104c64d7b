"""The model `tiny`: where it lies, the tasks it was trained on, and their skill domains. Imports no torch."""

from __future__ import annotations

import tomllib
from pathlib import Path

from coterie.config import TaskConfig

TINY = Path(__file__).parent / "tiny"
"""Folder of the model in Hugging Face format."""

DOMAINS: dict[str, tuple[str, ...]] = {
    "arithmetic": ("chain_sum", "products", "simple_equations"),
    "strings": ("spell_backward", "letter_counting", "word_sorting"),
    "logic": ("family_relationships", "ab", "color_cube_rotation"),
    "number_theory": ("gcd", "prime_factorization", "count_bits"),
}
"""Skill domain -> names of its tasks."""


def tiny_tasks(domain: str | None = None) -> dict[str, TaskConfig]:
    """The tasks of `tiny` with the parameters it was trained on; all of them, or those of one domain.

    Raises:
        KeyError: unknown domain.
    """
    file = Path(__file__).parent / "tiny_tasks.toml"
    tasks = tomllib.loads(file.read_text(encoding="utf-8"))["tasks"]
    names = DOMAINS[domain] if domain is not None else tuple(name for group in DOMAINS.values() for name in group)
    return {name: TaskConfig(**tasks[name]) for name in names}
