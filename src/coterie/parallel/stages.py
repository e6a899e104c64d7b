"""The stages of ``coterie parallel`` after training: merge, compare weights, evaluate. Each skips what lies there already."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from coterie.config import Config
from coterie.errors import CoterieError
from coterie.parallel.forms import Forms, Listener, leaked
from coterie.parallel.plan import Job, tag
from coterie.rundir import write_atomic

Note = Callable[[str], None]


def base_folder(cfg: Config) -> Path:
    """The base model as a folder; one that is only a name elsewhere (a Hugging Face id) is written out once, in float32.

    Raises:
        UserError: it cannot be found.
    """
    from coterie.models_io import load_model, load_tokenizer, locate, pick_device

    found = Path(locate(cfg.model.name))
    if found.is_dir():
        return found
    out = Path(cfg.run_dir) / "base"
    if not out.is_dir():
        part = out.with_name(".base.part")
        load_model(cfg.model.name, pick_device("cpu")).save_pretrained(str(part))
        load_tokenizer(cfg.model.name).save_pretrained(str(part))
        part.rename(out)
    return out


def merge_experts(cfg: Config, base: Path, experts: Mapping[str, Path], out: Path, lam: float, note: Note) -> Path:
    """Merge into ``out`` (float32), unless it is there: a merged folder appears only when complete."""
    from coterie.merging.merge import merge
    from coterie.merging.recipe import make_recipe

    if out.is_dir():
        return out
    p = cfg.parallel
    sparse = p.method in ("ties", "dare", "dare_ties")
    recipe = make_recipe(
        base,
        list(experts.values()),
        p.method,
        labels=list(experts),
        lam=lam,
        density=p.density or None if sparse else None,
        rank=p.rank if p.method == "svd" else None,
        seed=cfg.seed if p.method.startswith("dare") else None,
        dtype="float32",
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    merge(recipe, out, command="coterie parallel")
    note(f"merged {', '.join(experts)}: {p.method}, lambda {lam:g} -> {out}")
    return out


def all_merges(cfg: Config, base: Path, experts: Mapping[str, Path], note: Note) -> dict[str, Path]:
    """The merge, the sweep and the shrink controls, by the name under which they are evaluated."""
    p, root = cfg.parallel, Path(cfg.run_dir)
    out = {"merged": merge_experts(cfg, base, experts, root / "merged" / tag(p, p.lam), p.lam, note)}
    for lam in p.sweep:
        out[f"sweep/{lam:g}"] = merge_experts(cfg, base, experts, root / "merged" / tag(p, lam), lam, note)
    if p.shrink:
        for name, path in experts.items():
            folder = root / "shrink" / tag(p, p.lam) / name
            out[f"shrink/{name}"] = merge_experts(cfg, base, {name: path}, folder, p.lam, note)
    return out


def compare_weights(cfg: Config, base: Path, experts: Mapping[str, Path]) -> dict[str, Any]:
    """The interference report on the experts' deltas, made once."""
    from coterie.merging.diagnostics import interference
    from coterie.merging.page import write_report
    from coterie.merging.recipe import make_recipe

    folder = Path(cfg.run_dir) / "interference"
    file = folder / "interference.json"
    if not file.is_file():
        recipe = make_recipe(base, list(experts.values()), "sum", labels=list(experts))
        write_report(interference(recipe), folder)
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return report


def compare_times(jobs: list[Job]) -> dict[str, Any] | None:
    """Cross-time figures of every pair of experts, where updates were logged."""
    from itertools import combinations

    from coterie.merging.crosstime import coherence, cross_time, load_updates
    from coterie.merging.sketch import CountSketch

    if not all(j.runs[0].parallel.log_updates for j in jobs):
        return None
    width = jobs[0].runs[0].parallel.log_updates
    logged = {j.name: load_updates(Path(j.runs[0].run_dir)) for j in jobs}
    return {
        "sketch_width": width,
        "floor": CountSketch(width).floor,
        "coherence": {n: coherence(u) for n, u in logged.items()},
        "pairs": [{"experts": [a, b], **cross_time(logged[a], logged[b])} for a, b in combinations(logged, 2)],
    }


