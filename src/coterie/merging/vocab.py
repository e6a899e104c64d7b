"""Rows of embeddings and output heads belong to tokens: experts are matched with the base by token text, never by luck."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from coterie.errors import UserError
from coterie.merging.checkpoints import few


@dataclass(frozen=True, slots=True)
class RowMap:
    """For each base row, the expert's row, or -1: the expert has no such token and leaves the row as it is."""

    rows: tuple[int, ...]
    note: str


def token_rows(folder: Path) -> dict[str, int] | None:
    """Token text -> row, from the folder's tokenizer files; None if there are none."""
    file = folder / "tokenizer.json"
    if file.is_file():
        data = json.loads(file.read_text(encoding="utf-8"))
        vocab = (data.get("model") or {}).get("vocab") or {}
        rows = dict(vocab) if isinstance(vocab, dict) else {entry[0]: i for i, entry in enumerate(vocab)}
        rows.update({t["content"]: t["id"] for t in data.get("added_tokens") or ()})
        return rows
    rows = {}
    for name in ("vocab.json", "added_tokens.json"):
        if (folder / name).is_file():
            rows.update(json.loads((folder / name).read_text(encoding="utf-8")))
    return rows or None


def match_rows(base: Path, expert: Path, base_rows: int, expert_rows: int, drop: bool) -> RowMap | None:
    """How the expert's rows map onto the base's; None if they are the same rows.

    Rows that no token names (padding) are matched by position. With ``drop`` tokens that only one side has are left out:
    the merged model keeps the base's vocabulary.

    Raises:
        UserError: one side has tokens the other lacks (without ``drop``), or rows differ and there is no tokenizer.
    """
    ours, theirs = token_rows(base), token_rows(expert)
    if ours is None or theirs is None:
        if base_rows != expert_rows:
            raise UserError(
                f"expert {expert}: {expert_rows} vocabulary rows, base {base_rows}, and no tokenizer.json in both folders "
                "to match them by token text"
            )
        return None
    ours = {t: i for t, i in ours.items() if i < base_rows}
    theirs = {t: i for t, i in theirs.items() if i < expert_rows}
    lacking, extra = sorted(set(ours) - set(theirs)), sorted(set(theirs) - set(ours))
    if (lacking or extra) and not drop:
        parts = [f"has tokens the base lacks ({few(extra)})"] if extra else []
        parts += [f"lacks tokens of the base ({few(lacking)})"] if lacking else []
        raise UserError(
            f"expert {expert}: its vocabulary {' and '.join(parts)}; --vocab base keeps the base's vocabulary and matches "
            "the shared tokens by text"
        )
    return _map(ours, theirs, base_rows, expert_rows, lacking, extra)


def _map(
    ours: dict[str, int], theirs: dict[str, int], base_rows: int, expert_rows: int, lacking: list[str], extra: list[str]
) -> RowMap | None:
    named = set(theirs.values())
    rows = [i if i < expert_rows and i not in named else -1 for i in range(base_rows)]
    moved = 0
    for text, i in ours.items():
        rows[i] = theirs.get(text, -1)
        moved += rows[i] not in (i, -1)
    if base_rows == expert_rows and rows == list(range(base_rows)):
        return None
    parts = [f"{moved} vocabulary rows moved to the base's order"] if moved else []
    parts += [f"expert's tokens left out: {few(extra)}"] if extra else []
    parts += [f"base tokens the expert lacks, left as they are: {few(lacking)}"] if lacking else []
    parts += [f"{expert_rows} rows against {base_rows}"] if base_rows != expert_rows else []
    return RowMap(tuple(rows), "; ".join(parts))
