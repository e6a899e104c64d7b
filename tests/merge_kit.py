"""Small model folders and an independent longhand merge in fp64, for the tests of merging."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

SHAPES = {
    "model.embed_tokens.weight": (24, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.mlp.up_proj.weight": (12, 8),
    "model.layers.1.self_attn.q_proj.weight": (8, 8),
    "model.layers.1.mlp.up_proj.weight": (12, 8),
    "model.norm.weight": (8,),
    "lm_head.weight": (24, 8),
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 24, "tie_word_embeddings": False,
}  # fmt: skip


def weights(
    seed: int, around: dict[str, torch.Tensor] | None = None, scale: float = 0.01, shapes=SHAPES
) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    draw = {n: torch.randn(s, generator=g) for n, s in shapes.items()}
    return {n: t * 0.1 if around is None else around[n] + scale * t for n, t in draw.items()}


def save(
    folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1, tokens: list[str] | None = None, **config
) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        where = {}
        for k in range(shards):
            part = {n: tensors[n] for n in names[k::shards]}
            file = f"model-{k + 1:05d}-of-{shards:05d}.safetensors"
            save_file(part, folder / file, metadata={"format": "pt"})
            where.update(dict.fromkeys(part, file))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    if tokens is not None:
        vocab = {t: i for i, t in enumerate(tokens)}
        (folder / "tokenizer.json").write_text(
            json.dumps({"model": {"type": "WordLevel", "vocab": vocab}, "added_tokens": []})
        )
    return folder


def load(folder: Path) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        out.update(load_file(file))
    return out


def save_adapter(folder: Path, ranks: dict[str, int], base: dict[str, torch.Tensor], seed: int, **config) -> Path:
    """A LoRA folder as peft writes it; ``ranks``: module -> rank."""
    g = torch.Generator().manual_seed(seed)
    folder.mkdir(parents=True)
    out = {}
    for module, r in ranks.items():
        rows, cols = base[f"{module}.weight"].shape
        out[f"base_model.model.{module}.lora_A.weight"] = torch.randn(r, cols, generator=g) * 0.3
        out[f"base_model.model.{module}.lora_B.weight"] = torch.randn(rows, r, generator=g) * 0.1
    save_file(out, folder / "adapter_model.safetensors")
    first = next(iter(ranks.values()))
    full = {"peft_type": "LORA", "r": first, "lora_alpha": 6, "bias": "none", "target_modules": sorted(ranks), **config}
    (folder / "adapter_config.json").write_text(json.dumps(full))
    return folder


def adapter_delta(folder: Path, module: str, rank: int) -> np.ndarray:
    """scale * B A of one module in fp64, by hand."""
    config = json.loads((folder / "adapter_config.json").read_text())
    alpha = config.get("alpha_pattern", {}).get(module, config["lora_alpha"])
    scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    t = load_file(folder / "adapter_model.safetensors")
    a, b = (t[f"base_model.model.{module}.lora_{x}.weight"].double().numpy() for x in "AB")
    return scale * b @ a


def oracle(method: str, base: np.ndarray, experts: list[np.ndarray], w: list[float], lam: float, **how) -> np.ndarray:
    """One tensor (or everything in one vector) merged in fp64, value by value where that is clearer."""
    d = [e - base for e in experts]
    if method == "sum":
        return base + lam * sum(c * x for c, x in zip(w, d, strict=True))
    if method == "mean":
        return base + lam * sum(c * x for c, x in zip(w, d, strict=True)) / sum(w)
    if method == "svd":
        cut = []
        for x in d:
            if x.ndim == 2:
                u, s, vt = np.linalg.svd(x, full_matrices=False)
                k = how["rank"]
                x = u[:, :k] @ np.diag(s[:k]) @ vt[:k]
            cut.append(x)
        return base + lam * sum(c * x for c, x in zip(w, cut, strict=True))
    if method == "ties":
        d = [np.where(np.abs(x) >= t, x, 0.0) for x, t in zip(d, how["thresholds"], strict=True)]
    if method in ("dare", "dare_ties"):
        d = [np.where(m, x, 0.0) / how["density"] for x, m in zip(d, how["masks"], strict=True)]
    if method == "dare":
        return base + lam * sum(c * x for c, x in zip(w, d, strict=True))
    out = base.copy().reshape(-1)
    for k in range(out.size):
        column = [x.reshape(-1)[k] for x in d]
        elected = 1.0 if sum(c * x for c, x in zip(w, column, strict=True)) >= 0 else -1.0
        agreeing = [(c, x) for c, x in zip(w, column, strict=True) if x * elected > 0]
        if agreeing:
            out[k] += lam * sum(c * x for c, x in agreeing) / sum(c for c, _ in agreeing)
    return out.reshape(base.shape)


def kth(values: np.ndarray, density: float) -> float:
    """The magnitude of the last value kept, by sorting."""
    ordered = np.sort(np.abs(values.reshape(-1)))[::-1]
    return float(ordered[math.ceil(density * ordered.size - 1e-9) - 1])
