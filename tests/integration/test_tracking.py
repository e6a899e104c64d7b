"""TensorBoard, W&B (offline) and trackio, each by a real run that is stopped and continued. Skipped where not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from short_run import SHORT

from coterie.rundir import read_jsonl


def train(folder: Path, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    (folder / "c.toml").write_text(SHORT)
    places = {"HOME": str(folder / "home"), "TRACKIO_DIR": str(folder / "trackio"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "coterie", "train", "c.toml", "--run_dir", "run", *flags]
    return subprocess.run(command, cwd=folder, env={**os.environ, **places, **env}, capture_output=True, text=True)


def train_twice(folder: Path, tracker: str, **env: str) -> None:
    """Two steps, then a third in a second process."""
    for steps in ("2", "3"):
        done = train(folder, f"--tracking.{tracker}", "true", "--steps", steps, **env)
        assert done.returncode == 0, done.stdout + done.stderr


def own_rewards(folder: Path) -> list[tuple[int, float]]:
    return [(r["step"], r["own/reward"]) for r in read_jsonl(folder / "run" / "metrics.jsonl") if r["step"]]


def test_tensorboard_holds_what_the_log_holds(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    train_twice(tmp_path, "tensorboard")
    read = (
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator as E; import json;"
        "e = E('run/tensorboard'); e.Reload(); print(json.dumps([(s.step, s.value) for s in e.Scalars('own/reward')]))"
    )
    done = subprocess.run([sys.executable, "-c", read], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert [tuple(row) for row in json.loads(done.stdout)] == own_rewards(tmp_path)


def test_wandb_offline_stays_in_the_run_directory(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    train_twice(tmp_path, "wandb", WANDB_MODE="offline")
    logs = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    name = (tmp_path / "run" / "wandb" / "id").read_text()
    assert len(logs) == 2 and all(f.name == f"run-{name}.wandb" for f in logs)  # one run, two sittings
    assert all(b"own/reward" in f.read_bytes() for f in logs)
    assert not (tmp_path / "wandb").exists()


def test_wandb_without_a_login_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    done = train(tmp_path, "--tracking.wandb", "true", "--steps", "1", WANDB_MODE="online", WANDB_API_KEY="")
    assert done.returncode == 2 and "WANDB_MODE=offline" in done.stderr and "Traceback" not in done.stderr


def test_trackio_keeps_one_run(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    train_twice(tmp_path, "trackio")
    read = """
import json, trackio
from trackio.api import SQLiteStorage
runs = list(trackio.Api().runs("coterie"))
rows = [(m["step"], m["own/reward"]) for m in SQLiteStorage.get_logs("coterie", runs[0].name) if m["step"]]
print("\\n" + json.dumps([len(runs), rows]))
"""
    env = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    done = subprocess.run([sys.executable, "-c", read], cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    count, history = json.loads(done.stdout.splitlines()[-1])
    assert count == 1 and [tuple(row) for row in history] == own_rewards(tmp_path)
