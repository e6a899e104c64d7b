"""A probe from model and task names: load, sample, take scores, work out the figures, for one or several temperatures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from coterie.config import Config, ModelConfig, RolloutConfig
from coterie.evalcmd import resolve_tasks
from coterie.merging.probe import ProbeSettings, Scores, collect
from coterie.merging.probe_figures import figures
from coterie.models import folder_of
from coterie.run import build

FORMAT = 1


def probe(model: str, tasks: str, asked: Sequence[ProbeSettings], advantage: str) -> dict[str, Any]:
    """The report that ``coterie probe`` prints and writes.

    Raises:
        UserError: model or tasks are not known.
    """
    cfg = Config(
        model=ModelConfig(name=folder_of(model)),
        tasks=resolve_tasks(tasks, model),
        rollout=RolloutConfig(max_new_tokens=asked[0].max_new_tokens),
    )
    return report_of(cfg, asked, advantage) | {"model": model}


def report_of(
    cfg: Config,
    asked: Sequence[ProbeSettings],
    advantage: str,
    arranged: Callable[[Scores], Scores] = lambda scores: scores,
) -> dict[str, Any]:
    """The same for the model and the tasks of a config; ``arranged`` may put tasks together."""
    found = []
    with build(cfg) as parts:
        for settings in asked:
            scores = arranged(collect(parts.policy, parts.engine, parts.tasks, parts.scorer, settings))
            found.append({"settings": asdict(settings), **figures(scores, advantage, settings.seed)})
    return {"format": FORMAT, "model": cfg.model.name, "temperatures": found}
