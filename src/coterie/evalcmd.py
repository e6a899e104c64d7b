"""``coterie eval``: a model, tasks by name, pass@k."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.table import Table

from coterie.config import TaskConfig, config_from_dict, load_config
from coterie.console import make_console
from coterie.errors import UserError
from coterie.models import folder_of, tiny_tasks
from coterie.stats import bootstrap_interval

if TYPE_CHECKING:
    from coterie.evaluation import Evaluation


@dataclass(frozen=True)
class EvalRequest:
    """What to evaluate, as asked on the command line."""

    model: str
    tasks: str
    ks: list[int]
    problems: int
    samples: int
    temperature: float
    max_new_tokens: int
    seed: int
    mode: str = "plain"  # or several, a,b

    def __post_init__(self) -> None:
        if self.samples < max(self.ks):
            raise UserError(
                f"pass@{max(self.ks)} needs at least {max(self.ks)} samples per problem, not {self.samples}"
            )
        if len(set(self.modes)) < len(self.modes) or not set(self.modes) <= {"plain", "tagged", "helped"}:
            raise UserError(f"--mode {self.mode}: plain, tagged, helped, or several of them, as in plain,helped")
        if self.problems < 1 or self.max_new_tokens < 0 or self.temperature < 0 or self.seed < 0:
            raise UserError("--problems must be at least 1; --max-new-tokens, --temperature and --seed at least 0")

    @property
    def modes(self) -> list[str]:
        """In the order asked for, but plain, the headline, first."""
        return sorted((m.strip() for m in self.mode.split(",")), key=lambda m: m != "plain")


def resolve_tasks(names: str, model: str) -> dict[str, TaskConfig]:
    """Task configs for ``a,b`` or a TOML file.

    Parameters come from where the model learned its tasks: the run's config, or the task list of ``tiny``; for other
    models and other names they are the library's defaults.
    """
    if names.endswith(".toml"):
        return load_config(names).tasks
    known = _known_tasks(model)
    wanted = list(known) if names == "all" and known else [n.strip() for n in names.split(",") if n.strip()]
    if not wanted or wanted == ["all"]:
        raise UserError(
            "--tasks: name at least one task (see `coterie tasks list`); this model brings no list of its own"
        )
    return {n: known.get(n, TaskConfig()) for n in wanted}


def _known_tasks(model: str) -> dict[str, TaskConfig]:
    run_config = Path(model) / "config.toml"
    if run_config.is_file():
        return load_config(run_config).tasks
    if model == "tiny":
        return tiny_tasks()
    return {}


def run_eval(request: EvalRequest, config: Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Evaluate and return JSON-ready results of the first mode (see :meth:`coterie.evaluation.Evaluation.to_json`).

    With several: the same for each of the others under ``other_modes``, and under ``gaps`` how far they are from the first.
    """
    base = load_config(config, overrides)
    tasks = resolve_tasks(request.tasks, request.model)
    longest = request.max_new_tokens or base.rollout.max_new_tokens
    cfg = config_from_dict(
        {
            **base.model_dump(),
            "model": {**base.model.model_dump(), "name": folder_of(request.model)},
            "rollout": {**base.rollout.model_dump(), "max_new_tokens": longest},
            "swarm": {},
            "tasks": {n: t.model_dump() for n, t in tasks.items()},
        }
    )
    from coterie.evaluation import evaluate
    from coterie.helpers.modes import Mode
    from coterie.helpers.roles import check_roles
    from coterie.run import build
    from coterie.types import Sampling

    check_roles(cfg)
    with ExitStack() as stack:
        parts = stack.enter_context(build(cfg))
        sampling = Sampling(longest, temperature=request.temperature, stop=cfg.rollout.stop)
        problems = parts.tasks.eval_problems(request.problems)
        done = {
            mode: evaluate(
                parts.engine,
                parts.policy.encoder,
                problems,
                request.samples,
                sampling,
                parts.scorer,
                seed=request.seed,
                mode=cast(Mode, mode),
                helpers=parts.helpers,
            )
            for mode in request.modes
        }
    (_, first), *others = done.items()
    result = {"model": request.model, "request": asdict(request), **first.to_json(request.ks)}
    if others:
        result["other_modes"] = {mode: evaluation.to_json(request.ks) for mode, evaluation in others}
        result["gaps"] = {mode: gap(evaluation, first) for mode, evaluation in others}
    return result


def gap(done: Evaluation, first: Evaluation) -> dict[str, Any]:
    """Pass@1 above that of ``first``: by task, on problems scored in both with a 95% interval over them, and their mean."""
    tasks: dict[str, dict[str, Any]] = {}
    for name, t in done.tasks.items():
        base = first.tasks[name]
        pairs = zip(t.correct, t.scored, base.correct, base.scored, strict=True)
        more = [c / n - c0 / n0 for c, n, c0, n0 in pairs if n and n0]
        if more:
            tasks[name] = {"gap": sum(more) / len(more), "interval95": list(bootstrap_interval(more))}
    known = [t["gap"] for t in tasks.values()]
    return {"tasks": tasks, "mean": sum(known) / len(known) if len(known) == len(done.tasks) else None}


def show(result: dict[str, Any], ks: Sequence[int]) -> None:
    """Print what :func:`run_eval` returned: a table for each mode, then the gaps."""
    first = result["settings"]["mode"]
    for mode, found in {first: result, **result.get("other_modes", {})}.items():
        if "gaps" in result:
            print(f"mode {mode}")
        table = Table("task", *(f"pass@{k}" for k in ks), "95% interval (pass@1)", "length", "truncated", box=None)
        for name, t in found["tasks"].items():
            low, high = t["interval95"]
            passes = [f"{t['pass'][str(k)]:.3f}" if str(k) in t["pass"] else "-" for k in ks]
            table.add_row(name, *passes, f"{low:.3f} - {high:.3f}", f"{t['mean_length']:.1f}", f"{t['truncated']:.0%}")
        make_console().print(table)
        known = found["accuracy"]
        mean = "unknown (an answer key could not be read)" if known is None else f"{known:.3f}"
        print(f"mean pass@1 over tasks: {mean}   settings: {json.dumps(found['settings'])}")
    for mode, found in result.get("gaps", {}).items():
        mean = "unknown (a task was not scored)" if found["mean"] is None else f"{found['mean']:+.3f}"
        each = []
        for name, t in found["tasks"].items():
            low, high = t["interval95"]
            each.append(f"{name} {t['gap']:+.3f} ({low:+.3f} to {high:+.3f})")
        print(f"gap of {mode} to {first}, mean pass@1: {mean}; with 95% intervals: {', '.join(each)}")
