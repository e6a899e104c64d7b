"""``coterie probe``: which tasks pull a model the same way, measured by gradients of its own answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from coterie.console import make_console
from coterie.errors import UserError
from coterie.merging.compatibility import spoken
from coterie.merging.tables import number

KINDS = ("mean", "mean_std", "rloo", "batch")


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("probe")(probe_command)


def probe_command(
    model: Annotated[str, typer.Argument(help="tiny, smollm2, a Hugging Face id, a folder, or a run directory.")],
    tasks: Annotated[str, typer.Option(help="Comma-separated task names, or a TOML file with tasks.")],
    problems: Annotated[
        int, typer.Option(help="Problems per task; half of them are the control of the other half.")
    ] = 32,
    group_size: Annotated[int, typer.Option(help="Answers per problem.")] = 8,
    temperatures: Annotated[str, typer.Option(help="Sampling temperatures; several make a sweep.")] = "1.0",
    score_temperature: Annotated[float, typer.Option(help="Temperature of scoring; 0: the one sampled at.")] = 0.0,
    advantage: Annotated[str, typer.Option(help="mean, mean_std, rloo or batch (one baseline per task).")] = "mean",
    per_token: Annotated[
        bool, typer.Option("--per-token", help="Scores divided by length (sequence averages).")
    ] = False,
    sketch: Annotated[int, typer.Option(help="Values kept per score; 0: all of a small model, else 65536.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of problems, answers and resampling.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for probe.json and probe.html.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a machine.")] = False,
) -> None:
    """Sizes of scores, interference between tasks with intervals, and controls that say what the sample can resolve.

    Example: coterie probe tiny --tasks chain_sum,gcd,count_bits --problems 16 --out runs/probe
    """
    from coterie.merging.probe import ProbeSettings

    if advantage not in KINDS:
        raise UserError(f"probe: --advantage {advantage}: one of {', '.join(KINDS)}")
    taus = _temperatures(temperatures)
    asked = [
        ProbeSettings(problems, group_size, t, score_temperature, max_new_tokens, per_token, sketch, seed) for t in taus
    ]
    if out is not None and (out / "probe.json").exists():
        raise UserError(f"output {out}: holds a probe already; name another folder")
    from coterie.merging.probe_page import write_probe
    from coterie.merging.probe_run import probe

    report = probe(model, tasks, asked, advantage)
    if out is not None:
        write_probe(report, out)
    if as_json:
        print(json.dumps(report, indent=2))
        return
    console = make_console()
    for found in report["temperatures"]:
        _show(found, console)
    if len(taus) > 1:
        _show_sweep(report["temperatures"], console)
    if out is not None:
        console.print(f"written: {out / 'probe.json'}, {out / 'probe.html'}")


def _temperatures(text: str) -> list[float]:
    try:
        return [float(t) for t in text.split(",")]
    except ValueError as e:
        raise UserError(f"probe: --temperatures {text}: numbers separated by commas, such as 0.7,1.0") from e


def _show(found: dict[str, Any], console: Console) -> None:
    table = Table("task", "solved", "zero grad", "|S|", "V", "M", "U", "signal", "off-policy", "control", box=None)
    for name, t in found["tasks"].items():
        c = found["controls"][name]
        control = "failed" if c["failed"] else "resolved" if c["resolved"] else "unresolved"
        table.add_row(name, number(t["solve_rate"], ".2f"), f"{t['zero_gradient_share']:.0%}", f"{t['S']:.3g}", f"{t['V']:.3g}",
                      number(t["M"], ".3g"), f"{t['U']:.1e}", number(t["signal_share"], ".0%"),
                      number(t["off_policy"], "+.3f"), control)  # fmt: skip
    console.print(f"temperature {found['settings']['temperature']:g}, advantage {found['advantage']}")
    console.print(table)
    pairs = Table("pair", "I", "95% interval", "raw cos", "cosine", "95% interval", box=None)
    for p in found["pairs"]:
        wide = p["cosine_interval"]
        pairs.add_row(" · ".join(p["tasks"]), f"{p['I']:+.1e}", f"{p['I_interval'][0]:+.0e}, {p['I_interval'][1]:+.0e}",
                      number(p["raw_cosine"], "+.3f"), number(p["cosine"], "+.2f") if wide else "?",
                      f"{wide[0]:+.2f}, {wide[1]:+.2f}" if wide else "unresolved")  # fmt: skip
    console.print(pairs)
    for p in found["pairs"]:
        console.print(f"- {p['reading']}", soft_wrap=True)
    for p in found["pairs"]:
        console.print(f"verdict: {spoken(p['verdict'])}", soft_wrap=True)


def _show_sweep(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table("temperature", "task", "V", "entropy", "1 - sum p^2", "solved", "distinct", "zero gradient", box=None)
    for found in rows:
        for name, t in found["tasks"].items():
            table.add_row(f"{found['settings']['temperature']:g}", name, f"{t['V']:.3g}", f"{t['entropy']:.3f}",
                          f"{1 - t['concentration']:.3f}", number(t["solve_rate"], ".2f"), f"{t['distinct']:.0%}",
                          f"{t['zero_gradient_share']:.0%}")  # fmt: skip
    console.print(table)
