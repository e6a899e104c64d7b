"""What a merge leaves behind: norms, rounding loss, hashes, a receipt in JSON, a model card, and the copied documents."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import platform
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coterie.errors import CoterieError
from coterie.merging.checkpoints import FLOATS
from coterie.merging.deltas import Block
from coterie.merging.numbers import dot, module_type

if TYPE_CHECKING:
    from coterie.merging.merge import Plan

RECEIPT = "merge_receipt.json"
FORMAT = 1
# what config and tokenizers of the Hub may need besides the weights; code of their own is *.py (auto_map)
_COPIED = ("*config.json", "tokenizer.json", "tekken.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
           "vocab.txt", "merges.txt", "*.model", "*.tiktoken", "*.jinja", "chat_template.json", "*.py",
           "additional_chat_templates/*.jinja", "LICENSE*", "NOTICE*")  # fmt: skip
# weights, which are written anew or stale, and documents about the base
_REPLACED = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.gguf", "*.index.json", "README.md", ".*",
             RECEIPT)  # fmt: skip


class Tally:
    """Sums over all blocks, per module type; everything else in the receipt follows from them."""

    def __init__(self, labels: list[str]) -> None:
        self.labels = labels
        self._sums: dict[str, _Sums] = {}

    def add(self, block: Block, merged: Tensor, written: Tensor) -> None:
        """One block: the deltas as read, the intended update, and the weights as written.

        Raises:
            CoterieError: a weight is not finite.
        """
        sums = self._sums.setdefault(module_type(block.entry.name), _Sums(len(self.labels)))
        sums.values += merged.numel()
        sums.base += dot(block.base, block.base)
        for i, (d, s) in enumerate(zip(block.deltas, block.entry.sources, strict=True)):
            if s is not None:
                square = dot(d, d)
                if not math.isfinite(square):
                    raise CoterieError(
                        f"expert {self.labels[i]}: tensor {block.entry.name} holds values that are not finite"
                    )
                sums.deltas[i] += square
        real = written.to(block.base.dtype) - block.base  # [r, cols] the update that survives rounding
        squares = dot(real, real)
        if not math.isfinite(squares):
            raise CoterieError(
                f"tensor {block.entry.name}: not finite after merging (base, lambda, or {written.dtype} too narrow)"
            )
        sums.real += squares
        sums.intended += dot(merged, merged)
        sums.cross += dot(merged, real)
        sums.changed += int(torch.count_nonzero(real))

    def to_json(self) -> dict[str, Any]:
        whole = _Sums(len(self.labels))
        for s in self._sums.values():
            whole.include(s)
        return {
            "norms": {
                "scope": "L2 over all merged values of the model; per_module_type: over all tensors of that type",
                "all": whole.norms(self.labels),
                "per_module_type": {n: s.norms(self.labels) for n, s in sorted(self._sums.items())},
            },
            "rounding": {
                "meaning": "update as written (stored weights - base) against the update as computed",
                "all": whole.rounding(),
                "per_module_type": {n: s.rounding() for n, s in sorted(self._sums.items())},
            },
        }


class _Sums:
    def __init__(self, experts: int) -> None:
        self.values, self.changed = 0, 0
        self.base = self.real = self.intended = self.cross = 0.0
        self.deltas = [0.0] * experts

    def include(self, other: _Sums) -> None:
        for name in ("values", "changed", "base", "real", "intended", "cross"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.deltas = [a + b for a, b in zip(self.deltas, other.deltas, strict=True)]

    def norms(self, labels: list[str]) -> dict[str, Any]:
        apart = sum(self.deltas)
        return {
            "values": self.values,
            "base": math.sqrt(self.base),
            "deltas": {n: math.sqrt(d) for n, d in zip(labels, self.deltas, strict=True)},
            "merged_update": math.sqrt(self.intended),
            "squared_update_over_sum_of_squared_deltas": self.intended / apart if apart else None,
        }

    def rounding(self) -> dict[str, Any]:
        if self.intended == 0:
            return {
                "cosine": None,
                "energy_kept": None,
                "relative_error": 0.0,
                "share_changed": self.changed / max(1, self.values),
            }
        error = max(0.0, self.real + self.intended - 2 * self.cross)
        return {
            "cosine": self.cross / math.sqrt(self.real * self.intended) if self.real else 0.0,
            "energy_kept": self.real / self.intended,
            "relative_error": math.sqrt(error / self.intended),
            "share_changed": self.changed / self.values,
        }


def file_hash(path: Path) -> str:
    """sha256 of a file, as ``sha256sum`` and the Hub print it."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def settings_files(base: Path) -> tuple[list[str], list[str]]:
    """Names within a model folder: those a merge copies, and those it leaves behind without replacing them."""
    found = {p.relative_to(base) for pattern in _COPIED for p in base.glob(pattern) if p.is_file()}
    copied = sorted(str(p) for p in found if p.name != "config.json")
    folders = {p.parts[0] for p in found if len(p.parts) > 1}
    left = [
        p.name + "/" * p.is_dir()
        for p in sorted(base.iterdir())
        if p.relative_to(base) not in found and p.name not in folders and not any(p.match(r) for r in _REPLACED)
    ]
    return copied, left


