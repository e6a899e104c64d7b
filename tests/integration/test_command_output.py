"""What commands print is what was written: no text lost as markup, nothing wrapped or cut in a pipe."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from rich.table import Table
from typer.testing import CliRunner

import coterie
from coterie.cli import app
from coterie.console import make_console

LONG = "a text of some words that is longer than any terminal is wide, " * 6


def commands(group: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


def letters(text: str) -> str:
    return re.sub(r"[\s│╭╮╰╯─]+", "", text)


COMMANDS = [pytest.param(*c, id=" ".join(c[0])) for c in commands(typer.main.get_command(app))]


@pytest.mark.parametrize(("path", "command"), COMMANDS)
def test_help_shows_every_text_whole(path: tuple[str, ...], command: object) -> None:
    """Square brackets are markup to whoever prints help: a text with them would lose what is inside."""
    shown = letters(CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "200"}).output)
    texts = [getattr(command, "help", None), *(getattr(p, "help", None) for p in getattr(command, "params", ()))]
    lines = [line for text in texts if text for line in text.splitlines()]
    assert lines and [line for line in lines if letters(line) not in shown] == []


def test_a_table_in_a_pipe_is_as_wide_as_it_needs_and_brackets_are_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # colours do not make a pipe a terminal
    table = Table("finding", "what to do", box=None)
    table.add_row(LONG, "add a [tasks.NAME] section :bug:")
    make_console().print(table)
    make_console().print(f"[x] {LONG}")
    _, row, line = capsys.readouterr().out.splitlines()
    assert LONG.strip() in row and "add a [tasks.NAME] section :bug:" in row and line == f"[x] {LONG}"


def test_commands_have_one_console() -> None:
    made = [p.name for p in Path(coterie.__file__).parent.rglob("*.py") if re.search(r"\bConsole\(", p.read_text())]
    assert [name for name in made if name != "console.py"] == []
