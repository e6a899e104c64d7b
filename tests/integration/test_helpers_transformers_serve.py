"""Against a server that is not ours: `transformers serve`, where its extra packages are installed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from helpers_kit import save_model
from test_helpers_endpoint import ask, helper_set

from coterie.types import Source


@pytest.mark.slow
def test_transformers_serve(tmp_path: Path) -> None:
    for package in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(package, exc_type=ImportError)
    folder = save_model(tmp_path / "m")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [str(Path(sys.executable).parent / "transformers"), "serve", str(folder), "--device", "cpu"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(port, server)
        with helper_set(f"http://127.0.0.1:{port}/v1", {"verify": str(folder)}, timeout_s=60) as helpers:
            rows = ask(helpers, n=3)
    finally:
        server.terminate()
        server.wait(timeout=20)
    assert [c.outcome for t in rows for c in t.consults] == ["ok"] * 3
    assert all((t.source == Source.HELPER).any() and t.failed is None for t in rows)


def _wait(port: int, server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        assert server.poll() is None, "transformers serve ended"
        try:
            httpx.get(f"http://127.0.0.1:{port}/health")
            return
        except httpx.TransportError:
            time.sleep(0.3)
    raise AssertionError("transformers serve did not come up")
