"""`coterie parallel --backend ray` as typed, on a cluster that Ray starts here: byte for byte the models of `--backend local`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install -e '.[ray]'"),
]
CONFIG = """
steps = 2
threads = 1
[model]
name = "tiny"
[parallel]
lam = 0.6
adapt_share = 0
retries = 0
[parallel.experts]
bits = ["count_bits"]
divisors = ["gcd"]
[tasks.count_bits]
params = { min_n = 1, max_n = 1023 }
[tasks.gcd]
params = { min_numbers = 2, max_numbers = 2, min_value = 2, max_value = 99 }
[rollout]
problems = 4
group_size = 4
max_new_tokens = 32
[eval]
every = 0
problems = 4
samples = 2
"""


@pytest.fixture
def sockets() -> Iterator[str]:
    """Ray's folder; a short path, since those of sockets may not be long."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        yield folder


def parallel(folder: Path, backend: str, sockets: str) -> subprocess.CompletedProcess[str]:
    (folder / "c.toml").write_text(CONFIG)
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    env |= {"RAY_TMPDIR": sockets, "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "coterie", "parallel", "c.toml", "--backend", backend, "--run_dir", backend]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=1800)


def models(run: Path) -> dict[str, str]:
    files = [*run.glob("experts/*/model/model.safetensors"), *run.glob("merged/*/model.safetensors")]
    return {str(f.relative_to(run)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def test_ray_trains_the_models_that_local_trains_and_says_what_failed(tmp_path: Path, sockets: str) -> None:
    for backend in ("local", "ray"):
        assert not list(Path(sockets).iterdir())
        done = parallel(tmp_path, backend, sockets)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "bits: finished after" in done.stdout and "divisors: finished after" in done.stdout
    assert list(Path(sockets).glob("ray/session_*"))  # Ray was at work
    assert models(tmp_path / "ray") == models(tmp_path / "local") and len(models(tmp_path / "ray")) == 3
    scores = [json.loads((tmp_path / b / "parallel.json").read_text())["models"] for b in ("ray", "local")]
    assert scores[0] == scores[1]

    bits = tmp_path / "ray" / "experts" / "bits"
    shutil.rmtree(bits)
    bits.write_text("a file where the run should be")
    again = parallel(tmp_path, "ray", sockets)
    assert again.returncode == 1 and "divisors: finished before" in again.stdout, again.stdout + again.stderr
    assert "bits failed, exit code 2" in again.stderr and "Traceback" not in again.stderr
