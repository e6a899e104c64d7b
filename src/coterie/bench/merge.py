"""Merging against mergekit on the same files: time, CPU time, peak memory, agreement; and the rate of the exact Gram pass.

mergekit runs in an environment of its own (`python -m venv .venv-bench && .venv-bench/bin/pip install mergekit`; another place:
COTERIE_BENCH_ENV). Every figure is of a whole process, started cold, with the inputs in the page cache; arms take turns and
the best of the repeats counts.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.errors import UserError

if TYPE_CHECKING:
    from coterie.merging.inputs import Inputs

OURS = """
import sys
from coterie.merging.merge import merge
from coterie.merging.recipe import make_recipe
method, trim, density, base, out, *experts = sys.argv[1:]
merge(make_recipe(base, experts, method, trim=trim or None, density=float(density) if density else None), out)
"""
EXPERTS = 4
DENSITY = 0.25  # divides every tensor's size, so that rounding k up (ours) or down (mergekit) is the same


def run(millions: float = 188, repeats: int = 3, env: str | None = None, part: str = "") -> dict[str, Any]:
    """Measure on synthetic Llama-shaped bf16 models of ``millions`` parameters.

    Args:
        env: folder of the environment with mergekit; default COTERIE_BENCH_ENV or ``.venv-bench``. Without mergekit there, its
            figures are None and ``mergekit_missing`` says why.
        part: ``gram`` measures the Gram pass only.
    """
    if part not in ("", "gram"):
        raise UserError(f"bench merge --part {part}: gram, or leave it out for everything")
    place = Path(env or os.environ.get("COTERIE_BENCH_ENV", ".venv-bench")).absolute()
    program = place / "bin" / "mergekit-yaml"
    with tempfile.TemporaryDirectory(prefix="coterie-bench-merge-") as scratch:
        folder = Path(scratch)
        # in processes of their own: a child's peak memory includes what its parent held when it was forked
        base, experts = _apart("models", folder / "in", millions, "bfloat16")
        out: dict[str, Any] = {
            "parameters": _values(base),
            "experts": EXPERTS,
            "repeats": repeats,
            "load_average": os.getloadavg(),
        }
        out["gram"] = _apart("gram_rate", base, experts, repeats)
        if part:
            return out
        if not program.is_file():
            out["mergekit_missing"] = f"{program} is not there"
        arms: dict[str, Callable[[Path], list[str]]] = {}
        for name, method, trim in (
            ("sum", "sum", ""),
            ("ties_tensor", "ties", "tensor"),
            ("ties_global", "ties", "global"),
        ):
            arms[name] = _ours(method, trim, base, experts)
        if program.is_file():
            arms["mergekit_sum"] = _mergekit(program, folder, "sum", base, experts, "float32")
            arms["mergekit_sum_bf16_arithmetic"] = _mergekit(program, folder, "sum", base, experts, "bfloat16")
            arms["mergekit_ties_tensor"] = _mergekit(program, folder, "ties", base, experts, "float32")
        out["arms"] = _measure(arms, folder, repeats)
        if program.is_file():
            out["ratios"] = _ratios(out["arms"])
            out["agreement"] = agreement(program, folder)
        return out


def _apart(name: str, *args: Any) -> Any:
    """A function of this module, run in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(globals()[name], *args).result()


def models(folder: Path, millions: float, dtype: str) -> tuple[Path, list[Path]]:
    """A base and four experts (Gaussian deltas of 1e-3) with the tensors of a Llama model of about ``millions`` parameters."""
    import torch
    from safetensors.torch import save_file

    hidden = 1024 if millions >= 50 else 64
    inter, vocab = hidden * 11 // 4, hidden * 16
    layer = 4 * hidden * hidden + 3 * hidden * inter
    layers = max(1, round((millions * 1e6 - 2 * vocab * hidden) / layer))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
    }
    shapes["model.norm.weight"] = (hidden,)
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes.update({f"{at}self_attn.{n}_proj.weight": (hidden, hidden) for n in "qkvo"})
        shapes.update({f"{at}mlp.{n}_proj.weight": (inter, hidden) for n in ("gate", "up")})
        shapes[f"{at}mlp.down_proj.weight"] = (hidden, inter)
        shapes.update({f"{at}{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")})
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": inter,
              "num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": vocab,
              "tie_word_embeddings": False, "dtype": dtype, "rms_norm_eps": 1e-6, "hidden_act": "silu"}  # fmt: skip
    kind = getattr(torch, dtype)
    start = {
        n: (torch.randn(s, generator=torch.Generator().manual_seed(k)) * 0.02).to(kind)
        for k, (n, s) in enumerate(shapes.items())
    }
    paths = []
    for k in range(EXPERTS + 1):
        g = torch.Generator().manual_seed(1000 + k)
        tensors = (
            start
            if k == 0
            else {n: (t.float() + 1e-3 * torch.randn(t.shape, generator=g)).to(kind) for n, t in start.items()}
        )
        path = folder / ("base" if k == 0 else f"expert{k}")
        path.mkdir(parents=True)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(config))
        paths.append(path)
    return paths[0], paths[1:]


