"""Problems from a JSONL file: one object per line with ``prompt`` and ``answer``, optionally ``verifier`` and ``tests``.

The dataset's name in a problem id is the start of the file's SHA-256, and the index is the line number, so an id means the
same line on every machine that holds the same file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any

from coterie.config import TaskConfig
from coterie.errors import UserError
from coterie.tasks.base import Split, UnknownProblem, hashed, id_prefix, split_of_text
from coterie.tasks.composite import check_verifier, verifier_name
from coterie.types import Problem

KIND = "jsonl"
KNOWN_KEYS = frozenset({"prompt", "answer", "verifier", "tests"})


class JsonlTask:
    """The lines of one file.

    Raises:
        UserError: missing file, or a line that is not what it should be (file and line are named).
    """

    def __init__(self, name: str, cfg: TaskConfig, custom: Collection[str] = ()) -> None:
        self.name = name
        self.suffix = cfg.suffix
        self.path = Path(cfg.path)
        if not cfg.path:
            raise UserError(f'task {name}: kind = "jsonl" needs a path')
        if not self.path.is_file():
            raise UserError(f"task {name}: {cfg.path}: no such file")
        data = self.path.read_bytes()
        self.digest = hashlib.sha256(data).hexdigest()[:12]
        self._lines: dict[int, dict[str, Any]] = {}
        for number, raw in enumerate(data.split(b"\n"), start=1):
            if raw.strip():
                self._lines[number] = _parse(raw, f"{self.path}:{number}", cfg.verifier, custom)
        if not self._lines:
            raise UserError(f"task {name}: {cfg.path} has no problems")

    @property
    def prefix(self) -> str:
        return id_prefix(KIND, self.digest, {})

    def problem(self, index: int) -> Problem:
        """The problem on line ``index`` (from 1)."""
        line = self._lines.get(index)
        if line is None:
            raise UnknownProblem(f"task {self.name}: {self.path} has no problem on line {index}")
        return Problem(
            id=f"{self.prefix}#{index}",
            task=self.name,
            prompt=line["prompt"] + self.suffix,
            reference=line["reference"],
            verifier=line["verifier"],
            metadata={"question": line["prompt"]},
        )

    def sample(self, split: Split, stream: str, counter: int) -> Problem:
        lines = self._by_split[split]
        if not lines:
            raise UserError(
                f"task {self.name}: none of the {len(self._lines)} problems of {self.path} falls into the {split} split "
                f"(a tenth is held out, by prompt text); add more lines"
            )
        return self.problem(lines[hashed(self.prefix, split, stream, counter) % len(lines)])

    @cached_property
    def _by_split(self) -> dict[Split, list[int]]:
        """Line numbers per split; a prompt that occurs on several lines counts once, at its first."""
        out: dict[Split, list[int]] = {"train": [], "eval": []}
        seen: set[str] = set()
        for number, line in self._lines.items():
            if line["prompt"] not in seen:
                seen.add(line["prompt"])
                out[split_of_text(line["prompt"])].append(number)
        return out


def _parse(raw: bytes, where: str, override: str, custom: Collection[str]) -> dict[str, Any]:
    try:
        line = json.loads(raw)
    except json.JSONDecodeError as e:
        raise UserError(f"{where}: not valid JSON: {e.msg} at column {e.colno}") from e
    except (ValueError, RecursionError) as e:  # no UTF-8, a number of thousands of digits, deep nesting
        raise UserError(f"{where}: not valid JSON: {e}") from e
    if not isinstance(line, dict):
        raise UserError(f"{where}: expected an object with `prompt` and `answer`, got {type(line).__name__}")
    unknown = sorted(set(line) - KNOWN_KEYS)
    if unknown:
        raise UserError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(sorted(KNOWN_KEYS))}")
    prompt = line.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise UserError(f"{where}: `prompt` must be a text that is not empty")
    if not _encodable(line):
        raise UserError(f"{where}: holds half of a surrogate pair (\\ud800 to \\udfff), which is no text")
    verifier = verifier_name(line.get("verifier", "code" if "tests" in line else "exact"), where)
    if override != "auto":
        verifier = override
    check_verifier(verifier, where, custom)
    return {"prompt": prompt, "verifier": verifier, "reference": _reference(line, verifier, where)}


def _encodable(line: dict[str, Any]) -> bool:
    try:
        json.dumps(line, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _reference(line: dict[str, Any], verifier: str, where: str) -> str:
    if verifier in ("task", "task_partial"):
        raise UserError(f"{where}: verifier {verifier!r} is for reasoning-gym tasks; use exact, numeric, math or code")
    key = "tests" if verifier == "code" else "answer"
    value = line.get(key)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(f"{where}: `{key}` must be a text or a number (verifier {verifier})")
    return str(value)
