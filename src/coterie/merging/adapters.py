"""LoRA adapters in peft's format, read as exact weight updates.

The update of a module is ``scale * B A`` with ``scale = alpha / r`` (``alpha / sqrt(r)`` with rslora, Kalajdzievski,
arXiv 2312.03732). It is always formed as that product: adding or averaging A's and B's apart makes cross terms
(https://github.com/huggingface/peft/issues/1155). What peft can train and this formula does not describe is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.errors import UserError
from coterie.merging.checkpoints import (
    FLOATS,
    Checkpoint,
    Reader,
    TensorInfo,
    is_embedding,
    is_head,
    read_header,
    read_json,
)

if TYPE_CHECKING:
    from torch import Tensor

_PREFIX = "base_model.model."
# peft settings under which the update is not scale * B A, with the reason shown to the user
_REFUSED = {
    "use_dora": "DoRA rescales the whole weight",
    "lora_bias": "it trains biases of its B matrices",
    "use_qalora": "QALoRA pools the inputs",
    "use_bdlora": "BD-LoRA has block-diagonal factors",
    "kasa_config": "KaSA changes the base weight",
    "monteclora_config": "MonteCLoRA samples its factors",
    "alora_invocation_tokens": "activated LoRA applies to some tokens only",
    "layer_replication": "it repeats layers of the base",
    "trainable_token_indices": "it retrains single embedding rows",
    "target_parameters": "it adapts raw parameters instead of modules",
    "megatron_config": "Megatron adapters are laid out differently",
    "arrow_config": "Arrow routes between adapters",
}
_MOVES_BASE = re.compile(
    r"(pissa|olora|corda|loftq|lora_ga)", re.IGNORECASE
)  # initialisations that change the base weight


@dataclass(frozen=True, slots=True)
class Pair:
    """One adapted tensor: ``delta = scale * B A`` (transposed for embeddings and for Conv1D layers)."""

    a: TensorInfo  # [r, in]
    b: TensorInfo  # [out, r]
    scale: float
    transposed: bool

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def factors(self, reader: Reader) -> tuple[Tensor, Tensor]:
        """``left [rows, r]``, ``right [r, cols]`` in fp32 such that delta = left @ right, the scale in ``left``."""
        a = reader.rows(self.a, 0, self.a.rows).float()  # [r, in]
        b = reader.rows(self.b, 0, self.b.rows).float()  # [out, r]
        return (a.T * self.scale, b.T) if self.transposed else (b * self.scale, a)


@dataclass(frozen=True)
class Adapter:
    """A LoRA folder resolved against its base: pairs and fully retrained tensors, keyed by the base's tensor name."""

    folder: Path
    config: dict[str, Any]
    pairs: Mapping[str, Pair]
    full: Mapping[str, TensorInfo]  # modules_to_save
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()

    @property
    def unties(self) -> bool:
        """It changes only one of embedding and head, so a tied base must become untied."""
        return any(is_head(n) or is_embedding(n) for n in (*self.pairs, *self.full))


def open_adapter(folder: Path, base: Checkpoint) -> Adapter:
    """Read an adapter's config and header and match its modules with the base's tensors.

    Raises:
        UserError: not plain LoRA, pickled weights, modules the base lacks, or shapes that do not fit.
    """
    config = read_json(folder / "adapter_config.json", f"adapter {folder}")
    _refuse_variants(config, folder)
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        found = (
            "only pickled weights; save it as safetensors first"
            if list(folder.glob("adapter_model.*"))
            else "no weights"
        )
        raise UserError(f"adapter {folder}: {file.name} is missing ({found})")
    halves: dict[str, dict[str, TensorInfo]] = {}
    full: dict[str, TensorInfo] = {}
    notes: list[str] = []
    for info in read_header(file):
        _sort_tensor(info, folder, base, halves, full, notes)
    pairs = {n: _pair(n, h, config, folder, base) for n, h in sorted(halves.items())}
    if not pairs and not full:
        raise UserError(f"adapter {folder}: holds no LoRA weights")
    adapter = Adapter(folder, config, pairs, full, (file,), tuple(notes))
    if config.get("ensure_weight_tying") and base.tied and adapter.unties:
        raise UserError(f"adapter {folder}: ensure_weight_tying applies one adapter to embedding and head at once; "
                        "merge it into its base with peft and pass the full model")  # fmt: skip
    return adapter