def gram_rate(base: Path, experts: list[Path], repeats: int) -> dict[str, Any]:
    """The Gram pass against reading and converting the same bytes to fp32 by one thread, in buffers that are kept and stay in
    the cache: by blocks as large as the pass reads at once and as large as a merge's, whichever is faster in that repeat.

    The two take turns; every figure is the median over the repeats, shares are medians of the ratios within a repeat.
    ``rate_share_on_one_core`` compares CPU seconds, both with one thread. ``rate_share`` is by the clock, with a thread per core
    for the pass; on a busy machine it says nothing.
    """
    from coterie.merging.deltas import block_values
    from coterie.merging.gram import READ, gram_pass
    from coterie.merging.inputs import open_inputs
    from coterie.merging.recipe import make_recipe

    inputs = open_inputs(base, make_recipe(base, experts).experts)
    ways: dict[str, list[Callable[[], object]]] = {
        "read_and_convert": [
            lambda size=size: read_and_convert(inputs, size)  # type: ignore[misc]
            for size in sorted({READ, block_values(64, EXPERTS)})
        ],
        "gram": [lambda: gram_pass(inputs)],
        "gram_one_thread": [lambda: gram_pass(inputs, threads=1)],
    }
    found: dict[str, list[float]] = {f"{name}_{clock}": [] for name in ways for clock in ("s", "cpu_s")}
    for repeat in range(repeats + 1):
        for name, several in ways.items():
            walls, cpus = zip(*(_clocks(do) for do in several), strict=True)
            if repeat:  # the first fills the page cache and compiles the kernel
                found[f"{name}_s"].append(min(walls))
                found[f"{name}_cpu_s"].append(min(cpus))

    def share(clock: str, way: str) -> float:
        pairs = zip(found[f"read_and_convert_{clock}"], found[f"{way}_{clock}"], strict=True)
        return round(statistics.median(read / gram for read, gram in pairs), 3)

    return {
        "threads": os.cpu_count() or 1,
        **{name: round(statistics.median(seconds), 4) for name, seconds in found.items()},
        "rate_share": share("s", "gram"),
        "rate_share_on_one_core": share("cpu_s", "gram_one_thread"),
    }


def read_and_convert(inputs: Inputs, values: int) -> int:
    """Every value of base and experts once through one kept fp32 buffer, ``values`` at a time. Returns how many there were."""
    import torch

    from coterie.merging.checkpoints import Reader
    from coterie.merging.deltas import one_thread_each, row_blocks

    seen, kept = 0, torch.empty(max(values, *(e.base.cols for e in inputs.entries)))
    with one_thread_each(), Reader() as reader:
        for e in inputs.entries:
            for first, last in row_blocks(0, e.base.rows, e.base.cols, values):
                room = kept[: (last - first) * e.base.cols].view(last - first, e.base.cols)  # [r, cols]
                for info in (e.base, *(s.info for s in e.sources)):  # type: ignore[union-attr]
                    room.copy_(reader.rows(info, first, last, reuse=True))
                    seen += room.numel()
    return seen


