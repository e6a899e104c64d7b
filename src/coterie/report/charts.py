"""The charts of a report. Colours are the five of the Okabe-Ito set that colour-blind readers tell apart best; lines also
differ by dash."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from coterie.report.curves import Curve, Line, curves
from coterie.report.data import STATES, RunLog

COLOURS = ("#0072B2", "#D55E00", "#000000", "#CC79A7", "#56B4E9")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_HEIGHT, _ROW = 330, 19  # pixels: a chart, and what each name in its legend adds beyond three


@dataclass(frozen=True)
class Chart:
    """One chart: ``keys`` maps metric keys to the names of their lines."""

    title: str
    unit: str
    keys: dict[str, str]
    note: str
    share: bool = False  # the value is a share between 0 and 1
    words: tuple[str, ...] = ()  # what the values 0, 1, ... are called
    interval: tuple[str, str] | None = None  # keys of the lower and upper end of bars


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
          "Mean reward of all peers' groups that arrived and were scored in the step, by this node's own verifier, before "
          "some are chosen for the update.", True),
    Chart("Groups in the update", "groups",
          {"update/own_groups": "own", "update/peer_groups": "peers", "swarm/wanted": "peers, asked for"},
          "How many own and peers' groups each update trained on. Fewer of the peers' than asked for: too few were fit to use."),
    Chart("Sharing", "state", {"swarm/state": "state"},
          "Sharing: a peer's group was used lately, or none is asked for. Degraded: the link broke a moment ago, or nothing fit "
          "to train on arrives. Solo: no link, or nobody there.",
          words=STATES),
    Chart("Staleness of peers' groups", "versions", {"swarm/staleness": "staleness"},
          "Mean versions between the peers' groups in the update and the newest known of their author (0 also where none was "
          "used). Groups older than swarm.max_age are refused."),
    Chart("Reward with and without help", "mean reward",
          {"helpers/reward/solo": "solo", "helpers/reward/helped": "helped"},
          "Own answers under the plain prompt, and under the one that speaks of helpers.", True),
    Chart("Questions to helpers", "per helped answer", {"helpers/consults": "questions"},
          "0 means that the policy has stopped asking."),
    Chart("Held-out with helpers", "share right",
          {"eval_tagged/accuracy": "tagged (E1)", "eval_helped/accuracy": "helped (E2)", "eval_helped/gap": "helped - plain"},
          "The gap is what helpers still add to the plain mode (E0).", True),
)  # fmt: skip


def figures(runs: list[RunLog]) -> list[tuple[go.Figure, str]]:
    """Every chart for which at least one run logged a value, and the note under it."""
    drawn = curves(runs)
    logged = {k for r in runs for row in r.metrics for k in row}
    charts = (c for c in (*_held_out(runs), *CHARTS) if not logged.isdisjoint(c.keys))
    return [(_figure(c, drawn), c.note) for c in charts]


def _held_out(runs: list[RunLog]) -> list[Chart]:
    """Held-out accuracy: the mean over tasks, then one chart per task."""
    out = [Chart("Held-out accuracy, all tasks", "share right", {"eval/accuracy": "mean over tasks"},
                 "Mean over tasks of sampled pass@1 on problems that are never trained on.", True)]  # fmt: skip
    note = "Sampled pass@1. Bars, on lines of one run: its 95% interval over problems."
    for task in sorted({t for r in runs for t in r.eval_tasks()}):
        keys, ends = {f"eval/{task}/accuracy": "held-out"}, (f"eval/{task}/low", f"eval/{task}/high")
        out.append(Chart(f"Held-out: {task}", "share right", keys, note, True, interval=ends))
    return out


def _figure(chart: Chart, drawn: list[Curve]) -> go.Figure:
    fig = _empty(chart)
    lines = [(c, name, c.line(key)) for key, name in chart.keys.items() for c in drawn]
    several_keys = len({name for _, name, line in lines if line.x}) > 1
    for i, (curve, name, line) in enumerate(lines):
        if not line.x:
            continue  # its style stays its own: a run looks the same in every chart
        colour, dash = style_of(i)
        if curve.averaged:
            _add_band(fig, line, colour)
        bars = None if curve.averaged or chart.interval is None else _bars(curve, line, *chart.interval)
        mode = "lines+markers" if len(line.x) < 30 else "lines"
        label = _label(curve, name, len(drawn) > 1, several_keys)
        style = {"color": colour, "dash": dash, "width": 2}
        fig.add_scatter(x=line.x, y=line.y, error_y=bars, name=label, mode=mode, line=style, cliponaxis=False)
    named = sum(t.showlegend is not False for t in fig.data)
    fig.update_layout(showlegend=named > 1, height=_HEIGHT + _ROW * max(0, named - 3))
    return fig


def style_of(i: int) -> tuple[str, str]:
    """Colour and dash of the ``i``-th line of a chart: 25 pairs, and lines of the same dash have different colours."""
    n = len(COLOURS)
    return COLOURS[i % n], DASHES[(i + i // n) % n]


def _add_band(fig: go.Figure, line: Line, colour: str) -> None:
    """From the lowest to the highest run. The legend names the first band of a chart."""
    first = not any(t.fill for t in fig.data)
    fig.add_scatter(x=line.x + line.x[::-1], y=line.high + line.low[::-1], fill="toself", mode="lines",
                    line={"width": 0}, fillcolor=colour, opacity=0.15, hoverinfo="skip",
                    name="lowest to highest run", showlegend=first)  # fmt: skip


def _label(curve: Curve, key: str, several_curves: bool, several_keys: bool) -> str:
    words = ([curve.name] if several_curves else []) + ([key] if several_keys or not several_curves else [])
    return ": ".join(words) + (f" (mean of {len(curve.runs)})" if curve.averaged else "")


def _bars(curve: Curve, line: Line, low: str, high: str) -> dict[str, Any]:
    return {
        "type": "data",
        "symmetric": False,
        "array": [h - v for h, v in zip(curve.line(high).y, line.y, strict=True)],
        "arrayminus": [v - lo for lo, v in zip(curve.line(low).y, line.y, strict=True)],
        "thickness": 1,
    }


def _empty(chart: Chart) -> go.Figure:
    fig = go.Figure()
    fig.update_layout(
        title={"text": chart.title, "font": {"size": 16}, "x": 0.02},
        xaxis={"title": {"text": "step"}, "rangemode": "tozero", "gridcolor": "#e6e6e6"},
        yaxis={"title": {"text": chart.unit}, "rangemode": "tozero", "gridcolor": "#e6e6e6"},
        template="plotly_white",
        yaxis_ticklabelstandoff=4,
        margin={"l": 60, "r": 15, "t": 45, "b": 80},
        legend={"orientation": "h", "y": -0.32, "yanchor": "top", "font": {"size": 11}},
    )
    if chart.share:
        fig.update_yaxes(tickformat=".0%")
    if chart.words:
        at = list(range(len(chart.words)))
        fig.update_yaxes(tickvals=at, ticktext=chart.words, range=[-0.1, at[-1] + 0.1])
        fig.update_layout(margin_l=85)
    return fig
