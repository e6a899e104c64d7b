"""Which models the experiment on parallel training scores, and what it records of each."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from coterie.config import Config
from coterie.importing import load_function
from coterie.models import folder_of
from coterie.parallel.forms import Forms, Listener, leaked
from coterie.parallel.plan import all_tasks, expert_jobs, model_of
from coterie.parallel.study import Shop, mixed_runs, stage_runs
from coterie.rng import derive
from coterie.types import Problem

Row = dict[str, Any]
SCALES = (0.25, 0.5, 0.75, 1.0)  # of a delta, between which the scale of equal gain is interpolated
FORM_EXAMPLES = 200
CALIBRATION = 32  # training problems per task on which equal gain is found: nothing held out is touched


class Judge:
    """Scores models on held-out problems: one policy whose weights are replaced. The same draws for every model of a seed."""

    def __init__(self, shop: Shop) -> None:
        from coterie.engines.torch import TorchEngine
        from coterie.policy import Policy

        self.shop, self.cfg = shop, shop.cfg
        self.base = Path(folder_of(self.cfg.model.name))
        self.policy = Policy.load(self.cfg.model.model_copy(update={"lora_rank": 0}))
        self.engine = TorchEngine(self.policy, token_budget=self.cfg.rollout.token_budget)
        self.held_out = shop.tasks.eval_problems(self.cfg.eval.problems)
        write = load_function(self.cfg.sft.answers)
        self.forms = Forms(
            {
                t: [write(p, i) for i, p in enumerate(self._drawn(t, "forms", FORM_EXAMPLES))]
                for t in all_tasks(self.cfg)
            }
        )

    def _drawn(self, task: str, stream: str, n: int) -> list[Problem]:
        return [self.shop.tasks.tasks[task].sample("train", f"{stream}/{self.cfg.seed}", i) for i in range(n)]

    def row(self, name: str, folder: Path, tasks: Sequence[str] = (), **more: Any) -> Row:
        """Score, length, truncation and leakage per task."""
        problems = {t: self.held_out[t] for t in tasks or self.held_out}
        found, heard = self._evaluate(folder, problems)
        of = {}
        for t, ps in problems.items():
            r = found.tasks[t]
            of[t] = {
                "score": round(r.accuracy(), 5),
                "length": round(r.mean_length, 3),
                "truncated": round(r.truncated, 5),
                "leak": round(leaked(self.forms, self.cfg.parallel.experts, t, heard.of(ps)), 5),
            }
        print(f"{name}: {found.accuracy():.3f}", flush=True)
        return {"model": name, "tasks": of, **more}

    def training_score(self, folder: Path, tasks: Sequence[str]) -> float:
        """Mean score on training problems drawn for this purpose."""
        problems = {t: self._drawn(t, "calibration", CALIBRATION) for t in tasks}
        return float(self._evaluate(folder, problems)[0].accuracy())

    def _evaluate(self, folder: Path, problems: Mapping[str, Sequence[Problem]]) -> tuple[Any, Listener]:
        from safetensors.torch import load_file

        from coterie.evaluation import evaluate
        from coterie.rollout import training_sampling

        self.policy.load_weights(load_file(folder / "model.safetensors"))
        self.engine.release()
        listener = Listener(self.shop.scorer)
        sampling, seed = training_sampling(self.cfg.rollout), derive(self.cfg.seed, "judge") % 2**31
        found = evaluate(
            self.engine,
            self.policy.encoder,
            problems,
            self.cfg.eval.samples,
            sampling,
            cast(Any, listener),
            seed=seed,
        )
        return found, listener


def merged(base: Path, experts: Mapping[str, Path], into: Path, method: str, lam: float, **more: Any) -> Path:
    """A merge in float32, as `coterie merge` makes it. ``lora_concat`` gives an adapter, which is then added to the base."""
    from coterie.merging.merge import merge
    from coterie.merging.recipe import make_recipe

    adapter = method == "lora_concat"
    dtype = "base" if adapter else "float32"
    recipe = make_recipe(base, list(experts.values()), method, labels=list(experts), lam=lam, dtype=dtype, **more)
    shutil.rmtree(into, ignore_errors=True)
    into.parent.mkdir(parents=True, exist_ok=True)
    merge(recipe, into, hash_inputs=False)
    return merged(base, {"adapter": into}, into.with_name(into.name + "_full"), "sum", 1.0) if adapter else into


def own_models(shop: Shop, with_base: bool) -> list[Row]:
    """One row per model of an arm, one per training run, and one on the deltas."""
    cfg, judge = shop.cfg, Judge(shop)
    experts = {j.name: model_of(j.runs[0]) for j in expert_jobs(cfg)}
    with tempfile.TemporaryDirectory(prefix="coterie-study-") as scratch:
        rows = [judge.row("base", judge.base)] if with_base else []
        found = _models(shop, judge.base, experts, Path(scratch))
        rows += [judge.row(name, path, tasks) for name, path, tasks in found]
    rows.append({"weights": _weights(judge.base, experts)})
    return rows + [
        {"run": str(f.parent.relative_to(cfg.run_dir)), **json.loads(f.read_text())}
        for f in sorted(Path(cfg.run_dir).rglob("run.json"))
    ]


def _models(
    shop: Shop, base: Path, experts: Mapping[str, Path], scratch: Path
) -> Iterator[tuple[str, Path, tuple[str, ...]]]:
    """Name, folder and tasks (none: all) of every model; merges are made when their turn comes."""
    cfg, p, domains = shop.cfg, shop.cfg.parallel, shop.cfg.parallel.experts
    at = scratch / "merged"
    for name, path in experts.items():
        yield f"expert/{name}", merged(base, {name: path}, at, "sum", 1.0) if cfg.model.lora_rank else path, ()
    if cfg.model.lora_rank:
        for lam in (p.lam, 1.0):
            yield f"concat_{lam:g}", merged(base, experts, at, "lora_concat", lam), ()
        rank = cfg.model.lora_rank
        yield f"concat_1_r{rank}", merged(base, experts, at, "lora_concat", 1.0, rank=rank), ()
        return
    for lam in p.sweep:
        yield f"sum_{lam:g}", merged(base, experts, at, "sum", lam), ()
    if "mixed" not in p.baselines:
        return
    yield "mean", merged(base, experts, at, "mean", 1.0), ()
    for lam in (p.lam, 1.0):
        yield f"ties_{lam:g}", merged(base, experts, at, "ties", lam), ()
        yield f"dare_{lam:g}", merged(base, experts, at, "dare", lam, seed=cfg.seed), ()
        yield f"svd1_{lam:g}", merged(base, experts, at, "svd", lam, rank=1), ()
    for lam in sorted({*p.sweep, 1 / len(experts)} - {1.0}):
        for name, path in experts.items():
            yield f"shrink_{lam:g}/{name}", merged(base, {name: path}, at, "sum", lam), domains[name]
    for name, run in mixed_runs(cfg, base).items():
        yield name, model_of(run), ()
    for name, runs in stage_runs(cfg, shop.orders).items():
        yield f"stages/{name}", model_of(runs[-1]), ()


def _weights(base: Path, experts: Mapping[str, Path]) -> Row:
    from coterie.merging.diagnostics import interference
    from coterie.merging.recipe import make_recipe

    report = interference(make_recipe(base, list(experts.values()), labels=list(experts)), top_k=0)
    keep = ("cosine", "chance_cosine", "z_row_flip", "sign_conflict_energy", "support_overlap_over_null")
    return {
        "experts": report["all"]["experts"],
        "pairs": [{"experts": p["experts"], **{k: p[k] for k in keep}} for p in report["all"]["pairs"]],
    }


def _norms(base: Path, experts: Mapping[str, Path]) -> dict[str, float]:
    """L2 norms of the deltas."""
    from coterie.merging.gram import gram_pass
    from coterie.merging.inputs import open_inputs
    from coterie.merging.recipe import make_recipe

    inputs = open_inputs(base, make_recipe(base, list(experts.values()), labels=list(experts)).experts)
    squares = gram_pass(inputs, threads=1).diagonal().tolist()  # [N]
    return {e.label: math.sqrt(s) for e, s in zip(inputs.experts, squares, strict=True)}


def matched_models(shop: Shop, arms: Mapping[str, Config], scratch: Path) -> list[Row]:
    """The two arms' sums with experts scaled to equal norm (the second arm's to the first's), and to equal gain."""
    judge = Judge(shop)
    base, at = judge.base, scratch / "merged"
    folders = {a: {j.name: model_of(j.runs[0]) for j in expert_jobs(c)} for a, c in arms.items()}
    first, second = arms
    norms = {a: _norms(base, f) for a, f in folders.items()}
    names = list(folders[first])
    rows = _scaled(judge, folders[second], {n: norms[first][n] / norms[second][n] for n in names}, f"norm/{second}", at)
    scales = equal_gain(judge, folders, at)
    for a in (first, second):
        rows += _scaled(judge, folders[a], scales[a], f"gain/{a}", at)
    shutil.rmtree(scratch, ignore_errors=True)
    return rows


