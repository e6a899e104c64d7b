"""``coterie eval``: a model, tasks by name, pass@k."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from coterie.config import TaskConfig, config_from_dict, load_config
from coterie.errors import UserError
from coterie.models import folder_of, tiny_tasks


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
    mode: str = "plain"

    def __post_init__(self) -> None:
        if self.samples < max(self.ks):
            raise UserError(
                f"pass@{max(self.ks)} needs at least {max(self.ks)} samples per problem, not {self.samples}"
            )
        if self.mode not in ("plain", "tagged", "helped"):
            raise UserError(f"--mode {self.mode}: one of plain, tagged, helped")
        if self.problems < 1 or self.max_new_tokens < 0 or self.temperature < 0 or self.seed < 0:
            raise UserError("--problems must be at least 1; --max-new-tokens, --temperature and --seed at least 0")


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
    """Evaluate and return JSON-ready results (see :meth:`coterie.evaluation.Evaluation.to_json`)."""
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
        done = evaluate(
            parts.engine,
            parts.policy.encoder,
            problems,
            request.samples,
            sampling,
            parts.scorer,
            seed=request.seed,
            mode=cast(Mode, request.mode),
            helpers=parts.helpers,
        )
    return {"model": request.model, "request": asdict(request), **done.to_json(request.ks)}
