"""The figures of a ``coterie parallel`` run as JSON, as a table on the terminal, and as one HTML page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from coterie.config import Config
from coterie.merging.compatibility import decide, spoken
from coterie.parallel.evidence import Side, evidence
from coterie.parallel.plan import Job, all_tasks
from coterie.parallel.scores import difference, pooled, rates, retention, score, unscored
from coterie.rundir import read_jsonl, write_atomic

FORMAT = 1


def summary(
    cfg: Config,
    evaluations: Mapping[str, Mapping[str, Any]],
    weights: Mapping[str, Any],
    times: Mapping[str, Any] | None,
    jobs: Sequence[Job],
    probe: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything the run found. ``domains`` has one entry per expert: its tasks, and what each model scores and keeps."""
    of = {name: rates(e) for name, e in evaluations.items()}
    others = [n for n in of if n not in ("base", *(f"expert/{x}" for x in cfg.parallel.experts))]
    domains = {}
    for name, tasks in cfg.parallel.experts.items():
        expert = of[f"expert/{name}"]
        shown = [m for m in others if not m.startswith("shrink/") or m == f"shrink/{name}"]
        entry: dict[str, Any] = {
            "tasks": list(tasks),
            "scores": {m: score(r, tasks) for m, r in of.items()},
            "kept": {m: retention(of["base"], expert, of[m], tasks) for m in shown},
        }
        if (alone := f"shrink/{name}") in of:
            entry["interference"] = difference(of["merged"], of[alone], tasks)
        domains[name] = entry
    own = [(of[f"expert/{n}"], tasks) for n, tasks in cfg.parallel.experts.items()]
    untrained = [t for t in cfg.tasks if t not in all_tasks(cfg)]
    return {
        "format": FORMAT,
        "settings": {
            "steps": cfg.steps,
            "base": cfg.model.name,
            "estimator": cfg.advantage.kind if cfg.method == "rl" else "sft",
            "seed": cfg.seed,
            **cfg.parallel.model_dump(mode="json"),
            "evaluation": next(iter(evaluations.values()))["settings"] | {"problems": cfg.eval.problems},
        },
        "domains": domains,
        "untrained": {"tasks": untrained, "scores": {m: score(r, untrained) for m, r in of.items()}}
        if untrained
        else None,
        "models": {
            m: {
                "score": score(of[m], list(cfg.tasks)),
                "unscored": unscored(e),
                "length": _mean([t["mean_length"] for t in e["tasks"].values()]),
                "truncated": _mean([t["truncated"] for t in e["tasks"].values()]),
                "leak": _mean([t["leak"] for t in e["tasks"].values()]) if _forms_known(e) else None,
                "tasks": {n: t["pass"].get("1") for n, t in e["tasks"].items()},
            }
            for m, e in evaluations.items()
        },
        "verdicts": _verdicts(cfg, of, probe),
        "probe": [p["reading"] for p in probe["pairs"]] if probe else None,
        "kept": {m: pooled(of["base"], own, of[m]) for m in others if not m.startswith("shrink/")},
        "seconds": {j.name: sum(_seconds(r) for r in j.runs) for j in jobs},
        "weights": {
            "experts": weights["all"]["experts"],
            "pairs": weights["all"]["pairs"],
            "reading": weights["reading"],
        },
        "cross_time": times,
    }


def _verdicts(cfg: Config, of: Mapping[str, Any], probe: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """May these two be merged? One entry per pair."""

    def side(own: str, other: str) -> Side:
        return Side(of["base"], of[f"expert/{own}"], of[f"expert/{other}"], cfg.parallel.experts[own])

    return [
        decide(evidence((a, b), (side(a, b), side(b, a)), probe)).to_json((a, b))
        for a, b in combinations(cfg.parallel.experts, 2)
    ]


def _forms_known(evaluation: Mapping[str, Any]) -> bool:
    return all("leak" in t for t in evaluation["tasks"].values())


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _seconds(cfg: Config) -> float:
    """Seconds of training and evaluation that a run has logged."""
    file = Path(cfg.run_dir) / "metrics.jsonl"
    return math.fsum(float(r.get(k, 0.0)) for r in read_jsonl(file) for k in ("time/step_s", "time/eval_s"))


def print_summary(result: Mapping[str, Any], console: Console) -> None:
    """Scores by domain, what is kept, and how long each part took."""
    domains = result["domains"]
    shown = [m for m in result["models"] if not m.startswith(("expert/", "shrink/"))]
    table = Table("domain", "expert", *shown, *(["shrink"] if _has_shrink(result) else []), box=None)
    for name, d in domains.items():
        cells = [f"{d['scores'][m]:.3f}" for m in (f"expert/{name}", *shown)]
        cells += [f"{d['scores'][f'shrink/{name}']:.3f}"] if _has_shrink(result) else []
        table.add_row(name, *cells)
    if result["untrained"]:
        table.add_row("untrained", "", *(f"{result['untrained']['scores'][m]:.3f}" for m in shown))
    table.add_row("all tasks", "", *(f"{result['models'][m]['score']:.3f}" for m in shown))
    console.print(table)
    kept = Table("kept of the experts", *result["kept"], box=None)
    for key, title in (("gain_retention", "of the gain"), ("score_retention", "of the score")):
        kept.add_row(title, *(percent(k[key]) for k in result["kept"].values()))
    console.print(kept)
    for v in result["verdicts"]:
        console.print(f"- {spoken(v)}", soft_wrap=True)
    if lost := {m: v["unscored"] for m, v in result["models"].items() if v["unscored"]}:
        console.print("answers whose scoring failed, left out: " + "  ".join(f"{m} {n}" for m, n in lost.items()))
    console.print("seconds: " + "  ".join(f"{n} {s:.0f}" for n, s in result["seconds"].items()))


def _has_shrink(result: Mapping[str, Any]) -> bool:
    return any(m.startswith("shrink/") for m in result["models"])


def percent(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.0%}"


def write_page(result: Mapping[str, Any], out: Path) -> None:
    """One self-contained HTML page: tables and the heat map of cosines, no scripts."""
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup

    from coterie.merging.page import heat_map

    labels = list(result["domains"])
    found = {tuple(p["experts"]): p["cosine"] for p in result["weights"]["pairs"]}
    cosines = [[found.get((a, b), found.get((b, a))) for b in labels] for a in labels]
    transfer = [[d["scores"][f"expert/{e}"] - d["scores"]["base"] for d in result["domains"].values()] for e in labels]
    env = Environment(loader=PackageLoader("coterie.parallel", "."), autoescape=True)
    page = env.get_template("page.html.j2").render(
        r=result,
        percent=percent,
        cosines=Markup(heat_map(labels, labels, cosines, "+.1e", 0.1)),
        transfer=Markup(heat_map(labels, labels, transfer, "+.2f", 0.1)),
        shrink=_has_shrink(result),
        shown=[m for m in result["models"] if not m.startswith(("expert/", "shrink/"))],
    )
    write_atomic(out, page)
