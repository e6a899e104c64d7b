"""The ``coterie`` command: each subcommand is a few lines that call the package; torch loads only when needed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from coterie.console import make_console
from coterie.errors import CoterieError, UserError
from coterie.helpers import cli as helpers_cli
from coterie.merging import cli as merging_cli
from coterie.merging import probe_cli
from coterie.parallel import cli as parallel_cli
from coterie.swarm import cli as swarm_cli

app = typer.Typer(
    name="coterie",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Reinforcement-learning post-training for language models that learn together.",
)
OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a machine.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check config and tasks, print the resolved config, stop.")]
ConfigPath = Annotated[Path, typer.Argument(help="TOML file; any value can be overridden: --optim.lr 1e-4")]


def main() -> None:
    """Entry point: errors a user can act on are one line and an exit code, never a traceback."""
    try:
        app(standalone_mode=True)
    except CoterieError as e:
        make_console(stderr=True).print(Text("error:", style="bold red"), str(e), soft_wrap=True)
        sys.exit(e.exit_code)
    except KeyboardInterrupt:
        make_console(stderr=True).print("interrupted; the same command goes on from the last checkpoint")
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output (head, less) has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def emit(data: Any) -> None:
    """Print JSON on stdout."""
    print(json.dumps(data, indent=2, ensure_ascii=False))


@app.command()
def demo(
    run_dir: Annotated[Path, typer.Option("--run_dir", help="Where to write the runs.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Seed of the run.")] = 0,
) -> None:
    """Offline, on the CPU, in about a minute: a tiny model learns; a table, a report, what to try next.

    Example: coterie demo
    """
    from coterie.demo import demo as run

    run(run_dir, seed)


@app.command(context_settings=OVERRIDES)
def train(ctx: typer.Context, config: ConfigPath, dry_run: DryRun = False, as_json: Json = False) -> None:
    """Train one node. An unfinished run in the same run_dir is continued.

    Example: coterie train configs/tiny.toml --optim.lr 1e-4 --run_dir runs/first
    """
    _train(config, ctx.args, dry_run, as_json)


@app.command(context_settings=OVERRIDES)
def sft(ctx: typer.Context, config: ConfigPath, dry_run: DryRun = False, as_json: Json = False) -> None:
    """Supervised training on worked answers to the same tasks (the comparison arm).

    Example: coterie sft configs/tiny.toml --run_dir runs/sft --steps 50
    """
    _train(config, [*ctx.args, "--method", "sft"], dry_run, as_json)


def _train(config: Path, overrides: list[str], dry_run: bool, as_json: bool) -> None:
    from coterie.config import load_config

    cfg = load_config(config, overrides)
    if dry_run:
        from coterie.run import dry_run as check_all

        check_all(cfg)
        typer.echo(cfg.to_toml(), nl=False)
        return
    from coterie.distributed import leads
    from coterie.report import write_report
    from coterie.run import train as run

    done = run(cfg, quiet=as_json)
    if not leads():
        return
    report = write_report([done.run_dir], done.run_dir / "report.html")
    if as_json:
        emit({"run_dir": str(done.run_dir), "steps": done.steps, "metrics": done.metrics, "report": str(report)})
    else:
        typer.echo(f"\nreport: {report}\nmodel:  {done.run_dir / 'model'}")


@app.command("eval", context_settings=OVERRIDES)
def evaluate(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="tiny, smollm2, a Hugging Face id, a folder, or a run directory.")],
    tasks: Annotated[str, typer.Option(help="Task names a,b; all: those the model learned; or a TOML file.")] = "all",
    k: Annotated[str, typer.Option("-k", help="Values of k for pass@k.")] = "1",
    problems: Annotated[int, typer.Option(help="Held-out problems per task.")] = 100,
    samples: Annotated[int, typer.Option(help="Answers per problem; 0: the largest k.")] = 0,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens; 0: as in the config, else 64.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the sampler.")] = 0,
    mode: Annotated[
        str,
        typer.Option(help="plain | tagged (helpers' prompt, nobody answers) | helped; several, a,b: and their gap."),
    ] = "plain",
    config: Annotated[
        Path | None, typer.Option(help="TOML file whose helpers section --mode tagged and helped use.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Unbiased pass@k on held-out problems, per task, with intervals and the settings.

    Example: coterie eval tiny --tasks chain_sum,gcd -k 1,8 --problems 50
    """
    from coterie.evalcmd import EvalRequest, run_eval, show

    ks = _ints(k, "-k")
    request = EvalRequest(model, tasks, ks, problems, samples or max(ks), temperature, max_new_tokens, seed, mode)
    result = run_eval(request, config, ctx.args)
    if as_json:
        emit(result)
        return
    show(result, ks)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories; several are compared.")],
    out: Annotated[Path | None, typer.Option(help="HTML file to write; default RUN/report.html.")] = None,
) -> None:
    """One self-contained HTML page for one or several runs.

    Example: coterie report runs/a runs/b --out compare.html
    """
    from coterie.report import write_report

    typer.echo(write_report(runs, out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))))


