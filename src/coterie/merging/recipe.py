"""What to merge and how: the whole request, checked before any file is opened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal, get_args

from coterie.errors import UserError

Method = Literal["sum", "mean", "ties", "dare", "dare_ties", "svd", "lora_concat"]
Trim = Literal["global", "tensor"]
OutDtype = Literal["base", "float32", "bfloat16", "float16"]
ComputeDtype = Literal["float32", "float64"]
DEFAULT_DENSITY = 0.2

FORMULAS: dict[str, str] = {
    "sum": "merged = base + lambda * sum_i w_i d_i, d_i = expert_i - base (task arithmetic, arXiv 2212.04089)",
    "mean": "merged = base + lambda * sum_i w_i d_i / sum_i w_i, d_i = expert_i - base (arXiv 2203.05482)",
    "ties": "trim each d_i to the {density:.4g} share of its values with the largest magnitudes ({scope}; equal magnitudes "
    "at the cut are all kept); per value elect the sign of sum_i w_i d_i (an exact tie elects plus); "
    "merged = base + lambda * weighted mean of the "
    "non-zero trimmed d_i of that sign (arXiv 2306.01708)",
    "dare": "keep each value of d_i with probability {density:g} and divide it by {density:g} (seed {seed}); "
    "merged = base + lambda * sum_i w_i d_i (arXiv 2311.03099)",
    "dare_ties": "keep each value of d_i with probability {density:g} and divide it by {density:g} (seed {seed}); then elect "
    "signs and take the weighted mean of the agreeing values as in TIES, without its trim (arXiv 2311.03099, 2306.01708)",
    "svd": "replace the d_i of each matrix by its best rank-{rank} approximation (other tensors whole); "
    "merged = base + lambda * sum_i w_i d_i",
    "lora_concat": "one adapter with B = [lambda w_i s_i B_i ...], A = [A_i ...]: its update is exactly "
    "lambda * sum_i w_i s_i B_i A_i",
}


@dataclass(frozen=True)
class Expert:
    """One model or LoRA adapter trained from the base. ``label`` names it in reports and keys its DARE mask."""

    path: Path
    label: str
    weight: float = 1.0


@dataclass(frozen=True)
class Recipe:
    """A merge. ``None`` where a setting does not belong to the method."""

    base: Path
    experts: tuple[Expert, ...]
    method: Method = "sum"
    lam: float = 1.0
    density: float | None = None  # share of values kept (ties, dare, dare_ties)
    trim: Trim | None = None  # over what TIES ranks magnitudes
    rank: int | None = None  # svd; lora_concat: compress to this rank
    seed: int | None = None  # of DARE's masks
    dtype: OutDtype = "base"  # of the written weights; "base": as in the base, tensor by tensor
    compute_dtype: ComputeDtype = "float32"
    keep_base_vocab: bool = False  # tokens that only one side has are left out instead of refused
    allow_rounded_mean: bool = False

    def formula(self) -> str:
        scope = "ranked over all values the expert can change" if self.trim == "global" else "ranked within each tensor"
        return FORMULAS[self.method].format(density=self.density or 0, seed=self.seed, rank=self.rank, scope=scope)

    def to_json(self) -> dict[str, Any]:
        return {
            "base": str(self.base),
            "experts": [{"label": e.label, "path": str(e.path), "weight": e.weight} for e in self.experts],
            "method": self.method,
            "lambda": self.lam,
            "density": self.density,
            "trim_scope": self.trim,
            "rank": self.rank,
            "seed": self.seed,
            "dtype": self.dtype,
            "compute_dtype": self.compute_dtype,
            "vocab": "base" if self.keep_base_vocab else "same",
            "formula": self.formula(),
        }


def make_recipe(
    base: Path | str,
    experts: Sequence[Path | str],
    method: str = "sum",
    *,
    labels: Sequence[str] | None = None,
    weights: Sequence[float] | None = None,
    lam: float = 1.0,
    density: float | None = None,
    trim: str | None = None,
    rank: int | None = None,
    seed: int | None = None,
    dtype: str = "base",
    compute_dtype: str = "float32",
    keep_base_vocab: bool = False,
    allow_rounded_mean: bool = False,
) -> Recipe:
    """Check every setting and fill in the method's defaults. Opens no file.

    Experts are put in the order of their labels, so that the order in which they are named changes not one bit.

    Raises:
        UserError: an unknown method, a setting that does not belong to it, or a value out of range.
    """
    _one_of("method", method, get_args(Method))
    _one_of("dtype", dtype, get_args(OutDtype))
    _one_of("compute-dtype", compute_dtype, get_args(ComputeDtype))
    if not experts:
        raise UserError("merge: name at least one expert after the base")
    if not isfinite(lam):
        raise UserError(f"merge: lambda must be a finite number, not {lam}")
    weighed = _weights(weights, len(experts), method)
    named = _labels(labels, [Path(e) for e in experts])
    sparse = method in ("ties", "dare", "dare_ties")
    _belongs("density", density, sparse, method)
    _belongs("trim", trim, method == "ties", method)
    _belongs("rank", rank, method in ("svd", "lora_concat"), method)
    _belongs("seed", seed, method in ("dare", "dare_ties"), method)
    if density is not None and not 0 < density <= 1:
        raise UserError(f"merge: --density is the share that is kept, in (0, 1], not {density}")
    if method == "svd" and rank is None:
        raise UserError("merge: --method svd needs --rank (the paper uses 1)")
    if rank is not None and rank < 1:
        raise UserError(f"merge: --rank must be at least 1, not {rank}")
    if trim is not None:
        _one_of("trim", trim, get_args(Trim))
    if method == "lora_concat" and (keep_base_vocab or compute_dtype != "float32"):
        raise UserError("merge: --vocab and --compute-dtype do not apply to --method lora_concat")
    return Recipe(
        base=Path(base),
        experts=tuple(
            sorted(
                (Expert(Path(e), n, w) for e, n, w in zip(experts, named, weighed, strict=True)), key=lambda e: e.label
            )
        ),
        method=method,  # type: ignore[arg-type]
        lam=lam,
        density=(DEFAULT_DENSITY if density is None else density) if sparse else None,
        trim=(trim or "global") if method == "ties" else None,  # type: ignore[arg-type]
        rank=rank,
        seed=(seed or 0) if method in ("dare", "dare_ties") else None,
        dtype=dtype,  # type: ignore[arg-type]
        compute_dtype=compute_dtype,  # type: ignore[arg-type]
        keep_base_vocab=keep_base_vocab,
        allow_rounded_mean=allow_rounded_mean,
    )


def label_paths(paths: Sequence[Path]) -> list[str]:
    """Shortest distinct names: the folder's name, with its parents where two folders share it, numbered if the same."""
    for depth in range(1, max(len(p.parts) for p in paths) + 1):
        names = ["/".join(p.parts[-depth:]) for p in paths]
        if len(set(names)) == len(names):
            return names
    seen: Counter[str] = Counter()
    out = []
    for p in paths:  # the same folder twice
        seen[p.name] += 1
        out.append(f"{p.name}#{seen[p.name]}")
    return out


