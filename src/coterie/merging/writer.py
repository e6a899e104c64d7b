"""Safetensors shards written as a stream, in a folder that appears only when it is complete.

The format's header names every offset, and all shapes are known before the first value: so the header goes first and
values follow by positional writes, without ever holding a tensor. Everything is written under a hidden name, with shards
called ``*.partial``, flushed to disk, and renamed: a kill at any instant leaves nothing that a loader would accept.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from coterie.checkpoint import fsync
from coterie.errors import CoterieError, UserError

if TYPE_CHECKING:
    from torch import Tensor

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor to be written."""

    name: str
    code: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        n = ITEM_BYTES[self.code]
        for s in self.shape:
            n *= s
        return n


class OutputFolder:
    """``with OutputFolder(path) as out``: write into ``out.path``; on success it becomes ``path``, else nothing remains.

    Raises:
        UserError: ``path`` exists and is not empty, or another process writes it now.
    """

    def __init__(self, final: Path) -> None:
        self.final = final.absolute()
        self.path = self.final.with_name(f".{self.final.name}.partial")
        self._lock: IO[bytes] | None = None

    def __enter__(self) -> OutputFolder:
        check_free(self.final)
        self.final.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self.path.with_name(f"{self.path.name}.lock").open("wb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            self._lock.close()
            raise UserError(f"output {self.final}: another process is writing it") from e
        shutil.rmtree(self.path, ignore_errors=True)  # left by a run that was killed
        self.path.mkdir()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._publish()
            else:
                shutil.rmtree(self.path, ignore_errors=True)
        finally:
            assert self._lock is not None
            Path(self._lock.name).unlink(missing_ok=True)
            self._lock.close()

    def _publish(self) -> None:
        for file in sorted(self.path.glob("*.partial")):
            file.rename(file.with_suffix(""))
        for file in self.path.rglob("*"):
            fsync(file)
        fsync(self.path)
        if self.final.is_dir():
            self.final.rmdir()  # empty, as checked
        self.path.rename(self.final)
        fsync(self.final.parent)


def check_free(final: Path) -> None:
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise UserError(f"output {final}: exists; name a new folder, nothing is overwritten")


class ShardWriter:
    """Writes ``slots`` into numbered shards of ``folder``, tensors and their rows in the order of ``slots``.

    Every file's sha256 is computed as it is written (:attr:`hashes`).
    """

    def __init__(self, folder: Path, slots: Sequence[Slot], shard_bytes: int = SHARD_BYTES) -> None:
        self.folder = folder
        sizes = [ITEM_BYTES[s.code] for s in slots]
        if sizes != sorted(sizes, reverse=True):
            raise CoterieError("writer: wide dtypes must come first, or readers meet values at odd offsets")
        self._plan = _shards(slots, shard_bytes)
        self.weight_map = {s.name: name for name, group in self._plan for s in group}
        self.total_bytes = sum(s.nbytes for s in slots)
        self.hashes: dict[str, str] = {}
        self._queue = [(name, group, s) for name, group in self._plan for s in group]
        self._fd, self._open, self._current, self._left, self._at = -1, "", "", 0, 0
        self._hash = hashlib.sha256()

    def write(self, name: str, values: Tensor) -> None:
        """Append the next rows of the tensor whose turn it is."""
        import torch

        if self._left == 0:
            self._start_tensor()
        if name != self._current:
            raise CoterieError(f"writer: {name} came while {self._current} was due")
        data = values.contiguous().view(-1).view(torch.uint8).numpy().data
        if len(data) > self._left:
            raise CoterieError(f"writer: {name} is longer than announced")
        done = 0
        while done < len(data):
            done += os.pwrite(self._fd, data[done:], self._at + done)
        self._hash.update(data)
        self._at += len(data)
        self._left -= len(data)

    def close(self) -> None:
        """Finish the last shard and write the index (if there is more than one shard).

        Raises:
            CoterieError: a tensor is missing or incomplete.
        """
        while self._left == 0 and self._queue and self._queue[0][2].nbytes == 0:
            self._start_tensor()
        if self._left or self._queue:
            raise CoterieError(f"writer: {len(self._queue) + bool(self._left)} tensors are not complete")
        self._finish_shard()
        if len(self._plan) > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(self.weight_map.items()))}
            text = json.dumps(index, indent=2) + "\n"
            (self.folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    def abort(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _start_tensor(self) -> None:
        shard, group, slot = self._queue.pop(0)
        if shard != self._open:
            self._finish_shard()
            self._open = shard
            self._fd = os.open(self.folder / f"{shard}.partial", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            header = header_bytes(group)
            os.pwrite(self._fd, header, 0)
            self._hash = hashlib.sha256(header)
            self._at = len(header)
        self._current, self._left = slot.name, slot.nbytes
        if slot.nbytes == 0 and self._queue:
            self._start_tensor()

    def _finish_shard(self) -> None:
        if self._fd >= 0:
            self.hashes[self._open] = self._hash.hexdigest()
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1


def header_bytes(slots: Iterable[Slot]) -> bytes:
    """Length and JSON header of a safetensors file that holds ``slots`` one after the other, padded to 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for s in slots:
        header[s.name] = {"dtype": s.code, "shape": list(s.shape), "data_offsets": [at, at + s.nbytes]}
        at += s.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _shards(slots: Sequence[Slot], limit: int) -> list[tuple[str, list[Slot]]]:
    groups: list[list[Slot]] = [[]]
    size = 0
    for s in slots:
        if groups[-1] and size + s.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(s)
        size += s.nbytes
    if len(groups) == 1:
        return [("model.safetensors", groups[0])]
    return [(f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors", g) for i, g in enumerate(groups)]
