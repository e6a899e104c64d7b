"""Where commands print, and what a person sees while a run goes on: a live table in a terminal, plain lines when piped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

# column title -> (metric key, how to print it); columns whose metric never came show nothing
COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "own reward": ("own/reward", "{:.3f}".format),
    "held-out": ("eval/accuracy", "{:.3f}".format),
    "informative": ("own/informative", "{:.0%}".format),
    "peer groups": ("swarm/used_groups", "{:.0f}".format),
    "tokens/s": ("time/tokens_per_s", "{:,.0f}".format),
    "truncated": ("own/truncated", "{:.0%}".format),
    "length": ("own/length", "{:.1f}".format),
    "grad norm": ("policy/grad_norm", "{:.3f}".format),
}
_KEEP = 12  # rows of the live table
_WIDE = 10_000  # columns of a pipe or file: nothing is wrapped or cut there


def make_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """The console of every command. Texts are shown as they are: nothing in them is read as markup or as a picture's name."""
    console = Console(stderr=stderr, quiet=quiet, markup=False, emoji=False, highlight=False)
    if not console.file.isatty():
        console.width = _WIDE
    return console


def say(text: str) -> None:
    """What a command is about to do, on stderr: stdout is for its result."""
    make_console(stderr=True).print(text, soft_wrap=True)


class RunConsole:
    """Progress of one run. ``row`` adds a step; ``note`` says something in between."""

    def __init__(self, steps: int, *, quiet: bool = False, every: int = 1) -> None:
        self._console = make_console(quiet=quiet)
        self._every, self._steps = max(1, every), steps
        self._rows: list[dict[str, Any]] = []
        self._live: Live | None = None
        self._progress = Progress(
            TextColumn("[bold]step"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=self._console
        )
        self._bar = self._progress.add_task("step", total=steps)
        self._plain_header = False

    def __enter__(self) -> RunConsole:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)
            self._console.print(self.table())

    def note(self, text: str) -> None:
        self._console.print(text)

    def row(self, step: int, metrics: dict[str, float]) -> None:
        """Show one step's metrics (rows with a held-out evaluation always, others every ``every`` steps)."""
        self._progress.update(self._bar, completed=step)
        shown = "eval/accuracy" in metrics or step % self._every == 0
        if shown:
            self._rows.append({"step": step, **metrics})
        if self._live is not None:
            grid = Table.grid()
            grid.add_row(self.table())
            grid.add_row(self._progress)
            self._live.update(grid)
        elif shown:
            self._plain(step, metrics)

    def table(self) -> Table:
        """The last rows, as a table of the columns that have values."""
        rows = self._rows[-_KEEP:]
        columns = {t: c for t, c in COLUMNS.items() if any(c[0] in r for r in rows)}
        table = Table("step", *columns, pad_edge=False, box=None, header_style="bold")
        for r in rows:
            cells = [fmt(r[key]) if key in r else "" for key, fmt in columns.values()]
            table.add_row(f"{r['step']}/{self._steps}", *cells)
        return table

    def _plain(self, step: int, metrics: dict[str, float]) -> None:
        cells = [f"{title} {fmt(metrics[key])}" for title, (key, fmt) in COLUMNS.items() if key in metrics]
        self._console.print(f"step {step}/{self._steps}  " + "  ".join(cells), soft_wrap=True)