def probe_base(cfg: Config, base: Path, note: Note) -> dict[str, Any] | None:
    """Figures of the gradient probe of the base, tasks counted as their experts' (``parallel.probe`` problems per task), made
    once; None where it is off."""
    from coterie.merging.probe import ProbeSettings
    from coterie.merging.probe_cli import KINDS
    from coterie.merging.probe_page import write_probe
    from coterie.merging.probe_run import report_of
    from coterie.parallel.evidence import by_expert, sole_owners

    p, owner = cfg.parallel, sole_owners(cfg.parallel.experts)
    if not p.probe:
        return None
    file = Path(cfg.run_dir) / f"probe_{p.probe}" / "probe.json"
    if not file.is_file():
        asked = cfg.model_copy(
            update={
                "model": cfg.model.model_copy(update={"name": str(base), "lora_rank": 0}),
                "tasks": {t: cfg.tasks[t] for t in owner},
            }
        )
        r = cfg.rollout
        settings = ProbeSettings(p.probe, max(2, r.group_size), r.temperature, 0.0, r.max_new_tokens, seed=cfg.seed)
        kind = cfg.advantage.kind if cfg.advantage.kind in KINDS else "mean"
        write_probe(report_of(asked, [settings], kind, lambda scores: by_expert(scores, owner)), file.parent)
        note(f"probed the base: {p.probe} problems per task")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["temperatures"][0]
    return found


def evaluate_models(cfg: Config, models: Mapping[str, Path], note: Note) -> dict[str, dict[str, Any]]:
    """Every model on the held-out problems of all tasks (those that no expert trains too); one JSON per model, never made
    twice.

    Raises:
        CoterieError: an evaluation made with other settings lies there.
    """
    folder = Path(cfg.run_dir) / "eval"
    folder.mkdir(parents=True, exist_ok=True)
    asked = {"problems": cfg.eval.problems, "samples": cfg.eval.samples, "tasks": list(cfg.tasks)}
    missing = {}
    found: dict[str, dict[str, Any]] = {}
    for name, path in models.items():
        file = folder / f"{_stem(cfg, name, path)}.json"
        if not file.is_file():
            missing[name] = (path, file)
            continue
        found[name] = json.loads(file.read_text(encoding="utf-8"))
        if found[name]["asked"] != asked:
            raise CoterieError(
                f"{file}: made with other settings ({found[name]['asked']}); delete it or use another run_dir"
            )
    if missing:
        found |= _evaluate(cfg, missing, asked, note)
    return {name: found[name] for name in models}


def _evaluate(
    cfg: Config, missing: Mapping[str, tuple[Path, Path]], asked: dict[str, Any], note: Note
) -> dict[str, dict[str, Any]]:
    import torch

    from coterie.engines.torch import TorchEngine
    from coterie.evaluation import evaluate
    from coterie.policy import Policy
    from coterie.rollout import training_sampling
    from coterie.tasks.scoring import Scorer
    from coterie.tasks.taskset import build_tasks

    torch.set_num_threads(cfg.threads or torch.get_num_threads())
    problems = build_tasks(cfg.tasks).eval_problems(cfg.eval.problems)
    examples = Path(cfg.run_dir) / "eval" / "base_answers.json"
    out = {}
    with Scorer(cfg.scoring) as scorer:
        for name, (path, file) in missing.items():
            policy = Policy.load(cfg.model.model_copy(update={"name": str(path), "lora_rank": 0}))
            engine = TorchEngine(policy, token_budget=cfg.rollout.token_budget)
            sampling = training_sampling(cfg.rollout)
            heard = Listener(scorer)
            done = evaluate(engine, policy.encoder, problems, cfg.eval.samples, sampling, cast(Any, heard), seed=0)
            out[name] = {"model": str(path), "asked": asked, **done.to_json([1])}
            answers = {t: heard.of(ps) for t, ps in problems.items()}
            if name == "base":
                write_atomic(examples, json.dumps(answers) + "\n")
            for t, share in _leakage(cfg, examples, answers).items():
                out[name]["tasks"][t]["leak"] = share
            write_atomic(file, json.dumps(out[name], indent=1) + "\n")
            note(f"evaluated {name}: {done.accuracy():.3f}")
    return out


def _leakage(cfg: Config, examples: Path, answers: Mapping[str, list[str]]) -> dict[str, float]:
    """Per task the share of answers in the form of another domain's task, forms being those of the base's answers. Empty in
    a folder whose base was evaluated before forms were kept."""
    if not examples.is_file():
        return {}
    forms = Forms(json.loads(examples.read_text(encoding="utf-8")))
    return {t: leaked(forms, cfg.parallel.experts, t, texts) for t, texts in answers.items()}


def _stem(cfg: Config, name: str, path: Path) -> str:
    """File name of an evaluation: what it is of, with the merge it depends on."""
    if name.startswith(("merged", "sweep")):
        return f"merged_{path.name}"
    if name.startswith("shrink"):
        return f"shrink_{path.parent.name}_{path.name}"
    if name == "adapted":
        return f"adapted_{path.parent.name}"
    return name.replace("/", "_")
