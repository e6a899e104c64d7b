"""Merging: recipe in, model folder with a receipt out. Weights stream through in blocks; the folder appears when complete."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.errors import CoterieError, UserError
from coterie.merging.adapters import Adapter
from coterie.merging.checkpoints import FLOATS
from coterie.merging.deltas import Block, one_thread_each, stream
from coterie.merging.inputs import Entry, Inputs, open_inputs
from coterie.merging.receipt import Tally, file_hash, settings_files, write_documents
from coterie.merging.recipe import Recipe
from coterie.merging.update import Update
from coterie.merging.writer import ITEM_BYTES, SHARD_BYTES, OutputFolder, ShardWriter, Slot, check_free

CODES = {name: code for code, name in FLOATS.items()}
DEFAULT_CHUNK_MIB = 64


@dataclass(frozen=True)
class Plan:
    """A recipe that fits its inputs."""

    recipe: Recipe
    inputs: Inputs
    warnings: tuple[str, ...]

    def code(self, entry: Entry) -> str:
        """Dtype code under which a tensor is written."""
        return entry.base.code if self.recipe.dtype == "base" or not entry.merged else CODES[self.recipe.dtype]

    @property
    def order(self) -> list[Entry]:
        """Entries in the order they are read and written: wide dtypes first, as the format's readers need."""
        return sorted(self.inputs.entries, key=lambda e: (-ITEM_BYTES[self.code(e)], e.name))

    def to_json(self) -> dict[str, Any]:
        size = sum(e.base.numel * ITEM_BYTES[self.code(e)] for e in self.inputs.entries)
        return {
            "recipe": self.recipe.to_json(),
            "tensors": len(self.inputs.entries),
            "values": sum(e.base.numel for e in self.inputs.entries),
            "output_bytes": size,
            "dtypes": self.inputs.dtypes(),
            "notes": list(self.inputs.notes),
            "warnings": list(self.warnings),
        }


def plan(recipe: Recipe, out: Path | None = None) -> Plan:
    """Open all headers and check the recipe against them. Reads no weights.

    Raises:
        UserError: inputs that do not fit each other or the recipe, or an output folder that is in use.
    """
    if out is not None:
        check_free(out)
    inputs = open_inputs(recipe.base, recipe.experts, recipe.keep_base_vocab)
    made = Plan(recipe, inputs, ())
    if recipe.method == "lora_concat":
        full = [e.label for e, m in zip(recipe.experts, inputs.members, strict=True) if not isinstance(m, Adapter)]
        if full:
            raise UserError(f"merge: --method lora_concat joins LoRA adapters; {', '.join(full)} is a full model")
        return made
    low = sorted({FLOATS[made.code(e)] for e in inputs.entries if e.merged} & {"bfloat16", "float16"})
    if recipe.method == "mean" and len(recipe.experts) > 1 and low and not recipe.allow_rounded_mean:
        raise UserError(
            f"merge: a mean of {len(recipe.experts)} experts written as {low[0]} loses most of its update to rounding; write it "
            "with --dtype float32, use --method sum, or accept the loss with --allow-rounded-mean (the receipt states it)"
        )
    notes = [f"written as {low[0]}: the receipt states how much of the update survives rounding"] if low else []
    if left := settings_files(recipe.base)[1]:
        notes.append(
            f"not copied from the base, as it is not known to belong to config or tokenizer: {', '.join(left)}"
        )
    return Plan(recipe, inputs, tuple(notes))


def merge(
    recipe: Recipe,
    out: Path | str,
    *,
    chunk_mib: int = DEFAULT_CHUNK_MIB,
    shard_bytes: int = SHARD_BYTES,
    hash_inputs: bool = True,
    command: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Carry out a recipe. Returns the receipt, which is also written to ``out/merge_receipt.json``.

    Memory: ``chunk_mib`` of working blocks above what the process needs anyway, whatever the model's size; adapters add their
    own factors of one tensor; ``svd`` adds per expert ``(rows + cols) * rank`` values of the largest matrix, and 64 MiB or
    ``(rows + cols) * (rank + 16)`` values while it is decomposed. ``lora_concat`` does not stream: it holds the whole adapter it
    writes, in fp32.

    Args:
        progress: called with (values done, values in all) after every block.
    Raises:
        UserError: see :func:`plan`. Nothing is written then.
        CoterieError: non-finite weights, or a disk that refuses. Nothing remains at ``out``.
    """
    from coterie.merging.concat import concat

    out = Path(out)
    planned = plan(recipe, out)
    began = time.perf_counter()
    files = {f for m in (planned.inputs.base, *planned.inputs.members) for f in m.files}
    try:
        with ThreadPoolExecutor(1, "coterie-merge-hash") as pool, OutputFolder(out) as folder:
            hashes: dict[Path, Future[str]] = (
                {f: pool.submit(file_hash, f) for f in sorted(files)} if hash_inputs else {}
            )
            try:
                if recipe.method == "lora_concat":
                    result = concat(planned, folder.path)
                else:
                    with nullcontext() if recipe.method == "svd" else one_thread_each():
                        result = _merge_full(planned, folder.path, chunk_mib, shard_bytes, progress)
                result["input_sha256"] = {str(f): h.result() for f, h in hashes.items()}
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            result["seconds"] = round(time.perf_counter() - began, 3)
            return write_documents(planned, folder.path, result, command)
    except OSError as e:  # the disk is an edge: say what could not be written
        raise CoterieError(f"merge: cannot write {out}: {e}; free some space or name another folder") from e


def _merge_full(
    planned: Plan, folder: Path, chunk_mib: int, shard_bytes: int, progress: Callable[[int, int], None] | None
) -> dict[str, Any]:
    recipe, inputs = planned.recipe, planned.inputs
    order = planned.order
    update = Update(recipe, inputs, chunk_mib)
    writer = ShardWriter(folder, [Slot(e.name, planned.code(e), e.base.shape) for e in order], shard_bytes)
    tally = Tally([e.label for e in recipe.experts])
    total, done = sum(e.base.numel for e in order), 0
    try:
        for block in stream(inputs, order, chunk_mib, recipe.compute_dtype):
            if block.entry.merged:
                merged = update(block)  # [r, cols]
                dtype = getattr(torch, FLOATS[planned.code(block.entry)])
                written = (block.base + merged).to(dtype)  # [r, cols]
                tally.add(block, merged, written)
            else:
                written = _same_buffer(block, inputs)
            writer.write(block.entry.name, written)
            done += block.base.numel()
            if progress is not None:
                progress(done, total)
        writer.close()
    finally:
        writer.abort()
    return {**tally.to_json(), **update.report(), "output_sha256": writer.hashes, "output_bytes": writer.total_bytes}


def _same_buffer(block: Block, inputs: Inputs) -> Tensor:
    for expert, values in zip(inputs.experts, block.deltas, strict=True):
        if not torch.equal(values, block.base):
            raise CoterieError(
                f"expert {expert.label}: buffer {block.entry.name} ({block.entry.base.code}) differs from the base's"
            )
    return block.base