@app.command()
def export(
    source: Annotated[Path, typer.Argument(help="A finished run directory, or a merged model.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    name: Annotated[str, typer.Option(help="Name on the hub, OWNER/MODEL; default: the folder's.")] = "",
    results: Annotated[list[Path] | None, typer.Option(help="Output of `coterie eval --json`, for the card.")] = None,
    as_json: Json = False,
) -> None:
    """Write a folder ready for a model hub, with a model card: config, results, merge receipt. Uploads nothing.

    Example: coterie export runs/tiny --out runs/tiny-export --name me/tiny-sums
    """
    from coterie.export import export as run

    folder = run(source, out, name, results or ())
    files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    if as_json:
        emit({"folder": str(folder), "files": files})
    else:
        typer.echo(
            f"{folder}: {', '.join(files)}\nread README.md, then upload it: hf upload {name or 'OWNER/MODEL'} {folder}"
        )


@app.command(context_settings=OVERRIDES)
def doctor(
    ctx: typer.Context,
    config: Annotated[Path | None, typer.Option(help="Also check what this config needs, and dial its peers.")] = None,
    as_json: Json = False,
) -> None:
    """Check this machine: what works, what is missing, what to do about it.

    Example: coterie doctor --config configs/swarm.toml
    """
    from coterie.config import load_config
    from coterie.doctor import checks

    found = checks(load_config(config, ctx.args) if config is not None or ctx.args else None)
    if as_json:
        emit([c.__dict__ for c in found])
    else:
        colours = {"ok": "green", "note": "yellow", "fail": "red"}
        table = Table("", "check", "finding", "what to do", box=None)
        for c in found:
            table.add_row(Text(c.level, style=colours[c.level]), c.name, c.finding, c.advice)
        make_console().print(table)
    if any(c.level == "fail" for c in found):
        raise typer.Exit(1)


tasks_app = typer.Typer(no_args_is_help=True, help="What can be trained on.")
app.add_typer(tasks_app, name="tasks")


@tasks_app.command("list")
def tasks_list(as_json: Json = False) -> None:
    """All built-in tasks.

    Example: coterie tasks list
    """
    from coterie.tasks.taskset import list_names

    names = list_names()
    emit(names) if as_json else typer.echo("\n".join(names))


@tasks_app.command("show")
def tasks_show(name: str, as_json: Json = False) -> None:
    """Parameters with defaults, an example problem, and how its answers are scored.

    Example: coterie tasks show chain_sum
    """
    from coterie.tasks.taskset import describe

    found = describe(name)
    if as_json:
        emit(found)
        return
    for key, value in found.items():
        typer.echo(f"[{key}]\n{value}\n" if isinstance(value, str) else f"[{key}]\n{json.dumps(value, indent=2)}\n")


@app.command(context_settings=OVERRIDES)
def bench(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="score | round | swarm | merge | verdict")],
    as_json: Json = False,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
) -> None:
    """Measure this machine. Figures come with the settings they were made with. Further --KEY VALUE go to the bench.

    Example: coterie bench round --cases smollm2,tiny --repeats 5
    """
    import importlib
    import inspect

    known = ("score", "round", "swarm", "merge", "verdict")
    if name not in known:
        raise UserError(f"bench {name}: unknown; one of {', '.join(known)}")
    if out is not None and not out.absolute().parent.is_dir():
        raise UserError(f"bench {name}: --out {out}: there is no such folder")
    module = importlib.import_module(f"coterie.bench.{name}")
    result = module.run(**_options(name, ctx.args, list(inspect.signature(module.run).parameters)))
    if out is not None:
        out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if as_json:
        emit(result)
    elif hasattr(module, "table"):
        make_console().print(module.table(result))
    else:
        make_console().print_json(data=result)


@app.command()
def experiment(
    file: Annotated[
        Path, typer.Argument(help="Experiment file (arms, seeds, comparisons), or the name of one in ./experiments.")
    ],
    out: Annotated[Path, typer.Option(help="Directory for runs, results.jsonl and table.md.")] = Path(
        "runs/experiment"
    ),
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, one core each.")] = 2,
    arms: Annotated[str, typer.Option(help="Only these arms, comma-separated.")] = "",
    as_json: Json = False,
) -> None:
    """Arms x seeds: runs what is not done yet, then tables and paired tests over seeds.

    Example: coterie experiment sharing --out runs/sharing
    """
    from coterie.experiment import run_experiment, summary

    table = run_experiment(file, out, jobs, [a for a in arms.split(",") if a])
    if as_json:
        emit(summary(out))
    else:
        typer.echo(f"\n{table.read_text()}\n{table}")


for part in (swarm_cli, helpers_cli, merging_cli, probe_cli, parallel_cli):
    part.register(app)


def _options(name: str, args: list[str], known: list[str]) -> dict[str, Any]:
    """``--key value`` pairs as keyword arguments; whole numbers and fractions as such."""
    keys = [a.removeprefix("--") for a in args[::2]]
    if len(args) % 2 or any(not a.startswith("--") for a in args[::2]):
        raise UserError(f"bench {name}: expected --KEY VALUE pairs, got {' '.join(args)}")
    if unknown := [k for k in keys if k not in known]:
        raise UserError(f"bench {name}: no setting {unknown[0]!r}; known: {', '.join(known) or 'none'}")

    def value(text: str) -> Any:
        for kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
        return text

    return {k: value(v) for k, v in zip(keys, args[1::2], strict=True)}


def _ints(text: str, flag: str) -> list[int]:
    try:
        values = [int(x) for x in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise UserError(f"{flag} {text}: expected whole numbers from 1, separated by commas, such as 1,8")
    return values
