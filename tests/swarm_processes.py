"""Start and watch real node processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Worker:
    """One node process; its lines are kept in a file, so that they outlive a kill. ``prefix``: a command to run it under."""

    def __init__(
        self,
        folder: Path,
        number: int,
        steps: int,
        pause: float,
        exchange: str,
        *,
        prefix: Sequence[str] = (),
        **settings: str,
    ) -> None:
        self.run_dir = folder / f"node_{number}"
        self.run_dir.mkdir(exist_ok=True)
        self.log = self.run_dir / "lines"
        extra = [f"{k}={v}" for k, v in settings.items()]
        command = [
            *prefix,
            sys.executable,
            str(HERE / "swarm_worker.py"),
            str(number),
            str(steps),
            str(pause),
            exchange,
        ]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with open(self.log, "a") as out, open(self.run_dir / "errors", "a") as errors:
            self.process = subprocess.Popen([*command, str(self.run_dir), *extra], stdout=out, stderr=errors, env=env)

    def lines(self) -> list[dict[str, Any]]:
        text = self.log.read_text() if self.log.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.lines() if "step" in line]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self, timeout: float = 60.0) -> int:
        try:
            return self.process.wait(timeout)
        finally:
            if self.process.poll() is None:
                self.kill()

    def errors(self) -> str:
        return (self.run_dir / "errors").read_text()


def wait_for(what: Any, timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
