"""``coterie bench round``: a GRPO round here and in TRL, same model, prompts, type and threads, in one run, alternating.

TRL runs in an environment of its own (``make bench-env``). Both sides first train on the same fixed batch, and their losses
and gradient norms must agree; figures are medians over repetitions of the ratio within a repetition.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from coterie.config import Recompute
from coterie.errors import CoterieError, UserError

LOSS_TOLERANCE = 1e-4  # relative, of the loss and of the gradient's norm
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
LEARNING_RATE = 1e-9  # every part of a step is done, and repetitions stay comparable


@dataclass(frozen=True)
class Case:
    """``prompt_words`` > 0: filler that makes prompts long; ``story``: a request for a long answer instead of a task."""

    model: str
    problems: int
    group_size: int
    max_new_tokens: int
    micro_batch: int  # TRL's rows per micro-batch
    token_budget: int  # coterie's tokens per micro-batch
    threads: int
    prompt_words: int = 0
    story: bool = False
    recompute: Recompute = "none"  # what coterie's update makes again in the backward pass


CASES = {
    "smollm2": Case("smollm2", 8, 8, 64, 8, 768, 2, recompute="mlp"),
    "smollm2-long-prompt": Case("smollm2", 2, 8, 32, 8, 1024, 2, prompt_words=320, recompute="mlp"),
    "smollm2-long-answer": Case("smollm2", 2, 8, 256, 8, 768, 2, story=True, recompute="mlp"),
    "smollm2-quarter": Case("smollm2", 2, 8, 64, 8, 768, 2, recompute="mlp"),
    "tiny": Case("tiny", 9, 8, 64, 72, 16384, 1),
}


def run(
    cases: str = "tiny",
    repeats: int = 5,
    warmup: int = 1,
    threads: int = 0,
    checkpointing: int = 0,
    folder: str = "",
    trl: str = "",
) -> dict[str, Any]:
    """Measure ``cases`` (names from ``CASES``, separated by commas).

    Args:
        repeats: measured repetitions.
        warmup: unmeasured rounds before them (the update is warm from the comparison of the losses).
        threads: of each side; 0 is the case's own number.
        checkpointing: 1 lets TRL recompute activations (its default; less memory, more time). 0 is its faster setting.
        folder: gets CASE.json, written again after every repetition.
        trl: interpreter with TRL; default ``.venv-bench/bin/python`` in the current folder.

    Raises:
        UserError: unknown case, or no environment for TRL. CoterieError: a side failed, or the results disagree.
    """
    for name, value, least in (("repeats", repeats, 1), ("warmup", warmup, 0), ("threads", threads, 0)):
        if not isinstance(value, int) or value < least:
            raise UserError(f"bench round: --{name} {value}: expected a whole number from {least}")
    names = str(cases).split(",")
    if unknown := [n for n in names if n not in CASES]:
        raise UserError(f"bench round: unknown case {unknown[0]!r}; one of {', '.join(CASES)}")
    python = Path(str(trl or ".venv-bench/bin/python"))
    if not python.is_file():
        raise UserError(
            f"bench round: {python} does not exist; run `make bench-env`, or name an interpreter with --trl"
        )
    if folder:
        try:
            Path(str(folder)).mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UserError(f"bench round: --folder {folder}: cannot be made ({e.strerror})") from e
    results = {}
    for name in names:
        file = Path(str(folder)) / f"{name}.json" if folder else None
        case = replace(CASES[name], threads=threads or CASES[name].threads)
        results[name] = _measure(name, case, repeats, warmup, bool(checkpointing), python, file)
    return results


def _measure(
    name: str, case: Case, repeats: int, warmup: int, checkpointing: bool, python: Path, file: Path | None
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        settings = _settings(case)
        own = _Side("coterie", [sys.executable, "-m", "coterie.bench.own_side"], settings, Path(folder))
        prepared = own.ask("prepare")
        prompts = [p["prompt"] for p in settings["problems"]]
        theirs = settings | {
            "prompts": prompts,
            "batch": prepared["batch"],
            "rows": case.problems * case.group_size,
            "checkpointing": checkpointing,
        }
        script = str(Path(__file__).with_name("trl_side.py"))
        other = _Side("TRL", [str(python), script], theirs, Path(folder))
        data: dict[str, Any] = {
            "case": asdict(case) | {"name": name, "warmup": warmup, "trl_checkpointing": checkpointing},
            "machine": {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()},
            "prompt_tokens": prepared["prompt_tokens"],
            "cost": prepared["cost"],
            "repetitions": [],
        }
        check = {side.name: side.ask("update") for side in (own, other)}  # also the warm-up of the update
        data["check"] = agreement(check["coterie"], check["TRL"])
        for side in (own, other) * warmup:
            side.ask("round")
        for _ in range(repeats):
            data["repetitions"].append(_repetition(own, other))
            if (seen := data["repetitions"][-1]["trl"]["round"]["prompt_tokens"]) != prepared["prompt_tokens"]:
                raise CoterieError(f"bench round: prompts of {prepared['prompt_tokens']} tokens here, of {seen} in TRL")
            data["summary"] = summary(data)
            if file is not None:  # after each, so that a run cut short leaves what it has
                file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        own.stop()
        other.stop()
    return data


def _repetition(own: _Side, other: _Side) -> dict[str, Any]:
    gemm = own.ask("gemm")
    mine = {"update": own.ask("update")}
    theirs = {"update": other.ask("update"), "round": other.ask("round")}
    mine |= {"round": own.ask("round"), "half": own.ask("half")}
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {"gemm": gemm, "coterie": mine, "trl": theirs, "load": load}


def agreement(a: dict[str, Any], b: dict[str, Any]) -> dict[str, float]:
    """Losses and gradient norms of both sides on the fixed batch.

    Raises:
        CoterieError: they differ by more than ``LOSS_TOLERANCE``.
    """
    out: dict[str, float] = {}
    for key in ("loss", "grad_norm"):
        difference = abs(a[key] - b[key]) / max(abs(b[key]), 1e-12)
        out |= {f"{key}_coterie": a[key], f"{key}_trl": b[key], f"{key}_difference": difference}
        if not difference <= LOSS_TOLERANCE:
            raise CoterieError(f"bench round: {key} is {a[key]} here and {b[key]} in TRL; the comparison would be void")
    return out


def summary(data: dict[str, Any]) -> dict[str, float]:
    """Medians over repetitions; ``ratio_*`` is TRL / coterie within a repetition (larger is better for coterie), of wall
    time, or (``ratio_cpu_*``, less moved by neighbours on a shared machine) of processor time."""
    reps = data["repetitions"]

    def median(values: list[float]) -> float:
        return statistics.median(values)

    def ratio(mine: tuple[str, str], theirs: tuple[str, str]) -> float:
        return median([r["trl"][theirs[0]][theirs[1]] / r["coterie"][mine[0]][mine[1]] for r in reps])

    out: dict[str, float] = {}
    for side in ("coterie", "trl"):
        out |= {
            f"update_s_{side}": median([r[side]["update"]["seconds"] for r in reps]),
            f"rollout_s_{side}": median([r[side]["round"]["rollout_s"] for r in reps]),
            f"round_s_{side}": median([r[side]["round"]["seconds"] for r in reps]),
            f"rollout_tokens_per_s_{side}": median(
                [r[side]["round"]["tokens"] / r[side]["round"]["rollout_s"] for r in reps]
            ),
            f"peak_mb_{side}": max(v["peak_mb"] for r in reps for v in r[side].values()),
        }
    rates = {k: median([r["gemm"][k] for r in reps]) for k in ("mkl", "onednn")}
    achieved = [data["cost"]["tflop"] * 1e3 / r["coterie"]["update"]["seconds"] for r in reps]
    return out | {
        "round_half_s_coterie": median([r["coterie"]["half"]["seconds"] for r in reps]),
        "ratio_update": ratio(("update", "seconds"), ("update", "seconds")),
        "ratio_rollout": ratio(("round", "rollout_s"), ("round", "rollout_s")),
        "ratio_rollout_per_token": median(
            [
                (r["trl"]["round"]["rollout_s"] / r["trl"]["round"]["tokens"])
                / (r["coterie"]["round"]["rollout_s"] / r["coterie"]["round"]["tokens"])
                for r in reps
            ]
        ),
        "ratio_round": ratio(("round", "seconds"), ("round", "seconds")),
        "ratio_round_half": ratio(("half", "seconds"), ("round", "seconds")),
        "ratio_cpu_update": ratio(("update", "cpu_s"), ("update", "cpu_s")),
        "ratio_cpu_rollout": ratio(("round", "rollout_cpu_s"), ("round", "rollout_cpu_s")),
        "ratio_cpu_round": ratio(("round", "cpu_s"), ("round", "cpu_s")),
        "ratio_cpu_round_half": ratio(("half", "cpu_s"), ("round", "cpu_s")),
        "ratio_peak": out["peak_mb_trl"] / out["peak_mb_coterie"],
        "gemm_mkl_gflops": rates["mkl"],
        "gemm_onednn_gflops": rates["onednn"],
        "update_gflops": median(achieved),
        "update_fraction_of_mkl": median([a / r["gemm"]["mkl"] for a, r in zip(achieved, reps, strict=True)]),
        "update_fraction_of_onednn": median([a / r["gemm"]["onednn"] for a, r in zip(achieved, reps, strict=True)]),
    }


def table(results: dict[str, Any]) -> Table:
    t = Table("case", "figure", "coterie", "TRL", "ratio", box=None)
    for name, data in results.items():
        s = data["summary"]
        for label, key, ratio in (
            ("rollout, s", "rollout_s", "ratio_rollout"),
            ("rollout, tokens/s", "rollout_tokens_per_s", "ratio_rollout_per_token"),
            ("update, s", "update_s", "ratio_update"),
            ("whole round, s", "round_s", "ratio_round"),
            ("peak memory, MB", "peak_mb", "ratio_peak"),
        ):
            t.add_row(name, label, f"{s[f'{key}_coterie']:.3g}", f"{s[f'{key}_trl']:.3g}", f"{s[ratio]:.2f}")
        half, whole = s["round_half_s_coterie"], s["round_s_trl"]
        t.add_row(name, "half uninformative, s", f"{half:.3g}", f"{whole:.3g}", f"{s['ratio_round_half']:.2f}")
        shares = (f"{s[f'update_fraction_of_{k}']:.0%}" for k in ("onednn", "mkl"))
        t.add_row(name, "update, share of GEMM rate (oneDNN, MKL)", *shares, "")
    return t


def _settings(case: Case) -> dict[str, Any]:
    from coterie.models_io import locate

    return {
        "model": locate(case.model),
        "problems": [asdict(p) for p in _problems(case)],
        "group_size": case.group_size,
        "max_new_tokens": case.max_new_tokens,
        "micro_batch": case.micro_batch,
        "token_budget": case.token_budget,
        "recompute": case.recompute,
        "threads": case.threads,
        "lr": LEARNING_RATE,
    }


def _problems(case: Case) -> list[Any]:
    from coterie.config import TaskConfig
    from coterie.models import tiny_tasks
    from coterie.tasks import build_tasks

    if case.model == "tiny":
        return build_tasks(tiny_tasks()).draw("bench", 0, case.problems)
    suffix = " Work step by step, then write the result as <answer>result</answer>."
    tasks = {"chain_sum": TaskConfig(suffix=suffix), "gcd": TaskConfig(suffix=suffix)}
    problems = build_tasks(tasks).draw("bench", 0, case.problems)
    if case.story:
        return [replace(p, prompt=f"Tell a long story about the number {i}.") for i, p in enumerate(problems)]
    filler = " ".join(f"Line {i} of the notes." for i in range(case.prompt_words // 5))
    return [replace(p, prompt=f"{filler}\n{p.prompt}" if filler else p.prompt) for p in problems]


class _Side:
    """A process that answers one command at a time."""

    def __init__(self, name: str, command: list[str], settings: dict[str, Any], folder: Path) -> None:
        self.name = name
        file = folder / f"{name}.json"
        file.write_text(json.dumps(settings), encoding="utf-8")
        self.log = folder / f"{name}.log"
        threads = str(settings["threads"])
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, str(file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | _ENVIRONMENT | {"OMP_NUM_THREADS": threads},
            )
        self._answer()

    def ask(self, command: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": command}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            said = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-12:]
            raise CoterieError(f"bench round: the {self.name} side stopped:\n" + "\n".join(said))
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": "stop"}) + "\n")
        self.process.stdin.close()
        self.process.wait(timeout=60)
