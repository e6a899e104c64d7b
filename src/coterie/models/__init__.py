"""The model `tiny`: where it lies, the tasks it was trained on, and their skill domains. Imports no torch."""

from __future__ import annotations

import tomllib
from pathlib import Path

from coterie.config import TaskConfig
from coterie.errors import UserError

TINY = Path(__file__).parent / "tiny"
"""Folder of the model in Hugging Face format."""

DOMAINS: dict[str, tuple[str, ...]] = {
    "arithmetic": ("chain_sum", "products", "simple_equations"),
    "strings": ("spell_backward", "letter_counting", "word_sorting"),
    "logic": ("family_relationships", "ab", "color_cube_rotation"),
    "number_theory": ("gcd", "prime_factorization", "count_bits"),
}
"""Skill domain -> names of its tasks."""


def folder_of(model: str | Path) -> str:
    """The folder that a name on the command line stands for: the shipped `tiny`, or the model that a run trained; anything
    else as it is.

    Raises:
        UserError: the run has not finished, so it has no model yet.
    """
    if str(model) == "tiny":
        return str(TINY)
    path = Path(model)
    if not (path / "config.toml").is_file():
        return str(model)
    if not (path / "model").is_dir():
        raise UserError(f"{model}: this run has not finished, so it has no model yet; the same train command goes on")
    return str(path / "model")


def tiny_tasks(domain: str | None = None) -> dict[str, TaskConfig]:
    """The tasks of `tiny` with the parameters it was trained on; all of them, or those of one domain.

    Raises:
        KeyError: unknown domain.
    """
    file = Path(__file__).parent / "tiny_tasks.toml"
    tasks = tomllib.loads(file.read_text(encoding="utf-8"))["tasks"]
    names = DOMAINS[domain] if domain is not None else tuple(name for group in DOMAINS.values() for name in group)
    return {name: TaskConfig(**tasks[name]) for name in names}
