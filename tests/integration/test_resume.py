"""Kill a run at random instants; the resumed run must end bit-identical to an uninterrupted one (CPU)."""

import json
import random
import signal
import subprocess
import sys
import time

import pytest

from coterie.rundir import read_jsonl

CONFIG = """
steps = 8
seed = 3
threads = 1
[model]
name = "tiny"
[tasks.chain_sum]
params = { min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }
[tasks.gcd]
params = { min_numbers = 2, max_numbers = 2, min_value = 2, max_value = 99 }
[rollout]
problems = 4
group_size = 4
max_new_tokens = 24
[eval]
every = 4
problems = 4
samples = 2
"""


def start(tmp_path, name):
    config = tmp_path / "c.toml"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "coterie", "train", str(config), "--run_dir", str(tmp_path / name)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process):
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out
    return out


def facts(run):
    """Everything that must be equal: metrics without times, transcripts, final weights and optimiser state."""
    metrics = [{k: v for k, v in r.items() if not k.startswith("time/")} for r in read_jsonl(run / "metrics.jsonl")]
    last = run / "checkpoints" / "step_000008"
    blobs = [(last / f).read_bytes() for f in ("weights.safetensors", "optimizer.safetensors")]
    return metrics, list(read_jsonl(run / "trajectories.jsonl")), blobs


def killed_until_done(tmp_path, kills, seed):
    """Start, kill -9 after a random time, start again ... then let it finish. Returns how many kills hit a live run."""
    rng, hits = random.Random(seed), 0
    for _ in range(kills):
        process = start(tmp_path, "killed")
        wait_for_first_line(process)
        time.sleep(rng.uniform(0.0, 0.6))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        if (tmp_path / "killed" / "DONE").exists():
            break
        hits += 1
    else:
        finish(start(tmp_path, "killed"))
    return hits


def wait_for_first_line(process):
    """Until the run has loaded (it prints its first step), so that kills land in the work and not in the imports."""
    process.stdout.readline()


def check(tmp_path, kills, seed):
    finish(start(tmp_path, "whole"))
    hits = killed_until_done(tmp_path, kills, seed)
    assert hits >= min(2, kills)
    whole, killed = facts(tmp_path / "whole"), facts(tmp_path / "killed")
    assert [r["step"] for r in killed[0]] == list(range(9))
    assert killed[0] == whole[0]
    assert killed[1] == whole[1]
    assert killed[2] == whole[2], "weights or optimiser state differ"
    return hits


def test_killed_run_resumes_bit_identically_ck04_ck05_ck06_ck09(tmp_path):
    check(tmp_path, 2, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_many_kills(tmp_path, seed):
    hits = check(tmp_path, 5, seed=100 + seed)
    print(json.dumps({"kills that hit a live run": hits}))


def test_the_same_command_on_a_finished_run_refuses(tmp_path):
    finish(start(tmp_path, "whole"))
    process = start(tmp_path, "whole")
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 2 and "this run is finished" in out and "Traceback" not in out
