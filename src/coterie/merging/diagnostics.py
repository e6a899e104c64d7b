"""``coterie interference``: one exact pass over base and experts, every figure next to what chance would give."""

from __future__ import annotations

import time
from typing import Any

from coterie.errors import CoterieError, UserError
from coterie.merging.deltas import one_thread_each, stream
from coterie.merging.inputs import Entry, Full, Inputs, open_inputs
from coterie.merging.numbers import layer_of, module_type
from coterie.merging.recipe import Recipe
from coterie.merging.subspace import shared_initialisation, subspace_overlap
from coterie.merging.tally import Sums, TensorTally, figures
from coterie.merging.verdict import reading, verdicts

FORMAT = 1


def open_recipe_inputs(recipe: Recipe) -> Inputs:
    return open_inputs(recipe.base, recipe.experts, recipe.keep_base_vocab)


def interference(recipe: Recipe, *, top_k: int = 8, matrices: int = 2, chunk_mib: int = 64) -> dict[str, Any]:
    """Compare the deltas of a recipe's experts. Method, weights and lambda are not used.

    Memory: ``chunk_mib`` of blocks, and for the subspaces the singular vectors of one matrix per expert.

    Returns:
        ``all`` (figures over the whole model), ``per_module_type`` and ``per_layer``; ``subspaces``; ``adapters``;
        ``reading`` (what the figures say, in words); ``verdicts`` (per pair, with the missing evidence); dtypes and notes of
        the inputs. JSON types only.
    Raises:
        UserError: inputs that do not fit each other. CoterieError: weights that are not finite.
    """
    inputs = open_recipe_inputs(recipe)
    began = time.perf_counter()
    labels = [e.label for e in inputs.experts]
    whole, kinds, layers = _sum_up(inputs, chunk_mib)
    if not float(whole.values):
        raise UserError(f"interference: {recipe.base} holds no weights to compare")
    seconds = time.perf_counter() - began
    report: dict[str, Any] = {
        "format": FORMAT,
        "base": str(recipe.base),
        "experts": [{"label": e.label, "path": str(e.path)} for e in recipe.experts],
        "input_dtypes": inputs.dtypes(),
        "null_of_sparsity": {
            e.label: "sigma fitted to the share visible in bf16 (stored in 16 bits)"
            if coarse
            else "sigma = rms of the delta"
            for e, coarse in zip(inputs.experts, _any_coarse(inputs), strict=True)
        },
        "notes": list(inputs.notes),
        "seconds": round(seconds, 3),
        "all": figures(whole, labels, "all merged values of the model"),
        "per_module_type": {k: figures(s, labels, f"all tensors of type {k}") for k, s in sorted(kinds.items())},
        "per_layer": {str(k): figures(s, labels, f"layer {k}") for k, s in sorted(layers.items())},
        "subspaces": subspace_overlap(inputs, top_k, matrices) if top_k and len(labels) > 1 else None,
        "adapters": shared_initialisation(inputs),
    }
    report["reading"] = reading(report)
    report["verdicts"] = verdicts(report)
    return report


def _sum_up(inputs: Inputs, chunk_mib: int) -> tuple[Sums, dict[str, Sums], dict[int, Sums]]:
    n = len(inputs.experts)
    whole, kinds, layers = Sums.zero(n), dict[str, Sums](), dict[int, Sums]()

    def close(tally: TensorTally) -> None:
        sums = tally.finish()
        if not bool(sums.gram.isfinite().all()):
            raise CoterieError(f"tensor {tally.name}: base or an expert holds values that are not finite")
        whole.include(sums)
        kinds.setdefault(module_type(tally.name), Sums.zero(n)).include(sums)
        if (layer := layer_of(tally.name)) is not None:
            layers.setdefault(layer, Sums.zero(n)).include(sums)

    current: TensorTally | None = None
    with one_thread_each():
        for block in stream(inputs, [e for e in inputs.entries if e.merged], chunk_mib):
            if current is None or current.name != block.entry.name:
                if current is not None:
                    close(current)
                current = TensorTally(block, [_coarse(block.entry, i) for i in range(n)])
            current.add(block)
        if current is not None:
            close(current)
    return whole, kinds, layers


def _coarse(entry: Entry, index: int) -> bool:
    """Whether an expert's tensor is stored in 16 bits (an adapter's factors give a fine-grained delta whatever their type)."""
    source = entry.sources[index]
    return isinstance(source, Full) and source.info.code in ("BF16", "F16")


def _any_coarse(inputs: Inputs) -> list[bool]:
    return [any(_coarse(e, i) for e in inputs.entries) for i in range(len(inputs.experts))]
