"""The charts of a report. Colours are the Okabe-Ito set (told apart by colour-blind readers); runs also differ by dash."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from coterie.report.data import RunLog

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
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
)  # fmt: skip


def held_out(runs: list[RunLog]) -> list[tuple[str, str, str]]:
    """Held-out accuracy: the mean over tasks, then one chart per task with its 95% interval."""
    out = [_div(_lines(runs, {"eval/accuracy": "mean over tasks"}, "Held-out accuracy, all tasks", "share right", True))]
    notes = ["Mean over tasks of sampled pass@1 on problems that are never trained on."]
    tasks = sorted({t for r in runs for t in r.eval_tasks()})
    for task in tasks:
        out.append(_div(_interval_figure(runs, task)))
        notes.append("Sampled pass@1 with its 95% interval over problems.")
    return [("", d, n) for d, n in zip(out, notes, strict=True)]


def others(runs: list[RunLog]) -> list[tuple[str, str, str]]:
    """The remaining charts, where at least one run logged a value."""
    out = []
    for c in CHARTS:
        keys = {k: n for k, n in c.keys.items() if any(r.series(k)[0] for r in runs)}
        if keys:
            out.append(("", _div(_lines(runs, keys, c.title, c.unit, c.share)), c.note))
    return out


def _lines(runs: list[RunLog], keys: dict[str, str], title: str, unit: str, share: bool) -> go.Figure:
    fig = _figure(title, unit, share)
    for i, run in enumerate(runs):
        for j, (key, name) in enumerate(keys.items()):
            x, y = run.series(key)
            label = name if len(runs) == 1 else run.name if len(keys) == 1 else f"{run.name}: {name}"
            colour, dash = (COLOURS[j % 7], DASHES[j % 5]) if len(runs) == 1 else (COLOURS[i % 7], DASHES[(i + j) % 5])
            mode = "lines+markers" if len(x) < 30 else "lines"
            fig.add_scatter(x=x, y=y, name=label, mode=mode, line={"color": colour, "dash": dash, "width": 2})
    fig.update_layout(showlegend=len(runs) * len(keys) > 1)
    return fig


def _interval_figure(runs: list[RunLog], task: str) -> go.Figure:
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
        line = {"color": COLOURS[i % 7], "dash": DASHES[i % 5], "width": 2}
        fig.add_scatter(x=x, y=y, error_y=bars, name=run.name, mode="lines+markers", line=line)
    fig.update_layout(showlegend=len(runs) > 1)
    return fig


def _figure(title: str, unit: str, share: bool) -> go.Figure:
    fig = go.Figure()
    fig.update_layout(
        title={"text": title, "font": {"size": 16}, "x": 0.02},
        xaxis={"title": {"text": "step"}, "rangemode": "tozero", "gridcolor": "#e6e6e6"},
        yaxis={"title": {"text": unit}, "rangemode": "tozero", "gridcolor": "#e6e6e6"},
        template="plotly_white",
        height=300,
        margin={"l": 60, "r": 15, "t": 45, "b": 45},
        legend={"orientation": "h", "y": -0.25},
    )
    if share:
        fig.update_yaxes(tickformat=".0%")
    return fig


def _div(fig: go.Figure) -> str:
    return str(fig.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False, "responsive": True}))
