"""Hugging Face model folders, read by row ranges without ever holding a whole tensor.

Only headers are read when a folder is opened. Weights are read with positional reads of the byte ranges the header
names, rather than through a memory map: pages of a map count as resident memory, and the promise here is that memory
does not grow with the model.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
PLAIN = {**FLOATS, "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}
_BUFFERS = re.compile(r"(rotary_emb\.inv_freq|\.attn\.masked_bias)$")  # recomputed by the model, never trained
_HEADS = re.compile(r"(^|\.)(lm_head|embed_out)\.weight$")
_EMBEDDINGS = re.compile(r"(^|\.)(embed_tokens|wte|embed_in|word_embeddings|tok_embeddings)\.weight$")
_QUANTISED = re.compile(
    r"\.(qweight|qzeros|scales|weight_scale|weight_scale_inv|absmax|SCB|quant_state\S*|weight_packed)$"
)
_HEADER_LIMIT = 100 << 20


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. It is seen as a matrix ``[rows, cols]``: the last axis is ``cols``, a vector has one column."""

    name: str
    file: Path
    code: str  # safetensors dtype code: "F32", "BF16", ...
    shape: tuple[int, ...]
    start: int  # absolute byte offset in the file

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def cols(self) -> int:
        return self.shape[-1] if len(self.shape) > 1 else 1

    @property
    def rows(self) -> int:
        return self.numel // self.cols if self.cols else 0

    @property
    def is_float(self) -> bool:
        return self.code in FLOATS


@dataclass(frozen=True)
class Checkpoint:
    """A full model folder: names, shapes and places of its tensors, and its config."""

    folder: Path
    config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]
    tied: bool
    files: tuple[Path, ...]  # exactly those that are read
    notes: tuple[str, ...] = ()  # files and tensors left out, each named
    stray_head: str | None = None  # a head stored although the config says tied

    @property
    def embedding(self) -> str | None:
        return next((n for n in self.tensors if _EMBEDDINGS.search(n)), None)

    @property
    def head(self) -> str | None:
        return next((n for n in self.tensors if _HEADS.search(n)), None)

    def get(self, name: str) -> TensorInfo | None:
        """The tensor a model would use under ``name``: the head of a tied model is its embedding."""
        if name in self.tensors:
            return self.tensors[name]
        if self.tied and _HEADS.search(name) and self.embedding:
            return self.tensors[self.embedding]
        return None

    def dtypes(self) -> dict[str, int]:
        """Number of values per dtype."""
        out: dict[str, int] = {}
        for t in self.tensors.values():
            key = PLAIN.get(t.code, t.code)
            out[key] = out.get(key, 0) + t.numel
        return out


def is_head(name: str) -> bool:
    return bool(_HEADS.search(name))


def is_embedding(name: str) -> bool:
    return bool(_EMBEDDINGS.search(name))


def _is_buffer(info: TensorInfo) -> bool:
    causal_mask = info.name.endswith(".attn.bias") and len(info.shape) == 4
    return causal_mask or bool(_BUFFERS.search(info.name))


