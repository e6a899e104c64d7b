"""Base and experts opened side by side: which tensor of whom belongs to which, or why they do not fit. Headers only."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coterie.errors import UserError
from coterie.merging.adapters import Adapter, Pair, open_adapter
from coterie.merging.checkpoints import (
    PLAIN,
    Checkpoint,
    Reader,
    TensorInfo,
    few,
    is_adapter,
    is_embedding,
    is_head,
    open_checkpoint,
)
from coterie.merging.recipe import Expert
from coterie.merging.vocab import RowMap, match_rows

# config keys that may differ between a base and what was trained from it
_SHAPE_KEYS = ("model_type", "architectures", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
               "intermediate_size", "head_dim", "rope_theta", "rope_parameters", "rms_norm_eps", "hidden_act")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Full:
    """An expert's whole tensor; its delta is expert - base."""

    info: TensorInfo
    rows: RowMap | None = None


Source = Full | Pair | None  # None: the expert (an adapter) does not touch the tensor, its delta is zero


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the merged model: where base and experts keep it."""

    name: str
    base: TensorInfo
    sources: tuple[Source, ...]  # one per expert

    @property
    def merged(self) -> bool:
        """Floats are merged; integer and boolean buffers are copied from the base."""
        return self.base.is_float


@dataclass(frozen=True)
class Inputs:
    base: Checkpoint
    experts: tuple[Expert, ...]
    members: tuple[Checkpoint | Adapter, ...]
    entries: tuple[Entry, ...]
    untied: bool  # base is tied, an expert is not: the result has an output head of its own
    notes: tuple[str, ...]

    def dtypes(self) -> dict[str, dict[str, int]]:
        """Values per dtype, of the base and of each expert."""
        out = {"base": self.base.dtypes()}
        for expert, member in zip(self.experts, self.members, strict=True):
            if isinstance(member, Checkpoint):
                out[expert.label] = member.dtypes()
            else:
                count: dict[str, int] = {}
                halves = [t for p in member.pairs.values() for t in (p.a, p.b)]
                for t in (*halves, *member.full.values()):
                    count[PLAIN[t.code]] = count.get(PLAIN[t.code], 0) + t.numel
                out[expert.label] = count
        return out


def open_inputs(base_path: Any, experts: Sequence[Expert], keep_base_vocab: bool = False) -> Inputs:
    """Open the headers of base and experts and match every tensor.

    Raises:
        UserError: inputs that are not one base and what was trained from it; the message names the tensor or setting.
    """
    if is_adapter(base_path):
        raise UserError(f"base {base_path}: is an adapter; give the full model it was trained from")
    base = open_checkpoint(base_path)
    members = tuple(open_adapter(e.path, base) if is_adapter(e.path) else open_checkpoint(e.path) for e in experts)
    notes = [f"base: {n}" for n in base.notes]
    for expert, member in zip(experts, members, strict=True):
        notes += [f"{expert.label}: {n}" for n in member.notes]
        if isinstance(member, Checkpoint):
            _same_config(base, member, expert)
        else:
            named = member.config.get("base_model_name_or_path")
            notes.append(f"{expert.label}: adapter of {named or 'an unnamed base'}; matched with the base by shapes")
    _settle_stray_heads((base, *(m for m in members if isinstance(m, Checkpoint))), notes)
    untied = base.tied and any(m.unties if isinstance(m, Adapter) else not m.tied for m in members)
    names = _names(base, members, untied)
    if untied:
        notes.append(
            "base is tied but an expert changes embedding and output head apart: the result gets a head of its own"
        )
    maps: dict[tuple[int, int, int], RowMap | None] = {}
    entries = []
    for name in names:
        info = base.get(name)
        assert info is not None
        sources = tuple(
            _source(name, info, m, e, base, keep_base_vocab, maps, notes, i)
            for i, (e, m) in enumerate(zip(experts, members, strict=True))
        )
        entries.append(Entry(name, info, sources))
    return Inputs(base, tuple(experts), members, tuple(entries), untied, tuple(notes))


def _names(base: Checkpoint, members: Sequence[Checkpoint | Adapter], untied: bool) -> list[str]:
    names = [n for n in base.tensors if n != base.stray_head or untied]
    if untied and not any(is_head(n) for n in names):
        heads = [m.head for m in members if isinstance(m, Checkpoint) and not m.tied and m.head]
        heads += [n for m in members if isinstance(m, Adapter) for n in (*m.pairs, *m.full) if is_head(n)]
        names.append(heads[0] if heads else "lm_head.weight")
    return sorted(names)


def _source(
    name: str,
    info: TensorInfo,
    member: Checkpoint | Adapter,
    expert: Expert,
    base: Checkpoint,
    keep_base_vocab: bool,
    maps: dict[tuple[int, int, int], RowMap | None],
    notes: list[str],
    index: int,
) -> Source:
    if isinstance(member, Adapter):
        if name in member.pairs:
            return member.pairs[name]
        return Full(member.full[name]) if name in member.full else None
    found = member.get(name)
    if found is None:
        _refuse_missing(name, base, member, expert)
        raise AssertionError
    if found.is_float != info.is_float:
        raise UserError(f"expert {expert.label}: tensor {name} is {found.code}, the base has {info.code}")
    if (
        (is_embedding(name) or is_head(name))
        and len(info.shape) == 2 == len(found.shape)
        and info.shape[1] == found.shape[1]
    ):
        key = (index, info.rows, found.rows)
        if key not in maps:
            maps[key] = match_rows(base.folder, member.folder, info.rows, found.rows, keep_base_vocab)
            if (row_map := maps[key]) is not None:
                notes.append(f"{expert.label}: {row_map.note}")
        return Full(found, maps[key])
    if found.shape != info.shape:
        raise UserError(
            f"expert {expert.label}: tensor {name} has shape {list(found.shape)}, the base {list(info.shape)}: "
            "another architecture?"
        )
    return Full(found)


def _refuse_missing(name: str, base: Checkpoint, member: Checkpoint, expert: Expert) -> None:
    lacking = sorted(n for n in base.tensors if member.get(n) is None)
    extra = sorted(n for n in member.tensors if base.get(n) is None)
    renamed = [n for n in extra if n.endswith(name) or name.endswith(n)] or difflib.get_close_matches(
        name, extra, 1, 0.7
    )
    hint = f"; it has {renamed[0]} instead: rename its tensors to the base's names" if renamed else ""
    raise UserError(f"expert {expert.label}: {len(lacking)} tensors of the base are missing ({few(lacking)}){hint}")


def _same_config(base: Checkpoint, member: Checkpoint, expert: Expert) -> None:
    for key in _SHAPE_KEYS:
        ours, theirs = base.config.get(key), member.config.get(key)
        if ours is not None and theirs is not None and ours != theirs:
            raise UserError(
                f"expert {expert.label}: {key} is {theirs!r}, the base has {ours!r}: not trained from this base"
            )
    extra = sorted(n for n in member.tensors if base.get(n) is None and not is_head(n) and n != member.stray_head)
    lacking = [n for n in base.tensors if member.get(n) is None]
    if lacking:
        _refuse_missing(lacking[0], base, member, expert)
    if extra:
        raise UserError(
            f"expert {expert.label}: has {len(extra)} tensors the base lacks ({few(extra)}); "
            "remove them (a value head?) or give the base they belong to"
        )


def _settle_stray_heads(models: Sequence[Checkpoint], notes: list[str]) -> None:
    """A tied model that stores a head: harmless if it is a copy of the embedding, a lost head if it is not."""
    for model in models:
        if model.stray_head is None:
            continue
        head, embedding = model.tensors[model.stray_head], model.tensors[model.embedding or ""]
        if head.shape != embedding.shape or head.code != embedding.code or not _equal(Reader(), head, embedding):
            raise UserError(
                f"model {model.folder}: config.json says tied, but {head.name} differs from {embedding.name}; loading it would "
                "throw one away: set tie_word_embeddings to false, or remove the head"
            )
        notes.append(f"model {model.folder}: {head.name} is a copy of the tied embedding; left out")


def _equal(reader: Reader, one: TensorInfo, two: TensorInfo, rows: int = 4096) -> bool:
    import torch

    with reader:
        return all(
            torch.equal(reader.rows(one, r, min(r + rows, one.rows)), reader.rows(two, r, min(r + rows, one.rows)))
            for r in range(0, one.rows, rows)
        )