def _clocks(do: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    do()
    return time.perf_counter() - wall, time.process_time() - cpu


def agreement(program: Path, folder: Path) -> dict[str, Any]:
    """Largest difference of the outputs on fp32 models, and where the two tools mean different things by one name.

    ``dare_*`` are the factors by which kept deltas were multiplied: ours is 1 / density, mergekit matches the L1 norm.
    """
    base, experts = models(folder / "small", 2.0, "float32")
    found: dict[str, Any] = {}
    for name, method, trim in (
        ("sum", "sum", ""),
        ("ties_tensor", "ties", "tensor"),
        ("ties_global_against_per_tensor", "ties", "global"),
    ):
        ours, theirs = folder / f"ours_{name}", folder / f"theirs_{name}"
        _child(_ours(method, trim, base, experts)(ours))
        _child(_mergekit(program, folder, method, base, experts, "float32", "float32")(theirs))
        found[f"{name}_largest_difference"] = _difference(ours, theirs)
    ours, theirs = folder / "ours_dare", folder / "theirs_dare"
    _child(_ours("dare", "", base, experts[:1])(ours))
    _child(_mergekit(program, folder, "dare", base, experts[:1], "float32", "float32")(theirs))
    found["dare_factor_ours"], found["dare_factor_mergekit"] = (
        _dare_factor(base, experts[0], o) for o in (ours, theirs)
    )
    return found


def _ours(method: str, trim: str, base: Path, experts: list[Path]) -> Callable[[Path], list[str]]:
    density = "" if method == "sum" else str(DENSITY)
    return lambda out: [sys.executable, "-c", OURS, method, trim, density, str(base), str(out), *map(str, experts)]


def _mergekit(
    program: Path, folder: Path, method: str, base: Path, experts: list[Path], dtype: str, out_dtype: str = "bfloat16"
) -> Callable[[Path], list[str]]:
    """mergekit's way to ask for the same: `task_arithmetic` is our sum, `ties` our per-tensor TIES, `dare_linear` DARE."""
    name = {"sum": "task_arithmetic", "ties": "ties", "dare": "dare_linear"}[method]
    density = {} if method == "sum" else {"density": DENSITY}
    recipe = {
        "merge_method": name, "base_model": str(base), "dtype": dtype, "out_dtype": out_dtype,
        "models": [{"model": str(e), "parameters": {"weight": 1.0, **density}} for e in experts],
    }  # fmt: skip
    file = folder / f"{method}-{dtype}-{out_dtype}-{len(experts)}.yml"
    file.write_text(json.dumps(recipe))  # JSON is YAML
    return lambda out: [str(program), str(file), str(out)]


def _measure(arms: dict[str, Callable[[Path], list[str]]], folder: Path, repeats: int) -> dict[str, dict[str, float]]:
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, command in arms.items():
            out = folder / "out"
            runs[name].append(_child(command(out)))
            subprocess.run(["rm", "-rf", str(out)], check=True)
    return {name: {k: min(r[k] for r in found) for k in found[0]} for name, found in runs.items()}


def _child(command: list[str]) -> dict[str, float]:
    """Run to the end; wall seconds, CPU seconds, peak resident MiB."""
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile() as log:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environ)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            raise RuntimeError(
                f"{command[0]} ended with {process.returncode}:\n{log.read().decode(errors='replace')[-2000:]}"
            )
    return {
        "wall_s": round(wall, 2),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_mib": round(usage.ru_maxrss / 1024, 1),
    }


def _ratios(arms: dict[str, dict[str, float]]) -> dict[str, float]:
    out = {}
    for name in ("sum", "ties_tensor"):
        ours, theirs = arms[name], arms[f"mergekit_{name}"]
        out[f"{name}_times_faster_wall"] = round(theirs["wall_s"] / ours["wall_s"], 2)
        out[f"{name}_times_faster_cpu"] = round(theirs["cpu_s"] / ours["cpu_s"], 2)
        out[f"{name}_memory_share"] = round(ours["peak_mib"] / theirs["peak_mib"], 3)
    return out


def _weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    out: dict[str, Any] = {}
    for file in folder.glob("*.safetensors"):
        out.update(load_file(file))
    return out


def _values(folder: Path) -> int:
    from coterie.merging.checkpoints import open_checkpoint

    return sum(t.numel for t in open_checkpoint(folder).tensors.values())


def _difference(one: Path, two: Path) -> float:
    a, b = _weights(one), _weights(two)
    if set(a) != set(b):
        raise AssertionError(f"different tensors: {sorted(set(a) ^ set(b))[:4]}")
    return max(float((a[n].double() - b[n].double()).abs().max()) for n in a)


def _dare_factor(base: Path, expert: Path, merged: Path) -> list[float]:
    """Smallest and largest factor, over tensors, by which the kept values of a delta were multiplied (median per tensor)."""
    b, e, m = (_weights(p) for p in (base, expert, merged))
    factors = []
    for n in b:
        delta, got = (e[n] - b[n]).double(), (m[n] - b[n]).double()
        kept = (got != 0) & (delta.abs() > 1e-4)
        factors.append(float((got[kept] / delta[kept]).median()))
    return [round(min(factors), 4), round(max(factors), 4)]