def is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file()


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the config and the headers of a model folder. No weight is read.

    Raises:
        UserError: not a folder, no safetensors, quantised, damaged or incomplete shards, or two sets of weights.
    """
    if not folder.is_dir():
        raise UserError(
            f"model {folder}: no such folder; a model of the Hub must be fetched first: hf download NAME --local-dir DIR"
        )
    config = read_json(folder / "config.json", f"model {folder}")
    refuse_quantised(config, folder)
    files, named, notes = _weight_files(folder)
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for info in read_header(file):
            if named is not None and named.get(info.name) != file.name:
                notes.append(f"{file.name}: tensor {info.name} is not in the index; ignored")
                continue
            tensors[info.name] = info
    lacking = sorted(set(named or ()) - set(tensors))
    if lacking:
        raise UserError(
            f"model {folder}: the index names tensors that no shard holds: {few(lacking)}; fetch the shards again"
        )
    for name, info in list(tensors.items()):
        if info.code not in PLAIN or _QUANTISED.search(name):
            raise UserError(
                f"model {folder}: tensor {name} ({info.code}) is quantised; merge the unquantised model, quantise the result"
            )
        if _is_buffer(info):
            notes.append(f"buffer {name}: recomputed by the model; left out")
            del tensors[name]
    tied = _says_tied(config, folder)
    head = next((n for n in tensors if is_head(n)), None)
    stray = head if tied and head and any(is_embedding(n) for n in tensors) else None
    return Checkpoint(folder, config, dict(sorted(tensors.items())), tied, tuple(files), tuple(notes), stray)


def read_json(path: Path, what: str) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{what}: {path.name} is missing")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise UserError(f"{what}: {path.name} is not valid JSON: {e}") from e
    if not isinstance(data, dict):
        raise UserError(f"{what}: {path.name} holds {type(data).__name__}, not an object")
    return data


def refuse_quantised(config: dict[str, Any], folder: Path) -> None:
    if quant := config.get("quantization_config"):
        kind = quant.get("quant_method", "unknown") if isinstance(quant, dict) else quant
        raise UserError(f"model {folder}: quantised ({kind}); merge the unquantised model, then quantise the result")


def read_header(file: Path) -> list[TensorInfo]:
    """Names, dtypes, shapes and absolute offsets of one safetensors file.

    Raises:
        UserError: not a safetensors file, or shorter than its header says (a broken download).
    """
    size = file.stat().st_size
    with file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if not 2 <= length <= min(size - 8, _HEADER_LIMIT):
            raise UserError(f"{file}: not a safetensors file, or cut short")
        try:
            header = json.loads(f.read(length))
            items = [
                (n, e["dtype"], tuple(e["shape"]), e["data_offsets"]) for n, e in header.items() if n != "__metadata__"
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise UserError(f"{file}: broken safetensors header ({type(e).__name__}: {e})") from e
    out = []
    for name, code, shape, (begin, end) in items:
        if 8 + length + end > size:
            raise UserError(f"{file}: cut short ({size} bytes, {8 + length + end} expected); fetch it again")
        out.append(TensorInfo(name, file, code, shape, 8 + length + begin))
    return out


def _weight_files(folder: Path) -> tuple[list[Path], dict[str, str] | None, list[str]]:
    """The safetensors files that make up the model, the index's map (sharded only), and notes on what is left out."""
    present = sorted(p.name for p in folder.glob("*.safetensors") if not p.name.startswith("adapter_"))
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        named = read_json(index, f"model {folder}").get("weight_map")
        if not isinstance(named, dict) or not named:
            raise UserError(f"model {folder}: {index.name} has no weight_map")
        shards = sorted(set(named.values()))
        if single.is_file() and single.name not in shards:
            raise UserError(
                f"model {folder}: holds two sets of weights, {single.name} and the shards of {index.name}; "
                "loaders disagree on which one counts: remove the one that is not meant"
            )
        lacking = [s for s in shards if not (folder / s).is_file()]
        if lacking:
            raise UserError(f"model {folder}: shards are missing: {few(lacking)}")
        extra = [f"file {n}: not named by the index; ignored" for n in present if n not in shards]
        return [folder / s for s in shards], named, extra
    if single.is_file():
        return [single], None, [f"file {n}: next to {single.name}; ignored" for n in present if n != single.name]
    pickles = [p.name for p in folder.glob("*.bin")] + [p.name for p in folder.glob("*.pt")]
    if pickles:
        raise UserError(f"model {folder}: only pickled weights ({few(pickles)}); save it as safetensors first")
    hint = f" (found {few(present)}, but no index)" if present else ""
    raise UserError(f"model {folder}: no model.safetensors and no model.safetensors.index.json{hint}")


def _says_tied(config: dict[str, Any], folder: Path) -> bool:
    for scope in (config, config.get("text_config") or {}):
        if "tie_word_embeddings" in scope:
            return bool(scope["tie_word_embeddings"])
    try:
        from transformers import AutoConfig  # the model class knows its default

        return bool(getattr(AutoConfig.from_pretrained(folder), "tie_word_embeddings", False))
    except (ValueError, KeyError, OSError) as e:
        raise UserError(
            f"model {folder}: config.json does not say whether embeddings are tied (tie_word_embeddings)"
        ) from e


def few(names: list[str], most: int = 4) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


class Reader:
    """Positional reads of row ranges. One per thread of use; closes its files on exit."""

    def __init__(self) -> None:
        import numpy as np

        self._fds: dict[Path, int] = {}
        self._scratch = np.empty(0, np.uint8)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def rows(self, info: TensorInfo, first: int, last: int, reuse: bool = False) -> Tensor:
        """Rows ``first:last`` in the stored dtype, ``[last - first, cols]``. ``reuse``: valid until the next such call."""
        import numpy as np
        import torch

        dtype: torch.dtype = getattr(torch, PLAIN[info.code])
        width = info.cols * dtype.itemsize
        size = (last - first) * width
        if reuse and len(self._scratch) < size:
            self._scratch = np.empty(size, np.uint8)
        buffer = self._scratch[:size] if reuse else np.empty(size, np.uint8)
        self.fill(info, first * width, buffer.data)
        if not len(buffer):
            return torch.empty((last - first, info.cols), dtype=dtype)
        return torch.from_numpy(buffer).view(dtype).view(last - first, info.cols)  # [r, cols]

    def fill(self, info: TensorInfo, skip: int, view: memoryview) -> None:
        """Fill ``view`` with a tensor's bytes from its ``skip``-th on."""
        fd = self._fds.get(info.file)
        if fd is None:
            fd = self._fds[info.file] = os.open(info.file, os.O_RDONLY)
        done = 0
        while done < len(view):
            got = os.preadv(fd, [view[done:]], info.start + skip + done)
            if got == 0:
                raise UserError(f"{info.file}: cut short while reading {info.name}; was it changed during the merge?")
            done += got

    def gather(self, info: TensorInfo, wanted: list[int]) -> Tensor:
        """The named rows in the stored dtype, ``[len(wanted), cols]``; neighbours are read in one go."""
        import torch

        return torch.cat([self.rows(info, a, b) for a, b in _runs(wanted)])  # [r, cols]


def _runs(wanted: list[int]) -> Iterator[tuple[int, int]]:
    start = previous = wanted[0]
    for row in wanted[1:]:
        if row != previous + 1:
            yield start, previous + 1
            start = row
        previous = row
    yield start, previous + 1