def _refuse_variants(config: dict[str, Any], folder: Path) -> None:
    if config.get("peft_type") != "LORA":
        raise UserError(f"adapter {folder}: peft type {config.get('peft_type')!r}; only LORA adapters can be merged")
    for key, why in _REFUSED.items():
        if config.get(key):
            raise UserError(f"adapter {folder}: {key} is set ({why}), so its update is not scale * B A; "
                            "merge it into its base with peft and pass the full model")  # fmt: skip
    if config.get("bias", "none") != "none":
        raise UserError(f"adapter {folder}: bias = {config['bias']!r} trains biases of the base; "
                        "merge it into its base with peft and pass the full model")  # fmt: skip
    if _MOVES_BASE.search(str(config.get("init_lora_weights", ""))):
        raise UserError(f"adapter {folder}: init_lora_weights = {config['init_lora_weights']!r} changed its base weights at the "
                        "start; convert it to plain LoRA with peft (path_initial_model_for_weight_conversion)")  # fmt: skip


def _sort_tensor(
    info: TensorInfo,
    folder: Path,
    base: Checkpoint,
    halves: dict[str, dict[str, TensorInfo]],
    full: dict[str, TensorInfo],
    notes: list[str],
) -> None:
    name = info.name.removeprefix(_PREFIX)
    if info.code not in FLOATS:
        raise UserError(f"adapter {folder}: tensor {info.name} ({info.code}) is quantised or not a float")
    if m := re.fullmatch(r"(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?", name):
        halves.setdefault(f"{m.group(1)}.weight", {})[m.group(2)] = info
        halves[f"{m.group(1)}.weight"]["embedding" if "lora_embedding_" in name else "linear"] = info
        return
    if name.endswith(".base_layer.weight"):  # peft's copy of an embedding it adapts
        target = base.get(name.removesuffix(".base_layer.weight") + ".weight")
        if target is None or target.shape != info.shape:
            raise UserError(
                f"adapter {folder}: {info.name} has shape {list(info.shape)}, the base "
                f"{list(target.shape) if target else 'no such tensor'}: tokens were added; give the base with the same rows"
            )
        notes.append(f"tensor {info.name}: a copy of the base's own; ignored")
        return
    name = name.replace(".modules_to_save.default.", ".").replace(".modules_to_save.", ".")
    target = base.get(name)
    if target is None or target.shape != info.shape:
        raise UserError(
            f"adapter {folder}: tensor {info.name} {list(info.shape)} does not match the base "
            f"({list(target.shape) if target else 'no such tensor'})"
        )
    full[name] = info


def _pair(name: str, half: dict[str, TensorInfo], config: dict[str, Any], folder: Path, base: Checkpoint) -> Pair:
    module = name.removesuffix(".weight")
    if "A" not in half or "B" not in half:
        raise UserError(f"adapter {folder}: {module} has only one of lora_A and lora_B")
    a, b = half["A"], half["B"]
    target = base.get(name)
    if target is None:
        raise UserError(
            f"adapter {folder}: adapts {module}, which the base {base.folder} does not have: another architecture?"
        )
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
        raise UserError(
            f"adapter {folder}: {module} has factors {list(a.shape)} and {list(b.shape)}; only matrices are supported"
        )
    transposed = "embedding" in half or bool(config.get("fan_in_fan_out"))
    shape = (a.shape[1], b.shape[0]) if transposed else (b.shape[0], a.shape[1])
    if shape != target.shape:
        if shape[::-1] != target.shape or "embedding" in half:
            raise UserError(
                f"adapter {folder}: {module} updates a {list(shape)} matrix, the base has {list(target.shape)}: "
                "trained from another base?"
            )
        transposed = not transposed  # models that mix Linear and Conv1D: the shape says which this one is
    return Pair(a, b, _scale(module, a.shape[0], config), transposed)


def _scale(module: str, rank: int, config: dict[str, Any]) -> float:
    alpha = float(config.get("lora_alpha", 8))
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = float(value)
            break
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
