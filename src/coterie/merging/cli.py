"""``coterie merge`` and ``coterie interference``. No torch is loaded before the arguments are checked."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from coterie.console import make_console, say
from coterie.errors import UserError
from coterie.merging.recipe import label_paths, make_recipe
from coterie.models import folder_of

EVERY = 5.0  # seconds between lines of progress
Base = Annotated[Path, typer.Argument(help="Folder of the base model.", show_default=False)]
Experts = Annotated[
    list[Path], typer.Argument(help="Folders trained from it: full models or LoRA adapters.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a machine.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, print what would be done, and stop.")]
Chunk = Annotated[int, typer.Option(min=1, help="Working memory in MiB, whatever the size of the models.")]
Vocab = Annotated[
    str,
    typer.Option(help="`same`: refuse experts with other tokens; `base`: keep the base's, match shared ones by text."),
]
Labels = Annotated[
    str | None, typer.Option(help="Names of the experts in reports, comma-separated (default: folder names).")
]


def register(app: typer.Typer) -> None:
    """Add both commands to the program."""
    app.command("merge")(merge_command)
    app.command("interference")(interference_command)


def merge_command(
    base: Base,
    experts: Experts,
    out: Annotated[Path, typer.Option(help="New folder for the merged model.", show_default=False)],
    method: Annotated[str, typer.Option(help="sum, mean, ties, dare, dare_ties, svd or lora_concat.")] = "sum",
    lam: Annotated[float, typer.Option("--lambda", help="Scale of the merged update.")] = 1.0,
    weights: Annotated[
        str | None, typer.Option(help="One number per expert, comma-separated (default: all 1).")
    ] = None,
    density: Annotated[float | None, typer.Option(help="Share of values kept by ties and dare (default 0.2).")] = None,
    trim: Annotated[
        str | None,
        typer.Option(help="TIES ranks magnitudes over the whole model, `global` (default), or per `tensor`."),
    ] = None,
    rank: Annotated[
        int | None, typer.Option(help="svd: rank of every delta; lora_concat: compress to this rank.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of DARE's masks (default 0).")] = None,
    dtype: Annotated[str, typer.Option(help="Of the written weights: base, float32, bfloat16 or float16.")] = "base",
    compute_dtype: Annotated[str, typer.Option(help="Of the arithmetic: float32 or float64.")] = "float32",
    vocab: Vocab = "same",
    labels: Labels = None,
    allow_rounded_mean: Annotated[
        bool, typer.Option("--allow-rounded-mean", help="Write a mean in 16 bits although rounding eats most of it.")
    ] = False,
    chunk_mib: Chunk = 64,
    shard_gb: Annotated[float, typer.Option(min=0.001, help="Largest size of an output file in GB.")] = 5.0,
    hash_inputs: Annotated[
        bool, typer.Option("--hash/--no-hash", help="Put the inputs' sha256 into the receipt.")
    ] = True,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Merge models that were trained apart from one base. Memory stays small; the output appears only when complete.

    One expert with --lambda L is the shrink control base + L * delta.

    Example: coterie merge runs/base runs/math runs/logic --method sum --lambda 0.6 --out runs/merged
    """
    recipe = make_recipe(
        Path(folder_of(base)), [Path(folder_of(e)) for e in experts], method,
        labels=_split(labels) or label_paths(experts), weights=_numbers(weights), lam=lam, density=density, trim=trim, rank=rank,
        seed=seed, dtype=dtype, compute_dtype=compute_dtype, keep_base_vocab=_keep_base(vocab),
        allow_rounded_mean=allow_rounded_mean,
    )  # fmt: skip
    from coterie.merging.merge import merge, plan

    if dry_run:
        planned = plan(recipe, out).to_json()
        _emit(planned) if as_json else _show_plan(planned)
        return
    command = shlex.join(["coterie", *sys.argv[1:]])
    receipt = merge(
        recipe, out, chunk_mib=chunk_mib, shard_bytes=int(shard_gb * 1e9), hash_inputs=hash_inputs, command=command,
        progress=_progress(),
    )  # fmt: skip
    _emit(receipt) if as_json else _show_receipt(receipt, out)


