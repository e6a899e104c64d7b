"""The run directory: what is in it, who may write to it, and how a run finds its way back.

``config.toml`` (resolved), ``metrics.jsonl``, ``trajectories.jsonl``, ``checkpoints/``, ``report.html``, ``DONE``.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from coterie.config import Config, load_config
from coterie.errors import CoterieError, UserError

# Settings that may change between a run and its continuation; everything else must be the same.
_MAY_CHANGE = {"steps", "tokens", "threads", "checkpoint", "tracking", "run_dir"}


class RunDir:
    """One run's folder, locked for as long as the object lives.

    Raises:
        UserError: the run is finished, belongs to another config, or is being written by another process.
    """

    def __init__(self, cfg: Config) -> None:
        self.path = Path(cfg.run_dir)
        self.checkpoints = self.path / "checkpoints"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock: IO[str] = open(self.path / ".lock", "w")  # noqa: SIM115  (held until close)
        except OSError as e:
            raise UserError(f"run_dir {self.path}: cannot write there ({e.strerror}); choose another --run_dir") from e
        try:
            self._claim(cfg)
        except BaseException:
            self.close()
            raise

    def _claim(self, cfg: Config) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise UserError(f"run_dir {self.path}: another process is writing this run") from e
        config = self.path / "config.toml"
        if config.exists():
            before = load_config(config)
            if (self.path / "DONE").exists():
                self._check_further(before, cfg)
            changed = [k for k in Config.model_fields if k not in _MAY_CHANGE and getattr(before, k) != getattr(cfg, k)]
            others = [p for p in self.path.iterdir() if p != config and not p.name.startswith(".")]
            if changed and others:  # none: a start that failed, and wrote nothing that could be lost
                raise UserError(
                    f"run_dir {self.path}: holds a run with another config (differs in {', '.join(changed)}); "
                    "choose another --run_dir"
                )
            (self.path / "DONE").unlink(missing_ok=True)
        elif any(not p.name.startswith(".") for p in self.path.iterdir()):
            raise UserError(f"run_dir {self.path}: not empty and not a coterie run; choose another --run_dir")
        write_atomic(config, cfg.to_toml())

    def _check_further(self, before: Config, cfg: Config) -> None:
        """Refuse to go on with a finished run unless what ended it has been raised."""
        log = self.path / "metrics.jsonl"
        step = max((r["step"] for r in read_jsonl(log)), default=0) if log.exists() else before.steps
        if before.tokens and step < before.steps:
            done = f"its {before.tokens:,} tokens were spent after step {step} of {before.steps}"
            setting, raised = "--tokens (0: no limit)", not cfg.tokens or cfg.tokens > before.tokens
        else:
            done, setting, raised = f"{before.steps} steps", "--steps", cfg.steps > before.steps
        if not raised:
            raise UserError(
                f"run_dir {self.path}: this run is finished ({done}); choose another --run_dir, "
                f"or raise {setting} to train on"
            )

    def rewind(self, step: int) -> None:
        """Drop log lines of steps that will be run again."""
        for name in ("metrics.jsonl", "trajectories.jsonl"):
            path = self.path / name
            if path.exists():
                kept = [r for r in read_jsonl(path) if r["step"] < step]
                write_atomic(path, "".join(dumps(r) + "\n" for r in kept))

    def append(self, name: str, records: list[dict[str, Any]]) -> None:
        """Add lines to ``metrics.jsonl`` or ``trajectories.jsonl``.

        Raises:
            CoterieError: the disk refuses.
        """
        try:
            with open(self.path / name, "a", encoding="utf-8") as f:
                f.write("".join(dumps(r) + "\n" for r in records))
        except OSError as e:
            raise CoterieError(f"{self.path / name}: cannot write ({e.strerror}); the last checkpoint is intact") from e

    def finish(self) -> None:
        write_atomic(self.path / "DONE", "")

    def close(self) -> None:
        self._lock.close()


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a JSONL log. A last line cut off by a kill is left out; any other broken line is an error.

    Raises:
        CoterieError: names file and line.
    """
    lines = path.read_bytes().split(b"\n")
    for n, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except ValueError as e:  # broken JSON, or bytes that are no UTF-8
            if n == len(lines):  # no newline after it: the writer was killed in the middle
                return
            raise CoterieError(f"{path}:{n}: not valid JSON ({e})") from e
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise CoterieError(f"{path}:{n}: not a record of a run (no step)")
        yield record


def dumps(record: dict[str, Any]) -> str:
    """JSON without NaN or infinity (which JSON has no words for): a non-finite number is a bug of the metric."""
    return json.dumps(record, allow_nan=False, ensure_ascii=False)


def write_atomic(path: Path, text: str) -> None:
    """Replace ``path`` by ``text``: the old content or the new, never half of it.

    Raises:
        CoterieError: the disk refuses, or the folder does not exist.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        part.rename(path)
    except OSError as e:
        raise CoterieError(f"{path}: cannot write ({e.strerror})") from e
