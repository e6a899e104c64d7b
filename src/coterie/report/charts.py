"""The charts of a report. Colours are the Okabe-Ito set (told apart by colour-blind readers), the five that differ most
first; runs also differ by dash."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from coterie.report.data import RunLog

COLOURS = ("#0072B2", "#D55E00", "#000000", "#CC79A7", "#56B4E9", "#E69F00", "#009E73")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")


@dataclass(frozen=True)
class Chart:
    """One chart: ``keys`` maps metric keys to the names of their lines."""

    title: str
    unit: str
    keys: dict[str, str]
    note: str
    share: bool = False  # the value is a share between 0 and 1


CHARTS = (
    Chart("Own reward", "mean reward", {"own/reward": "own reward"},
          "Mean verifier reward of the node's own answers. Peers' answers are never in it.", True),
    Chart("Informative groups", "share of groups", {"own/informative": "informative", "own/solved": "all right"},
          "Groups whose answers differ in reward can move the policy; the others cost nothing in the update.", True),
    Chart("Entropy", "nats per token", {"loss/own/entropy": "entropy"},
          "Mean entropy of the policy on its own tokens. A fast fall to 0 means it stops exploring."),
    Chart("KL to the start", "nats per token", {"policy/kl_to_start": "KL"},
          "How far the policy has moved from the model it started from, on its own tokens."),
    Chart("Answer length", "tokens", {"own/length": "all", "own/length_ended": "answers that ended"},
          "Mean tokens per answer."),
    Chart("Truncated answers", "share of answers", {"own/truncated": "truncated"},
          "Answers stopped by the token budget. High values mean max_new_tokens is too small.", True),
    Chart("Gradient norm", "L2 norm", {"policy/grad_norm": "before clipping"},
          "Norm of the gradient before clipping. It is not zero although the loss value is near zero."),
    Chart("Speed", "tokens per second", {"time/tokens_per_s": "generated"}, "Sampled tokens per second of rollout."),
    Chart("Skipped steps", "steps", {"policy/skipped": "non-finite", "policy/nothing_to_train": "no signal"},
          "1 where a step changed nothing: a non-finite loss or gradient, or no group with a signal."),
    Chart("Peers' reward", "mean reward", {"peer/reward": "peers, scored here"},
          "Reward of the peers' groups used in the update, by this node's own verifier (a filtered selection).", True),
    Chart("Groups in the update", "groups", {"update/own_groups": "own", "update/peer_groups": "peers"},
          "How many own and peer groups each update trained on."),
    Chart("Reward with and without help", "mean reward",
          {"helpers/reward/solo": "solo", "helpers/reward/helped": "helped"},
          "Own answers under the plain prompt, and under the one that speaks of helpers.", True),
    Chart("Questions to helpers", "per helped answer", {"helpers/consults": "questions"},
          "0 means that the policy has stopped asking."),
    Chart("Held-out with helpers", "share right",
          {"eval_tagged/accuracy": "tagged (E1)", "eval_helped/accuracy": "helped (E2)", "eval_helped/gap": "helped - plain"},
          "The gap is what helpers still add to the plain mode (E0).", True),
)  # fmt: skip


_MANY = 5  # more runs than this are drawn as one line per group, with a band from the lowest to the highest run
_SMOOTH = 40  # series longer than this are drawn as a moving mean over a twentieth of their length


@dataclass(frozen=True)
class Line:
    """One line of a chart: a run, or the mean of a group of runs with the band they span."""

    name: str
    x: list[int]
    y: list[float]
    low: list[float] | None = None
    high: list[float] | None = None


def held_out(runs: list[RunLog]) -> list[tuple[str, str]]:
    """Held-out accuracy: the mean over tasks, then one chart per task with its 95% interval."""
    mean = _chart(runs, {"eval/accuracy": "mean over tasks"}, "Held-out accuracy, all tasks", "share right", True)
    out = [(mean, "Mean over tasks of sampled pass@1 on problems that are never trained on.")]
    for task in sorted({t for r in runs for t in r.eval_tasks()}):
        if len(runs) > _MANY:
            keys = {f"eval/{task}/accuracy": "held-out"}
            out.append((_chart(runs, keys, f"Held-out: {task}", "share right", True), "Sampled pass@1."))
        else:
            out.append((_div(_intervals(runs, task)), "Sampled pass@1 with its 95% interval over problems."))
    return out


def others(runs: list[RunLog]) -> list[tuple[str, str]]:
    """The remaining charts, where at least one run logged a value."""
    out = []
    for c in CHARTS:
        keys = {k: n for k, n in c.keys.items() if any(r.series(k)[0] for r in runs)}
        if len(runs) > _MANY:
            keys = dict(list(keys.items())[:1])
        if keys:
            out.append((_chart(runs, keys, c.title, c.unit, c.share), c.note))
    return out


def reading_note(runs: list[RunLog]) -> str:
    """How the lines are to be read."""
    long = "Long curves are moving means over a twentieth of the run. " if _steps(runs) > _SMOOTH else ""
    many = (
        "Runs of one folder are drawn as their mean, with a band from the lowest to the highest run."
        if len(runs) > _MANY
        else ""
    )
    return long + many


def _chart(runs: list[RunLog], keys: dict[str, str], title: str, unit: str, share: bool) -> str:
    fig = _figure(title, unit, share)
    lines = [(key, line) for key, name in keys.items() for line in _lines(runs, key, name, len(keys) > 1)]
    for i, (_, line) in enumerate(lines):
        colour = COLOURS[i % len(COLOURS)]
        if line.low is not None and line.high is not None:
            fig.add_scatter(x=line.x + line.x[::-1], y=line.high + line.low[::-1], fill="toself", line={"width": 0},
                            fillcolor=colour, opacity=0.15, hoverinfo="skip", showlegend=False)  # fmt: skip
        mode = "lines+markers" if len(line.x) < 30 else "lines"
        style = {"color": colour, "dash": DASHES[i % len(DASHES)], "width": 2}
        fig.add_scatter(x=line.x, y=line.y, name=line.name, mode=mode, line=style, cliponaxis=False)
    fig.update_layout(showlegend=len(lines) > 1)
    return _div(fig)


def _lines(runs: list[RunLog], key: str, name: str, several: bool) -> list[Line]:
    series = [(r, *r.series(key)) for r in runs]
    if len(runs) <= _MANY:
        label = {r.name: name if len(runs) == 1 else f"{r.name}: {name}" if several else r.name for r in runs}
        return [Line(label[r.name], x, _smooth(y)) for r, x, y in series if x]
    out = []
    for group in dict.fromkeys(r.group for r in runs):
        at: dict[int, list[float]] = {}
        for _, x, y in (s for s in series if s[0].group == group):
            for step, value in zip(x, _smooth(y), strict=True):
                at.setdefault(step, []).append(value)
        steps = sorted(at)
        mean = [sum(at[s]) / len(at[s]) for s in steps]
        out.append(Line(group, steps, mean, [min(at[s]) for s in steps], [max(at[s]) for s in steps]))
    return out


def _smooth(values: list[float]) -> list[float]:
    """Moving mean over the last twentieth (at least 5 values) of a long series; a short one as it is."""
    if len(values) <= _SMOOTH:
        return values
    w = max(5, len(values) // 20)
    return [sum(values[max(0, i - w + 1) : i + 1]) / min(i + 1, w) for i in range(len(values))]


def _steps(runs: list[RunLog]) -> int:
    return max(len(r.metrics) for r in runs)


def _intervals(runs: list[RunLog], task: str) -> go.Figure:
    fig = _figure(f"Held-out: {task}", "share right", True)
    for i, run in enumerate(runs):
        x, y = run.series(f"eval/{task}/accuracy")
        low, high = run.series(f"eval/{task}/low")[1], run.series(f"eval/{task}/high")[1]
        bars: dict[str, Any] = {
            "type": "data",
            "symmetric": False,
            "array": [h - v for h, v in zip(high, y, strict=True)],
            "arrayminus": [v - lo for lo, v in zip(low, y, strict=True)],
            "thickness": 1,
        }
        line = {"color": COLOURS[i % len(COLOURS)], "dash": DASHES[i % len(DASHES)], "width": 2}
        fig.add_scatter(x=x, y=y, error_y=bars, name=run.name, mode="lines+markers", line=line, cliponaxis=False)
    fig.update_layout(showlegend=len(runs) > 1)
    return fig


def _figure(title: str, unit: str, share: bool) -> go.Figure:
    fig = go.Figure()
    fig.update_layout(
        title={"text": title, "font": {"size": 16}, "x": 0.02},
        xaxis={"title": {"text": "step"}, "rangemode": "tozero", "gridcolor": "#e6e6e6"},
        yaxis={"title": {"text": unit}, "rangemode": "tozero", "gridcolor": "#e6e6e6"},
        template="plotly_white",
        yaxis_ticklabelstandoff=4,
        height=320,
        margin={"l": 60, "r": 15, "t": 45, "b": 80},
        legend={"orientation": "h", "y": -0.28, "yanchor": "top", "font": {"size": 11}},
    )
    if share:
        fig.update_yaxes(tickformat=".0%")
    return fig


def _div(fig: go.Figure) -> str:
    return str(
        fig.to_html(full_html=False, include_plotlyjs=False, config={"displayModeBar": False, "responsive": True})
    )