def interference_command(
    base: Base,
    experts: Experts,
    out: Annotated[
        Path | None, typer.Option(help="Folder for interference.json and interference.html.", show_default=False)
    ] = None,
    top_k: Annotated[
        int, typer.Option(min=0, help="Singular vectors compared per sampled matrix; 0 leaves the comparison out.")
    ] = 8,
    matrices: Annotated[
        int, typer.Option(min=1, help="Most matrices per module type whose subspaces are compared.")
    ] = 2,
    vocab: Vocab = "same",
    labels: Labels = None,
    chunk_mib: Chunk = 64,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Compare what experts changed: norms, sparsity, cosines, overlap of support and subspaces, each next to its null.

    Weights alone never say that a merge is safe; this command says what they do say.

    Example: coterie interference runs/base runs/math runs/logic --out runs/interference
    """
    keep = _keep_base(vocab)
    named = _split(labels) or label_paths(experts)
    folders = [Path(folder_of(e)) for e in experts]
    recipe = make_recipe(Path(folder_of(base)), folders, "sum", labels=named, keep_base_vocab=keep)
    from coterie.merging.diagnostics import interference, open_recipe_inputs

    if dry_run:
        inputs = open_recipe_inputs(recipe)
        planned = {
            "tensors": len(inputs.entries),
            "values": sum(e.base.numel for e in inputs.entries if e.merged),
            "experts": [e.label for e in inputs.experts],
            "dtypes": inputs.dtypes(),
            "notes": list(inputs.notes),
        }
        _emit(planned) if as_json else _show_plan({**planned, "warnings": []})
        return
    from coterie.merging.page import check_place, write_report

    if out is not None:
        check_place(out)
    report = interference(recipe, top_k=top_k, matrices=matrices, chunk_mib=chunk_mib)
    if out is not None:
        write_report(report, out)
    if as_json:
        _emit(report)
        return
    from coterie.merging.tables import print_report

    print_report(report, make_console())
    if out is not None:
        typer.echo(f"written: {out / 'interference.json'}, {out / 'interference.html'}")


def _progress() -> Callable[[int, int], None]:
    """A line on stderr every ``EVERY`` seconds of a merge."""
    last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= EVERY:
            last = time.monotonic()
            say(f"merge: {done / total:.0%} of {total:,} values")

    return show


def _split(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",")]


def _numbers(text: str | None) -> list[float] | None:
    try:
        return None if text is None else [float(part) for part in text.split(",")]
    except ValueError as e:
        raise UserError(f"merge: --weights needs numbers separated by commas, got {text!r}") from e


def _keep_base(vocab: str) -> bool:
    if vocab not in ("same", "base"):
        raise UserError(f"--vocab {vocab!r} is not known; choose same or base")
    return vocab == "base"


def _emit(data: Any) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False))


def _show_plan(planned: dict[str, Any]) -> None:
    if "recipe" in planned:
        typer.echo(planned["recipe"]["formula"])
    size = f", {planned['output_bytes'] / 1e9:.3f} GB to write" if "output_bytes" in planned else ""
    typer.echo(f"{planned['tensors']} tensors, {planned['values']:,} values{size}")
    for who, dtypes in planned["dtypes"].items():
        typer.echo(f"{who}: " + ", ".join(f"{n:,} {d}" for d, n in dtypes.items()))
    for line in (*planned["notes"], *[f"warning: {w}" for w in planned["warnings"]]):
        typer.echo(line)


def _show_receipt(receipt: dict[str, Any], out: Path) -> None:
    typer.echo(receipt["recipe"]["formula"])
    norms = receipt["norms"]["all"]
    table = Table("expert", "weight", "L2 of delta (all values)", box=None)
    for e in receipt["recipe"]["experts"]:
        table.add_row(e["label"], f"{e['weight']:g}", f"{norms['deltas'][e['label']]:.4g}")
    table.add_row("merged update", "", f"{norms['merged_update']:.4g}")
    make_console().print(table)
    if (rounding := receipt.get("rounding", {}).get("all")) and rounding["cosine"] is not None:
        typer.echo(
            f"rounding: cosine {rounding['cosine']:.6f}, relative error {rounding['relative_error']:.2e} of the update"
        )
    for line in (*receipt["notes"], *[f"warning: {w}" for w in receipt["warnings"]]):
        typer.echo(line)
    typer.echo(f"written: {out} in {receipt['seconds']:.1f} s ({receipt['output_bytes'] / 1e9:.3f} GB)")