def write_documents(planned: Plan, folder: Path, result: dict[str, Any], command: str) -> dict[str, Any]:
    """Config, tokenizer, receipt and model card. Returns the receipt."""
    adapter = planned.recipe.method == "lora_concat"
    copied = settings_files(planned.recipe.base)[0] if not adapter else []
    for name in copied:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(planned.recipe.base / name, folder / name)
    if not adapter:
        text = json.dumps(output_config(planned), indent=2) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")
    receipt = {
        "format": FORMAT,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "versions": {
            "coterie": version("coterie"),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "recipe": planned.recipe.to_json(),
        "input_dtypes": planned.inputs.dtypes(),
        "notes": list(planned.inputs.notes),
        "warnings": [*planned.warnings, *_warnings(result)],
        "tokenizer_and_settings": {"from": "base", "files": copied},
        **result,
    }
    (folder / RECEIPT).write_text(json.dumps(receipt, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(model_card(receipt, adapter), encoding="utf-8")
    return receipt


def output_config(planned: Plan) -> dict[str, Any]:
    """The base's config with the dtype and the tying that the written weights really have."""
    config = dict(planned.inputs.base.config)
    codes = {planned.code(e) for e in planned.inputs.entries if e.merged}
    if planned.recipe.dtype != "base" and len(codes) == 1:
        config.pop("torch_dtype", None)
        config["dtype"] = FLOATS[codes.pop()]
    if planned.inputs.untied:
        config["tie_word_embeddings"] = False
        if isinstance(config.get("text_config"), dict):
            config["text_config"] = {**config["text_config"], "tie_word_embeddings": False}
    return config


def _warnings(result: dict[str, Any]) -> list[str]:
    out = []
    norms = result.get("norms", {}).get("all", {})
    for label, norm in norms.get("deltas", {}).items():
        if norm > 0.5 * norms.get("base", math.inf):
            out.append(
                f"{label}: its delta is {norm / norms['base']:.2f} times as large as the base: was it trained from this base?"
            )
        if norm == 0:
            out.append(f"{label}: equals the base, its delta is zero")
    rounding = result.get("rounding", {}).get("all", {})
    if rounding.get("cosine") is not None and rounding["cosine"] < 0.99:
        out.append(
            f"rounding: the written update has cosine {rounding['cosine']:.3f} with the computed one and keeps "
            f"{rounding['energy_kept']:.0%} of its energy; write --dtype float32 to keep it whole"
        )
    return out


def model_card(receipt: dict[str, Any], adapter: bool) -> str:
    """README.md of the output: what it was made from and by which formula."""
    recipe = receipt["recipe"]
    rows = [
        f"| {e['label']} | {e['weight']:g} | {receipt['norms']['all']['deltas'][e['label']]:.4g} |"
        for e in recipe["experts"]
    ]
    settings = {
        k: recipe[k] for k in ("method", "lambda", "density", "trim_scope", "rank", "seed", "dtype", "compute_dtype")
    }
    lines = [
        "---",
        "library_name: peft" if adapter else "library_name: transformers",
        "tags: [merge, coterie]",
        "---",
        "",
        f"# Merge of {len(rows)} {'adapters' if adapter else 'experts'} ({recipe['method']})",
        "",
        f"Base: `{recipe['base']}`. {recipe['formula']}.",
        "",
        "| expert | weight | L2 norm of its delta, all values |",
        "|---|---|---|",
        *rows,
        "",
        "Settings: " + ", ".join(f"{k} {v}" for k, v in settings.items() if v is not None) + ".",
        *[f"\nWarning: {w}." for w in receipt["warnings"]],
        "",
        f"Hashes, dtypes, norms per module type and the rounding loss are in `{RECEIPT}`."
        + (f" Made by: `{receipt['command']}`" if receipt["command"] else ""),
        "",
        "Weights alone do not say whether a merge works: score the base, the experts, the merge, and each expert shrunk by the",
        "same lambda (`base + lambda * delta`), so that shrinkage is not taken for interference.",
    ]
    return "\n".join(lines) + "\n"
