"""`coterie parallel` as typed: two experts, one killed in the middle; the same command resumes it and redoes nothing else."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from coterie.config import load_config
from coterie.errors import UserError
from coterie.merging.crosstime import load_updates
from coterie.merging.sketch import CountSketch
from coterie.models import TINY
from coterie.parallel.jobs import Failed, Processes, carry_out, run_jobs
from coterie.parallel.plan import Job, expert_jobs, workers
from coterie.parallel.run import parallel

CONFIG = """
steps = 4
threads = 1
[model]
name = "tiny"
[parallel]
lam = 0.6
adapt_steps = 1
jobs = 2
retries = 0
log_updates = 1024
probe = 4
[parallel.experts]
bits = ["count_bits"]
divisors = ["gcd"]
[tasks.count_bits]
params = { min_n = 1, max_n = 1023 }
[tasks.gcd]
params = { min_numbers = 2, max_numbers = 2, min_value = 2, max_value = 99 }
[tasks.spell_backward]
params = { min_word_len = 3, max_word_len = 4 }
[rollout]
problems = 4
group_size = 4
max_new_tokens = 32
[eval]
every = 0
problems = 4
samples = 2
[checkpoint]
every = 1
"""


def start(folder: Path) -> "subprocess.Popen[str]":
    (folder / "c.toml").write_text(CONFIG)
    command = [
        sys.executable,
        "-m",
        "coterie",
        "parallel",
        str(folder / "c.toml"),
        "--run_dir",
        str(folder / "run"),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def kill_expert(parent: int, name: str, run: Path) -> None:
    """SIGKILL the training process of one expert once it has saved a checkpoint."""
    deadline = time.monotonic() + 600
    while not list(run.glob("checkpoints/step_*")):
        assert time.monotonic() < deadline, "the expert never saved a checkpoint"
        time.sleep(0.005)
    for task in Path(f"/proc/{parent}/task").iterdir():
        for pid in (task / "children").read_text().split():
            if f"{name}_0.toml" in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(int(pid), signal.SIGKILL)
                return
    raise AssertionError("no such child")


def updates_add_up_to_the_delta(run: Path) -> None:
    """The logged sketches of the real trainer's updates sum to the sketch of (trained - base), as a linear map must."""
    base, trained = load_file(TINY / "model.safetensors"), load_file(run / "model" / "model.safetensors")
    want, sketch = torch.zeros(1024), CountSketch(1024)
    for name in base:
        sketch.add(want, name, trained[name] - base[name])
    got = torch.from_numpy(load_updates(run).sum(0))
    assert float(want.norm()) > 0 and float((got - want).norm()) < 1e-4 * float(want.norm())


def test_a_killed_expert_resumes_alone_and_everything_is_reported(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = start(tmp_path)
    kill_expert(first.pid, "divisors", run / "experts" / "divisors")
    out, _ = first.communicate(timeout=900)
    assert first.returncode == 1, out
    assert "divisors failed, exit code -9" in out and "the same command goes on" in out and "Traceback" not in out
    assert (run / "experts" / "bits" / "DONE").exists() and not (run / "experts" / "divisors" / "DONE").exists()
    before = (run / "experts" / "bits" / "model" / "model.safetensors").stat().st_mtime_ns

    second = start(tmp_path)
    out, _ = second.communicate(timeout=900)
    assert second.returncode == 0, out
    assert "bits: finished before" in out and "divisors: resumed" in out
    assert (run / "experts" / "bits" / "model" / "model.safetensors").stat().st_mtime_ns == before
    lines = (run / "experts" / "divisors" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(x)["step"] for x in lines] == list(range(5))
    assert (run / "experts" / "divisors" / "updates.f32").stat().st_size == 4 * 1024 * 4

    result = json.loads((run / "parallel.json").read_text())
    assert set(result["models"]) == {
        "base", "expert/bits", "expert/divisors", "merged", "shrink/bits", "shrink/divisors", "adapted"
    }  # fmt: skip
    assert result["domains"]["bits"]["kept"].keys() == {"merged", "shrink/bits", "adapted"}
    assert [p["experts"] for p in result["cross_time"]["pairs"]] == [["bits", "divisors"]]
    for name in ("bits", "divisors"):  # one of them went back to a checkpoint
        updates_add_up_to_the_delta(run / "experts" / name)
    assert all(0 <= m["leak"] <= 1 and m["length"] > 0 for m in result["models"].values())
    assert result["untrained"]["tasks"] == ["spell_backward"] and "merged" in result["untrained"]["scores"]
    assert {v["outcome"] for v in result["verdicts"]} <= {"merge", "search", "do not merge", "not enough data"}
    assert len(result["probe"]) == 1 and "bits and divisors" in result["probe"][0]
    assert (run / "probe_4" / "probe.html").is_file() and "probed the base: 4 problems per task" in out
    receipt = json.loads((run / "merged" / "sum_0.6" / "merge_receipt.json").read_text())
    assert receipt["recipe"]["lambda"] == 0.6
    assert "What is kept" in (run / "report.html").read_text()

    other = load_config(tmp_path / "c.toml", ["--run_dir", str(run), "--optim.lr", "1e-5"])
    with pytest.raises(UserError, match="differs in optim"):
        parallel(other)


def job_of(tmp_path: Path) -> Job:
    (tmp_path / "c.toml").write_text(CONFIG)
    return expert_jobs(load_config(tmp_path / "c.toml", ["--run_dir", str(tmp_path)]))[0]


def ending_with(codes: list[int]) -> Callable[..., int]:
    def run(self: Processes, command: list[str], log: Path, threads: int, gpu: str | None) -> int:
        log.write_text("last words\n")
        return codes.pop(0)

    return run


def test_a_config_that_cannot_be_used_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Processes, "run", ending_with([2]))
    with pytest.raises(Failed, match="bits failed, exit code 2: last words"):
        carry_out(job_of(tmp_path), tmp_path, 3, print, Processes())


