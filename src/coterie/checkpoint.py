"""Checkpoints that a kill at any instant cannot spoil.

A checkpoint is a folder ``step_000100`` with ``weights.safetensors``, ``optimizer.safetensors`` and ``state.json``. It is
written under a hidden temporary name, flushed to disk, and renamed: a folder with its final name is complete. No pickle is
written or read.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.errors import CoterieError

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
_NAME = re.compile(r"step_(\d{6,})$")
_FILES = ("weights.safetensors", "optimizer.safetensors", "state.json")


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on: ``state`` is plain JSON (step, counters, swarm pool)."""

    step: int
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write ``folder/step_N`` atomically and delete all but the newest ``keep``.

    Raises:
        CoterieError: the disk refuses (full, read-only); earlier checkpoints are untouched.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step_{checkpoint.step:06d}"
    part = folder / f".{final.name}.part"
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        save_file(checkpoint.weights, part / _FILES[0])
        save_file(checkpoint.optimizer, part / _FILES[1])
        meta = {"format": FORMAT, "step": checkpoint.step, "state": checkpoint.state}
        (part / _FILES[2]).write_text(json.dumps(meta), encoding="utf-8")
        for name in _FILES:
            fsync(part / name)
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
        fsync(folder)
    except Exception as e:  # the disk is an edge: say what could not be written, keep what there was
        shutil.rmtree(part, ignore_errors=True)
        raise CoterieError(f"cannot write checkpoint {final}: {e}; free some space or choose another run_dir") from e
    for old in _complete(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def load_latest(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest complete checkpoint, or None. What is skipped is named through ``warn``."""
    if not folder.is_dir():
        return None
    for part in sorted(folder.glob(".step_*.part")):
        warn(f"{part.name}: half-written by a run that was stopped; ignored")
        shutil.rmtree(part, ignore_errors=True)
    for path in reversed(_complete(folder)):
        try:
            return load_checkpoint(path)
        except CoterieError as e:
            warn(f"{e}; skipped")
    return None


def load_checkpoint(path: Path) -> Checkpoint:
    """Read one checkpoint folder.

    Raises:
        CoterieError: missing files, foreign content, or a format this version does not know.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    missing = [n for n in _FILES if not (path / n).is_file()]
    if missing:
        raise CoterieError(f"checkpoint {path}: not complete, {', '.join(missing)} missing")
    try:
        meta = json.loads((path / _FILES[2]).read_text(encoding="utf-8"))
        found = meta["format"]
        if found != FORMAT:
            raise CoterieError(
                f"checkpoint {path}: format {found!r}, this coterie reads format {FORMAT}; "
                "resume with the version that wrote it, or start a new run_dir"
            )
        return Checkpoint(int(meta["step"]), load_file(path / _FILES[0]), load_file(path / _FILES[1]), meta["state"])
    except (SafetensorError, ValueError, KeyError, TypeError) as e:
        raise CoterieError(f"checkpoint {path}: damaged or not written by coterie ({type(e).__name__}: {e})") from e


def _complete(folder: Path) -> list[Path]:
    """Checkpoint folders by step number (9 < 10 < 100), oldest first."""
    found = [(int(m.group(1)), p) for p in folder.iterdir() if p.is_dir() and (m := _NAME.match(p.name))]
    return [p for _, p in sorted(found)]


def fsync(path: Path) -> None:
    """Flush a file, or a folder's list of names, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
