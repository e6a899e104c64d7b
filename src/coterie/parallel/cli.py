"""``coterie parallel``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from coterie.console import make_console

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("parallel", context_settings=CONTEXT)(parallel_command)


def parallel_command(
    ctx: typer.Context,
    config: Annotated[
        Path, typer.Argument(help="TOML file with a parallel section; values can be overridden: --parallel.lam 0.6")
    ],
    backend: Annotated[
        str | None, typer.Option(help="local (processes here) or ray (a cluster with a shared file system).")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check config and tasks, print the resolved config, stop.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a machine.")] = False,
) -> None:
    """Train experts apart, merge them, adapt, evaluate everything, report. The same command goes on after a stop.

    Example: coterie parallel configs/parallel.toml --parallel.lam 0.6 --parallel.baselines '["mixed"]'
    """
    from coterie.config import load_config
    from coterie.parallel.plan import check_parallel
    from coterie.parallel.run import backend_override, parallel

    cfg = backend_override(load_config(config, ctx.args), backend)
    check_parallel(cfg)
    if dry_run:
        from coterie.run import dry_run as check_all

        check_all(cfg)
        typer.echo(cfg.to_toml(), nl=False)
        return
    console = make_console(stderr=as_json)
    result = parallel(cfg, note=lambda text: console.print(text, soft_wrap=True))
    if as_json:
        print(json.dumps(result, indent=2))
        return
    from coterie.parallel.report import print_summary

    print_summary(result, console)
    typer.echo(f"\nreport: {Path(cfg.run_dir) / 'report.html'}\nfigures: {Path(cfg.run_dir) / 'parallel.json'}")
