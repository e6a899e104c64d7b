"""The README's commands run (with fewer steps), and every command in the docs at least parses."""

import importlib
import inspect
import os
import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from coterie.cli import app

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "configs").glob("*.toml"))]
SHORT = {
    "train": "--steps 2 --eval.problems 2 --eval.samples 2 --threads 1 --rollout.problems 2",
    "eval": "--problems 2",
}


def commands(path: Path, section: str = "") -> list[list[str]]:
    """The ``coterie ...`` lines of a page's code blocks (or a config's header), without comments."""
    text = path.read_text(encoding="utf-8")
    if section:
        text = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.S) if path.suffix == ".md" else [text.replace("#   ", "")]
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines = [line.removeprefix("$ ").removeprefix(".venv/bin/") for line in lines]
    return [shlex.split(line, comments=True)[1:] for line in lines if re.match(r"coterie [a-z]", line)]


@pytest.mark.parametrize("path", DOCS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_documented_command_parses(path: Path) -> None:
    root = typer.main.get_command(app)
    for args in commands(path):
        command, rest, context = root, list(args), None
        while hasattr(command, "commands"):
            assert rest and rest[0] in command.commands, f"{path.name}: no such command: coterie {' '.join(args)}"
            command = command.commands[rest.pop(0)]
        context = command.make_context("coterie", rest)
        known = {o for p in command.params for o in p.opts}
        if args[0] == "bench":
            settings = inspect.signature(importlib.import_module(f"coterie.bench.{args[1]}").run).parameters
            known |= {f"--{name.replace('_', '-')}" for name in settings} | {f"--{name}" for name in settings}
        loose = [a.partition("=")[0] for a in context.args if a.startswith("--")]
        wrong = [a for a in loose if "." not in a and a[2:] not in _top_level() and a not in known]
        assert not wrong, f"{path.name}: unknown option {wrong} in: coterie {' '.join(args)}"


def _top_level() -> set[str]:
    from coterie.config import Config

    return set(Config.model_fields)


def test_readme_has_commands_to_run() -> None:
    assert len(commands(ROOT / "README.md")) >= 8


def test_readme_train_report_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The "Train" section as written, with two steps instead of all."""
    monkeypatch.chdir(tmp_path)
    os.symlink(ROOT / "configs", tmp_path / "configs")
    wanted = [c for c in commands(ROOT / "README.md", "Train") if c[0] in SHORT or c[0] == "report"]
    assert [c[0] for c in wanted] == ["train", "train", "report", "eval"]
    for args in wanted:
        done = CliRunner().invoke(app, [*args, *SHORT.get(args[0], "").split()], catch_exceptions=False)
        assert done.exit_code == 0, done.output
    assert (tmp_path / "runs" / "compare.html").stat().st_size > 100_000
    assert (tmp_path / "runs" / "tiny" / "model" / "model.safetensors").is_file()