def test_a_job_that_may_be_retried_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Processes, "run", ending_with([-9, 0]))
    notes: list[str] = []
    carry_out(job_of(tmp_path), tmp_path, 1, notes.append, Processes())
    assert "exit code -9: last words" in notes[1] and "from its last checkpoint" in notes[1]


SHOWS_ITS_GPU = """#!/bin/sh
echo "begin $CUDA_VISIBLE_DEVICES" >> "$SHOWN"
sleep 0.2
echo "end $CUDA_VISIBLE_DEVICES" >> "$SHOWN"
"""


def trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, visible: str, device: str
) -> list[list[str]]:
    """What five jobs on a machine with ``count`` GPUs saw of them, as lines "begin GPU" and "end GPU"."""
    program = tmp_path / "train"
    program.write_text(SHOWS_ITS_GPU)
    program.chmod(0o755)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setenv("SHOWN", str(tmp_path / "shown"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (tmp_path / "c.toml").write_text(CONFIG)
    cfg = load_config(
        tmp_path / "c.toml", ["--run_dir", str(tmp_path), "--model.device", device, "--parallel.jobs", "5"]
    )
    first = expert_jobs(cfg)[0]
    run_jobs([Job(f"job{i}", first.runs) for i in range(5)], tmp_path, cfg, workers(cfg), print)
    return [line.split() for line in (tmp_path / "shown").read_text().splitlines()]


@pytest.mark.parametrize(
    ("visible", "device", "seen"),
    [("", "auto", {"0", "1"}), ("5, 7,9", "cuda", {"5", "7"}), ("GPU-ab,GPU-cd", "auto", {"GPU-ab", "GPU-cd"})],
)
def test_each_gpu_trains_one_expert_at_a_time(
    visible: str, device: str, seen: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = trained_on(tmp_path, monkeypatch, 2, visible, device)
    assert {gpu for _, gpu in lines} == seen and len(lines) == 10
    for gpu in seen:
        assert [what for what, at in lines if at == gpu] == ["begin", "end"] * (sum(at == gpu for _, at in lines) // 2)


@pytest.mark.parametrize(("count", "device", "at_once"), [(2, "cuda:1", 1), (2, "cpu", 5), (0, "auto", 5)])
def test_a_named_gpu_takes_all_experts_in_turn_and_the_cpu_is_not_bounded_by_gpus(
    count: int, device: str, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = trained_on(tmp_path, monkeypatch, count, "", device)
    assert all(len(line) == 1 for line in lines)  # the environment is left alone
    running = [sum(1 if what == "begin" else -1 for (what,) in lines[: n + 1]) for n in range(len(lines))]
    assert max(running) <= at_once and (at_once == 1 or max(running) > 1)