def _labels(labels: Sequence[str] | None, paths: list[Path]) -> list[str]:
    if labels is None:
        return label_paths(paths)
    if len(labels) != len(paths) or len(set(labels)) != len(labels) or not all(labels):
        raise UserError(f"merge: --labels needs one distinct name per expert ({len(paths)}), got {list(labels)}")
    return list(labels)


def _weights(weights: Sequence[float] | None, count: int, method: str) -> list[float]:
    out = [1.0] * count if weights is None else [float(w) for w in weights]
    if len(out) != count:
        raise UserError(f"merge: --weights needs one number per expert ({count}), got {len(out)}")
    if not all(isfinite(w) for w in out):
        raise UserError(f"merge: weights must be finite, got {out}")
    if method == "mean" and abs(sum(out)) < 1e-8:
        raise UserError(f"merge: --method mean divides by the sum of the weights, which is 0 for {out}")
    if method in ("ties", "dare_ties") and min(out) <= 0:
        raise UserError(
            f"merge: --method {method} needs positive weights (its mean divides by those that agree), got {out}"
        )
    return out


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise UserError(f"merge: --{name} {value!r} is not known; choose one of {', '.join(known)}")


def _belongs(name: str, value: object, wanted: bool, method: str) -> None:
    if value is not None and not wanted:
        raise UserError(f"merge: --{name} does not belong to --method {method}")
