"""The exact sum of LoRA adapters as one adapter, optionally compressed to a lower rank with a stated error."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coterie.errors import UserError
from coterie.merging.adapters import Adapter, Pair
from coterie.merging.checkpoints import Reader, is_embedding
from coterie.merging.lowrank import compress
from coterie.merging.numbers import module_type

if TYPE_CHECKING:
    from coterie.merging.merge import Plan


def concat(planned: Plan, folder: Path) -> dict[str, Any]:
    """Write ``adapter_model.safetensors`` and ``adapter_config.json``; returns the receipt's figures.

    For every module ``B' = [lambda w_1 s_1 B_1, ...]`` and ``A' = [A_1; ...]`` with scale 1, so ``B' A'`` is the weighted sum
    itself and negative weights keep their sign. Modules that only some experts adapt get a smaller rank of their own.

    Raises:
        UserError: an expert retrains whole tensors (``modules_to_save``), which an adapter of factors cannot hold.
    """
    from safetensors.torch import save_file

    recipe, inputs = planned.recipe, planned.inputs
    members = [m for m in inputs.members if isinstance(m, Adapter)]
    for expert, member in zip(recipe.experts, members, strict=True):
        if member.full:
            raise UserError(f"adapter {expert.label}: retrains {', '.join(member.full)} (modules_to_save), which has no factors; "
                            "use --method sum")  # fmt: skip
    out: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    sums: dict[str, list[float]] = {}
    with Reader() as reader:
        for name in sorted({n for m in members for n in m.pairs}):
            pairs = [m.pairs.get(name) for m in members]
            left, right, squares = _stack(reader, pairs, [recipe.lam * e.weight for e in recipe.experts])
            full = _square(left, right)
            kept = full
            if recipe.rank is not None and recipe.rank < left.shape[1]:
                found = compress(left, right, recipe.rank)
                left, right, kept = found.left, found.right, found.kept
            first = next(p for p in pairs if p is not None)
            out.update(_tensors(name, first, left, right, planned))
            ranks[name.removesuffix(".weight")] = left.shape[1]
            row = sums.setdefault(module_type(name), [0.0] * (2 + len(members)))
            for i, value in enumerate((full, kept, *squares)):
                row[i] += value
    save_file(out, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    text = json.dumps(_config(members[0], ranks, inputs, recipe.base), indent=2, sort_keys=True) + "\n"
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")
    file = folder / "adapter_model.safetensors"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return {**_report([e.label for e in recipe.experts], sums, ranks), "output_sha256": {file.name: digest},
            "output_bytes": file.stat().st_size}  # fmt: skip


def _stack(reader: Reader, pairs: list[Pair | None], coefficients: list[float]) -> tuple[Tensor, Tensor, list[float]]:
    """``left [rows, R]``, ``right [R, cols]`` of the weighted sum, and every expert's own squared norm."""
    lefts, rights, squares = [], [], []
    for pair, c in zip(pairs, coefficients, strict=True):
        if pair is None:
            squares.append(0.0)
            continue
        left, right = pair.factors(reader)  # [rows, r], [r, cols]
        squares.append(_square(left, right))
        lefts.append(left * c)
        rights.append(right)
    return torch.cat(lefts, 1), torch.cat(rights), squares


def _square(left: Tensor, right: Tensor) -> float:
    """``|left @ right|^2`` from the two small Gram matrices."""
    a, b = left.double(), right.double()
    return float(((a.T @ a) * (b @ b.T)).sum())


def _tensors(name: str, pair: Pair, left: Tensor, right: Tensor, planned: Plan) -> dict[str, Tensor]:
    """The module's factors under peft's names; transposed modules store them the other way round."""
    dtype = torch.float32 if planned.recipe.dtype == "base" else getattr(torch, planned.recipe.dtype)
    a, b = (left.T, right.T) if pair.transposed else (right, left)  # [R, in], [out, R]
    a, b = a.to(dtype).contiguous(), b.to(dtype).contiguous()
    module = f"base_model.model.{name.removesuffix('.weight')}"
    if "lora_embedding_" in pair.a.name or (is_embedding(name) and pair.transposed):
        return {f"{module}.lora_embedding_A": a, f"{module}.lora_embedding_B": b}
    return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}


def _config(first: Adapter, ranks: dict[str, int], inputs: Any, base: Path) -> dict[str, Any]:
    usual = max(set(ranks.values()), key=lambda r: (list(ranks.values()).count(r), r))
    other = {n: r for n, r in ranks.items() if r != usual}
    return {
        **first.config,
        "base_model_name_or_path": first.config.get("base_model_name_or_path") or str(base),
        "r": usual,
        "lora_alpha": usual,  # scale 1: lambda, weights and scales are in B
        "rank_pattern": other,
        "alpha_pattern": other,
        "use_rslora": False,
        "target_modules": sorted(ranks),
        "exclude_modules": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _report(labels: list[str], sums: dict[str, list[float]], ranks: dict[str, int]) -> dict[str, Any]:
    def norms(row: list[float]) -> dict[str, Any]:
        deltas = {n: math.sqrt(v) for n, v in zip(labels, row[2:], strict=True)}
        return {"deltas": deltas, "merged_update": math.sqrt(row[0]),
                "squared_update_over_sum_of_squared_deltas": row[0] / sum(row[2:]) if sum(row[2:]) else None}  # fmt: skip

    whole = [sum(column) for column in zip(*sums.values(), strict=True)]
    share = whole[1] / whole[0] if whole[0] else 1.0
    return {
        "norms": {
            "scope": "L2 of scale * B A over all adapted modules; per_module_type: over all modules of that type",
            "all": norms(whole),
            "per_module_type": {n: norms(row) for n, row in sorted(sums.items())},
        },
        "lora": {
            "ranks": {"smallest": min(ranks.values()), "largest": max(ranks.values())},
            "energy_kept": share,
            "relative_error": math.sqrt(max(0.0, 1 - share)),
        },
    }
