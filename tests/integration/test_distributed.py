"""Two processes for one policy (gloo, CPU) make the update that one makes. Not run on GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from distributed_worker import BROKEN, update
from safetensors.torch import load_file
from swarm_processes import free_port

from coterie.config import load_config
from coterie.errors import UserError
from coterie.models import TINY
from coterie.run import check

WORKER = Path(__file__).parents[1] / "distributed_worker.py"
BASE = ["--threads", "1", "--rollout.problems", "3", "--rollout.group_size", "4", "--rollout.max_new_tokens", "40",
        "--tasks.spell_backward.params={min_word_len=3,max_word_len=4}", "--seed", "3"]  # fmt: skip
CASES = {
    # an odd number of micro-batches: one process has fewer
    "full weights": ["--optim.token_budget", "100", "--optim.updates", "2"],
    # one micro-batch: process 1 has none
    "adapters, kl": ["--model.lora_rank", "4", "--loss.kl_coef", "0.05", "--optim.lr", "1e-3"],
    "recomputed activations": ["--optim.token_budget", "200", "--optim.activation_checkpointing", "layer"],
    BROKEN: ["--optim.token_budget", "100"],
}


def run(processes: int, *args: str) -> list[tuple[int, str]]:
    """Exit codes and standard errors of a group of workers."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(processes)}
    env = {**os.environ, **group, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(WORKER), *args]
    envs = [{**env, "RANK": str(r)} for r in range(processes)]
    started = [subprocess.Popen(command, env=e, stderr=subprocess.PIPE, text=True) for e in envs]
    try:
        said = [p.communicate(timeout=300)[1] for p in started]
        return [(p.returncode, text) for p, text in zip(started, said, strict=True)]
    finally:
        for p in started:
            p.kill()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders with what one process and what two made of all cases."""
    folder = tmp_path_factory.mktemp("distributed")
    out = {}
    for count in (1, 2):
        out[count] = folder / str(count)
        out[count].mkdir()
    (folder / "cases.json").write_text(json.dumps({n: [*BASE, *flags] for n, flags in CASES.items()}))
    done = run(2, str(out[2]), str(folder / "cases.json"))
    assert all(code == 0 for code, _ in done), done
    for name, flags in CASES.items():
        if name != BROKEN:
            update(out[1] / name, [*BASE, *flags], broken=False)
    return out


@pytest.mark.parametrize("name", [n for n in CASES if n != BROKEN])
def test_cl04_two_processes_with_different_work_make_the_update_of_one(name: str, made: dict[int, Path]) -> None:
    want, got = load_file(made[1] / name), load_file(made[2] / name)
    first = load_file(TINY / "model.safetensors")
    assert want.keys() == got.keys()
    kinds = {"exp_avg.", "exp_avg_sq.", "step.", ""}
    for kind in kinds:
        keys = [k for k in want if k.startswith(kind) and (kind or not k.startswith(tuple(kinds - {""})))]
        size = sum(float((want[k] - first[k] if k in first else want[k]).square().sum()) for k in keys)
        off = sum(float((got[k] - want[k]).square().sum()) for k in keys)
        assert size > 0 and off**0.5 <= 1e-5 * size**0.5, kind or "weights"
    a, b = (json.loads((made[n] / f"{name}.json").read_text()) for n in (1, 2))
    assert any(x["policy/nothing_to_train"] == 0 for x in a)
    for x, y in zip(a, b, strict=True):
        assert x.keys() == y.keys()
        plain = {k: v for k, v in x.items() if not k.startswith("time/")}
        assert {k: y[k] for k in plain} == pytest.approx(plain, rel=1e-4, abs=1e-5)


def test_cl04_a_loss_that_is_not_finite_in_one_process_skips_the_step_in_all(made: dict[int, Path]) -> None:
    rows = json.loads((made[2] / f"{BROKEN}.json").read_text())
    assert any(r["policy/nothing_to_train"] == 0 for r in rows)
    assert all(r["policy/skipped"] == 1 for r in rows if not r["policy/nothing_to_train"])
    first, got = load_file(TINY / "model.safetensors"), load_file(made[2] / BROKEN)
    assert all((got[k] == first[k]).all() for k in first if k in got) and not [
        k for k in got if k.startswith("exp_avg")
    ]


@pytest.mark.slow
def test_cl04_a_stall_is_named_within_the_stated_time() -> None:
    began = time.monotonic()
    (code, said), _ = run(2, "stall")
    assert code != 0 and "process 0 of 2: another process did not answer" in said
    assert time.monotonic() - began < 90


def test_what_does_not_go_with_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    check(load_config(None, BASE))
    for flags in ("--swarm.exchange local", "--advantage.kind gae", "--method sft", "--engine.kind vllm"):
        with pytest.raises(
            UserError, match=r"2 processes for one policy do not go with .* yet; start without torchrun"
        ):
            check(load_config(None, [*BASE, *flags.split()]))


@pytest.mark.slow
def test_torchrun_resumes_and_a_single_process_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(
        "threads = 1\n[tasks.count_bits]\nparams = { min_n = 1, max_n = 1023 }\n[rollout]\nproblems = 3\n"
        "[eval]\nproblems = 2\nsamples = 1\n"
    )
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    train = ["-m", "coterie", "train", "c.toml", "--run_dir", "run", "--steps"]
    for launcher, steps in ((torchrun, "2"), (torchrun, "3"), ([sys.executable], "4")):
        done = subprocess.run([*launcher, *train, steps], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines == [0, 1, 2, 3, 4]