def _scaled(judge: Judge, experts: Mapping[str, Path], scale: Mapping[str, float], name: str, at: Path) -> list[Row]:
    rows = []
    for n, path in experts.items():
        rows.append(judge.row(f"{name}/expert/{n}", merged(judge.base, {n: path}, at, "sum", scale[n]), scale=scale[n]))
    weights = [scale[n] for n in experts]
    for lam in (judge.cfg.parallel.lam, 1.0):
        rows.append(judge.row(f"{name}/sum_{lam:g}", merged(judge.base, experts, at, "sum", lam, weights=weights)))
    return rows


def equal_gain(judge: Judge, folders: Mapping[str, Mapping[str, Path]], at: Path) -> dict[str, dict[str, float]]:
    """Per arm and expert the factor on its delta at which both arms gain the same on the expert's tasks.

    The arm that gains less keeps 1; the other's factor is interpolated between ``SCALES`` on training problems. Where the
    lesser gain is not positive, nothing can be matched and the factor is 0.01.
    """
    out: dict[str, dict[str, float]] = {a: {} for a in folders}
    for n, tasks in judge.cfg.parallel.experts.items():
        zero = judge.training_score(judge.base, tasks)
        gain = {
            a: [0.0] + [judge.training_score(merged(judge.base, {n: f[n]}, at, "sum", s), tasks) - zero for s in SCALES]
            for a, f in folders.items()
        }
        target = min(g[-1] for g in gain.values())
        for a, g in gain.items():
            out[a][n] = crossing((0.0, *SCALES), g, target) if g[-1] > target else 1.0
    return out


def crossing(x: Sequence[float], y: Sequence[float], target: float) -> float:
    """Smallest x at which the line through the points reaches ``target``; at least 0.01."""
    for x0, x1, y0, y1 in zip(x[:-1], x[1:], y[:-1], y[1:], strict=True):
        if y1 >= target > y0:
            return max(0.01, x0 + (x1 - x0) * (target - y0) / (y1 - y0))
    return 0.01
