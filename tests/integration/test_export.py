"""`coterie export`: the folder loads in transformers, the card says what was measured, and nothing private leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from short_run import SHORT
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from coterie.cli import app
from coterie.config import load_config
from coterie.errors import UserError
from coterie.export import export, public_config
from coterie.rundir import read_jsonl

CONFIG = f"steps = 1{SHORT}"


def call(*args: str | Path) -> str:
    done = CliRunner().invoke(app, [str(a) for a in args], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    (folder / "c.toml").write_text(CONFIG)
    call("train", folder / "c.toml", "--run_dir", folder / "run")
    return folder / "run"


def test_a_run_becomes_a_folder_that_loads_with_its_measured_figures(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shown = call("export", run, "--out", out, "--name", "me/bits")
    assert f"hf upload me/bits {out}" in shown
    card = (out / "README.md").read_text()
    last = [r for r in read_jsonl(run / "metrics.jsonl") if "eval/accuracy" in r][-1]
    assert "# me/bits" in card and "| count_bits |" in card
    assert f"| {last['eval/count_bits/accuracy']:.3f} | {last['eval/count_bits/low']:.3f} to" in card
    weights = AutoModelForCausalLM.from_pretrained(out).state_dict()
    trained = AutoModelForCausalLM.from_pretrained(run / "model").state_dict()
    assert all(torch.equal(weights[k], trained[k]) for k in trained)
    assert AutoTokenizer.from_pretrained(out).decode([5])
    assert load_config(out / "coterie.toml").tasks == load_config(run / "config.toml").tasks


def test_a_merge_comes_with_receipt_and_evaluation_and_without_paths(run: Path, tmp_path: Path) -> None:
    merged, out = tmp_path / "merged", tmp_path / "out"
    call("merge", "tiny", run, run, "--labels", "a,b", "--lambda", "0.5", "--out", merged)
    found = call("eval", merged, "--tasks", "count_bits", "--problems", "2", "--json")
    (tmp_path / "eval.json").write_text(found)
    call("export", merged, "--out", out, "--results", tmp_path / "eval.json")
    card, receipt = (out / "README.md").read_text(), json.loads((out / "merge_receipt.json").read_text())
    assert (
        "task arithmetic" in card
        and f"| count_bits | {json.loads(found)['tasks']['count_bits']['pass']['1']:.3f}" in card
    )
    assert receipt["recipe"]["lambda"] == 0.5 and (out / "eval.json").is_file()
    assert str(tmp_path) not in card + json.dumps(receipt) and str(run) not in card + json.dumps(receipt)


def test_private_settings_stay_here() -> None:
    flags = "--swarm.user bob --swarm.invite_file /home/bob/invite --helpers.roles.verify.url http://bob:1/v1"
    more = "--helpers.roles.verify.model m --rollout.max_new_tokens 512 --optim.lr 1e-5"
    cfg = load_config(None, [*flags.split(), *more.split()])
    for text in (public_config(cfg), public_config(cfg, defaults=False)):
        assert "bob" not in text and "lr = 1e-5" in text.replace("1e-05", "1e-5")


def test_what_is_neither_run_nor_model_is_refused_and_nothing_is_written(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a finished run"):
        export(tmp_path, tmp_path / "x")
    with pytest.raises(UserError, match="exists already"):
        export(run, run)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UserError, match="not a file written by"):
        export(run, tmp_path / "x", results=[tmp_path / "bad.json"])
    assert not (tmp_path / "x").exists() and not list(tmp_path.glob(".x*"))
