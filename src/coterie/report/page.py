"""Put a report together from its parts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.report.data import STATES, RunLog, load_runs
from coterie.rundir import write_atomic

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_SHOWN = 40  # transcripts per run, spread over the run


def write_report(paths: Sequence[Path], out: Path) -> Path:
    """Write one HTML page for the runs at ``paths`` to ``out`` and return ``out``.

    Raises:
        UserError: a path is not a run directory.
    """
    import jinja2
    from plotly.offline import get_plotlyjs

    from coterie.report.charts import figures
    from coterie.report.curves import reading_note

    runs = load_runs(list(paths))
    loader = jinja2.PackageLoader("coterie.report", "")
    env = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    page = env.get_template("page.html.j2").render(
        runs=runs,
        plotlyjs=get_plotlyjs(),
        headline=[_headline(r) for r in runs],
        tasks=_task_table(runs),
        swarm=[_swarm_row(r) for r in runs if r.last("swarm/wanted") or r.last("swarm/published")],
        charts=[(_div(fig), note) for fig, note in figures(runs)],
        reading_note=reading_note(runs),
        transcripts=[(r, _spread(r.trajectories)) for r in runs if r.trajectories],
    )
    write_atomic(out, page)
    return out


def _headline(run: RunLog) -> dict[str, Any]:
    """The figures a reader looks for first."""
    first, last = run.first("eval/accuracy"), run.last("eval/accuracy")
    seconds = sum(run.series("time/step_s")[1]) + sum(run.series("time/eval_s")[1])
    return {
        "name": run.name,
        "state": "finished" if run.finished else "not finished",
        "steps": max(r["step"] for r in run.metrics),
        "held_out": "-" if first is None or last is None else f"{first:.1%} → {last:.1%}",
        "own": _arrow(run, "own/reward"),
        "tokens": f"{sum(run.series('tokens/generated')[1]):,.0f}",
        "minutes": f"{seconds / 60:.1f}",
        "skipped": f"{sum(run.series('policy/skipped')[1]):.0f}",
    }


def _arrow(run: RunLog, key: str) -> str:
    """Mean of the first and of the last tenth of the steps: single steps are too noisy to quote."""
    values = run.series(key)[1]
    n = max(1, len(values) // 10)
    return f"{sum(values[:n]) / n:.3f} → {sum(values[-n:]) / n:.3f}" if values else "-"


def _task_table(runs: list[RunLog]) -> list[dict[str, Any]]:
    rows = []
    for run in runs:
        for task in run.eval_tasks():
            key = f"eval/{task}"
            rows.append(
                {
                    "run": run.name,
                    "task": task,
                    "start": run.first(f"{key}/accuracy"),
                    "end": run.last(f"{key}/accuracy"),
                    "low": run.last(f"{key}/low"),
                    "high": run.last(f"{key}/high"),
                    "length": run.last(f"{key}/length"),
                    "truncated": run.last(f"{key}/truncated"),
                }
            )
    return rows


def _swarm_row(run: RunLog) -> dict[str, str]:
    """How sharing went for one node."""
    states = run.series("swarm/state")[1]
    used, wanted = (sum(run.series(k)[1]) for k in ("swarm/used_groups", "swarm/wanted"))
    ages = [s * n for s, n in zip(run.series("swarm/staleness")[1], run.series("swarm/used_groups")[1], strict=True)]
    start, last = "swarm/refused/", next(r for r in reversed(run.metrics) if "swarm/state" in r)
    kinds = {k.removeprefix(start): n for k, n in last.items() if k.startswith(start)}
    return {
        "name": run.name,
        "state": STATES[int(states[-1])],
        "sharing": f"{states.count(2.0) / len(states):.0%}",
        "used": f"{used:.0f} of {wanted:.0f}",
        "staleness": f"{sum(ages) / used:.1f}" if used else "-",
        "refused": ", ".join(f"{n:.0f} {k}" for k, n in sorted(kinds.items(), key=lambda x: -x[1])) or "none",
    }


def _div(fig: Figure) -> str:
    return str(
        fig.to_html(full_html=False, include_plotlyjs=False, config={"displayModeBar": False, "responsive": True})
    )


def _spread(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most ``_SHOWN`` records, evenly over the run, newest first."""
    stride = max(1, -(-len(records) // _SHOWN))
    return records[::-1][::stride]
