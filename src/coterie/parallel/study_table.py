"""Tables of the experiment on parallel training. The independent unit is the seed: every figure is made within a seed, then
averaged, with Student's 95% interval over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie.stats import mean_interval

if TYPE_CHECKING:
    from coterie.experiment import Experiment

Row = Mapping[str, Any]
BASE = "base"
SPARSER = "RL's deltas have fewer values above 1e-5, by at least 10 points (RL - SFT)"
MARGINS = {SPARSER: 0.1}  # claims of which a trivial difference is no sign: the paper has about 20% against nearly all


class Records:
    """``results.jsonl`` by arm, seed and model."""

    def __init__(self, spec: Experiment, rows: Sequence[Row]) -> None:
        self.domains: dict[str, list[str]] = spec.config["parallel"]["experts"]
        self.tasks = [t for ts in self.domains.values() for t in ts]
        self.seeds = [s for s in spec.seeds if any(r["seed"] == s for r in rows)]
        self.arms = [a for a in spec.arms if any(r["arm"] == a for r in rows)]
        self.main = [a for a in self.arms if any(r["arm"] == a and r.get("model") == "mixed" for r in rows)]
        self.match = spec.match
        self.scored = {(r["arm"], r["seed"], r["model"]): r for r in rows if "model" in r}
        self._base = {r["seed"]: r for r in rows if r.get("model") == BASE}
        self.runs = {(r["arm"], r["seed"], r["run"]): r for r in rows if "run" in r}
        self._weights = {(r["arm"], r["seed"]): r["weights"] for r in rows if "weights" in r}

    def models(self, arm: str) -> list[str]:
        return list(dict.fromkeys(m for a, _, m in self.scored if a == arm))

    def mean(self, seed: int, arm: str, model: str, tasks: Sequence[str], key: str = "score") -> float:
        """Mean over tasks; NaN if the model was not scored."""
        row = self._base.get(seed) if model == BASE else self.scored.get((arm, seed, model))
        return float(np.mean([row["tasks"][t][key] for t in tasks])) if row is not None else math.nan

    def change(self, seed: int, arm: str, model: str, tasks: Sequence[str]) -> float:
        return self.mean(seed, arm, model, tasks) - self.mean(seed, arm, BASE, tasks)

    def over_seeds(self, of: Callable[..., float], *args: Any) -> list[float]:
        """``of(seed, *args)`` of every seed for which it is known."""
        return [v for s in self.seeds if not math.isnan(v := of(s, *args))]

    def shown(self, values: Sequence[float], form: str = "+.3f") -> str:
        """:func:`shown`, with the number of seeds where it is not all of them."""
        some = 0 < len(values) < len(self.seeds)
        return shown(values, form) + (f" [{len(values)} seed{'s' * (len(values) > 1)}]" if some else "")

    def target(self, seed: int, arm: str, prefix: str = "expert/") -> float:
        """What experts gain on their own tasks, mean over experts."""
        return float(np.mean([self.change(seed, arm, prefix + n, ts) for n, ts in self.domains.items()]))

    def others(self, seed: int, arm: str, prefix: str = "expert/") -> float:
        """What experts do to the tasks of the other domains, mean over experts."""
        rest = {n: [t for t in self.tasks if t not in ts] for n, ts in self.domains.items()}
        return float(np.mean([self.change(seed, arm, prefix + n, ts) for n, ts in rest.items()]))

    def gain_kept(self, seed: int, arm: str, model: str, prefix: str = "expert/") -> float:
        """Gain retention, pooled: sums over experts before the division. NaN (the seed is left out) if they gained nothing."""
        gain = self.target(seed, arm, prefix)
        return self.change(seed, arm, model, self.tasks) / gain if gain > 0 else math.nan

    def score_kept(self, seed: int, arm: str, model: str, prefix: str = "expert/") -> float:
        experts = float(np.mean([self.mean(seed, arm, prefix + n, ts) for n, ts in self.domains.items()]))
        return self.mean(seed, arm, model, self.tasks) / experts if experts > 0 else math.nan

    def shrunk(self, seed: int, arm: str, lam: str) -> float:
        """Base + lam * one delta on its own tasks: mean score over experts."""
        at = "expert/" if lam == "1" else f"shrink_{lam}/"
        return float(np.mean([self.mean(seed, arm, at + n, ts) for n, ts in self.domains.items()]))

    def stages(self, seed: int, arm: str) -> float:
        """Change after the last stage, mean over the orders of this seed."""
        orders = [m for a, s, m in self.scored if (a, s) == (arm, seed) and m.startswith("stages/")]
        return float(np.mean([self.change(seed, arm, m, self.tasks) for m in orders])) if orders else math.nan

    def last_stage(self, seed: int, arm: str, key: str) -> float:
        """A figure of the models after the last stage, mean over the orders of this seed."""
        orders = [m for a, s, m in self.scored if (a, s) == (arm, seed) and m.startswith("stages/")]
        return float(np.mean([self.mean(seed, arm, m, self.tasks, key) for m in orders])) if orders else math.nan

    def summed(self, seed: int, arm: str, lam: str) -> float:
        """Change of the sum (adapters: their exact concatenation)."""
        name = f"concat_{lam}" if f"concat_{lam}" in self.models(arm) else f"sum_{lam}"
        return self.change(seed, arm, name, self.tasks)

    def worst(self, seed: int, arm: str, model: str) -> float:
        """Change of the task that loses most."""
        return float(np.min([self.change(seed, arm, model, [t]) for t in self.tasks]))

    def abroad(self, seed: int, arm: str, key: str) -> float:
        """A figure of the experts on the tasks of the other domains."""
        rest = {n: [t for t in self.tasks if t not in ts] for n, ts in self.domains.items()}
        return float(np.mean([self.mean(seed, arm, f"expert/{n}", ts, key) for n, ts in rest.items()]))

    def weight(self, seed: int, arm: str, column: int) -> float:
        """A figure of the deltas, mean over those experts or pairs that have one (a delta of 0 has no cosine)."""
        where, _, of, _ = _WEIGHTS[column]
        found = self._weights.get((arm, seed))
        if found is None:
            return math.nan
        values = [of(x) for x in (found[where].values() if where == "experts" else found[where])]
        known = [v for v in values if v is not None]
        return float(np.mean(known)) if known else math.nan


def shown(values: Sequence[float], form: str = "+.3f") -> str:
    """``mean (low to high)``."""
    if not values:
        return ""
    low, high = mean_interval(values)
    body = f"{np.mean(values):{form}}"
    return f"{body} ({low:{form}} to {high:{form}})" if math.isfinite(low) else body


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(r)} |" for r in (head, ["---"] * len(head), *rows)]


def tables(spec: Experiment, rows: Sequence[Row]) -> str:
    """Markdown."""
    r = Records(spec, rows)
    count = f"{len(r.seeds)} seed{'s' if len(r.seeds) != 1 else ''}"
    start = r.shown(r.over_seeds(r.mean, "", BASE, r.tasks), ".3f")
    parts = [
        (
            "",
            [
                spec.question,
                "",
                f"{count}. Base, mean of all tasks: {start}. Means with 95% intervals over seeds; [n] where fewer count.",
            ],
        ),
        ("Signs of the paper", signs(r)),
        ("Change against the base, mean of all tasks", changes(r)),
        ("Kept of the experts", kept(r)),
        ("Lambda and the shrink control", sweep(r)),
        ("Experts at equal norm and equal gain", matched(r)),
        ("Weights", weights(r)),
        ("Length, truncation, leakage", leakage(r)),
        ("Cost", costs(r)),
    ]
    return "\n".join(x for title, lines in parts for x in ([f"\n## {title}\n"] if title else []) + lines) + "\n"


def changes(r: Records) -> list[str]:
    lines: list[tuple[str, Callable[..., float], tuple[Any, ...]]] = [
        ("single task: its own tasks", r.target, ()),
        ("single task: tasks of other domains", r.others, ()),
        ("multi-stage, mean of the orders", r.stages, ()),
        ("mixed", r.change, ("mixed", r.tasks)),
        ("parallel, sum, lambda 1", r.summed, ("1",)),
        ("parallel, sum, lambda 0.6", r.summed, ("0.6",)),
        ("the same, adapted on 5% of the steps", r.change, ("adapted", r.tasks)),
        ("base, adapted on 5% of the steps", r.change, ("adapted_base", r.tasks)),
    ]
    return _table(["", *r.arms], [[t, *(r.shown(r.over_seeds(of, a, *more)) for a in r.arms)] for t, of, more in lines])


def kept(r: Records) -> list[str]:
    out = []
    for arm in r.arms:
        for m in (m for m in r.models(arm) if m != BASE and "/" not in m):
            gain, score = r.over_seeds(r.gain_kept, arm, m), r.over_seeds(r.score_kept, arm, m)
            out.append([arm, m, r.shown(gain, ".2f"), r.shown(score, ".2f"), r.shown(r.over_seeds(r.worst, arm, m))])
    return _table(["arm", "model", "gain kept", "score kept", "change of the task that loses most"], out)


def sweep(r: Records) -> list[str]:
    def lost(seed: int, arm: str, model: str, lam: str) -> float:
        return r.mean(seed, arm, model, r.tasks) - r.shrunk(seed, arm, lam)

    out = []
    for arm in r.main:
        lams = {m.split("_")[1].split("/")[0] for m in r.models(arm) if m.startswith("shrink_")}
        for lam in sorted({*lams, "1"}, key=float):
            m = "mean" if float(lam) * len(r.domains) == 1 else f"sum_{lam}"
            scores = [r.over_seeds(r.mean, arm, m, r.tasks), r.over_seeds(r.shrunk, arm, lam)]
            more = [r.over_seeds(r.mean, arm, m, r.tasks, k) for k in ("length", "leak")]
            cells = [*(r.shown(x, ".3f") for x in scores), r.shown(r.over_seeds(lost, arm, m, lam))]
            out.append(
                [
                    arm,
                    lam,
                    *cells,
                    *(f"{np.mean(x):{f}}" if x else "" for x, f in zip(more, (".1f", ".3f"), strict=True)),
                ]
            )
    head = ["arm", "lambda", "sum of the experts", "one expert alone, own tasks", "difference", "length", "leakage"]
    return _table(head, out)


def matched(r: Records) -> list[str]:
    if not r.match:
        return []
    first, second = r.match
    cases = [
        (first, "", f"{first}, as trained"),
        (second, "", f"{second}, as trained"),
        ("matched", f"norm/{second}/", f"{second}, scaled to the norms of {first}"),
        ("matched", f"gain/{first}/", f"{first}, scaled to equal gain"),
        ("matched", f"gain/{second}/", f"{second}, scaled to equal gain"),
    ]
    out = []
    for arm, at, title in cases:
        e = f"{at}expert/"
        scales = [m["scale"] for (a, _, n), m in r.scored.items() if a == arm and n.startswith(e) and "scale" in m]
        kept = [r.shown(r.over_seeds(r.gain_kept, arm, f"{at}sum_{lam}", e), ".2f") for lam in ("0.6", "1")]
        own, others = r.shown(r.over_seeds(r.target, arm, e)), r.shown(r.over_seeds(r.others, arm, e))
        out.append([title, f"{np.mean(scales) if scales else 1:.2f}", own, others, *kept])
    head = ["experts", "mean scale", "own tasks", "other domains", "gain kept, lambda 0.6", "gain kept, lambda 1"]
    return _table(head, out)


_WEIGHTS: tuple[tuple[str, str, Callable[[Row], float | None], str], ...] = (
    ("experts", "L2 norm of a delta", lambda e: e["l2_norm"], ".2f"),
    ("experts", "above 1e-5", lambda e: e["share_above"]["1e-05"], ".3f"),
    ("experts", "visible in bf16", lambda e: e["share_visible_in_bf16"], ".3f"),
    ("experts", "the same, null", lambda e: e["share_visible_in_bf16_null"], ".3f"),
    ("pairs", "cosine of two", lambda p: p["cosine"], ".3f"),
    ("pairs", "chance", lambda p: p["chance_cosine"], ".4f"),
    ("pairs", "opposed energy", lambda p: p["sign_conflict_energy"], ".3f"),
)


def weights(r: Records) -> list[str]:
    rows = [[arm, *(r.shown(r.over_seeds(r.weight, arm, i), c[3]) for i, c in enumerate(_WEIGHTS))] for arm in r.arms]
    return _table(["arm", *(c[1] for c in _WEIGHTS)], rows)


def leakage(r: Records) -> list[str]:
    def cells(of: Callable[..., float], *args: Any) -> list[str]:
        return [
            r.shown(r.over_seeds(of, *args, k), f)
            for k, f in (("length", ".1f"), ("truncated", ".3f"), ("leak", ".3f"))
        ]

    out = [["", BASE, *cells(r.mean, "", BASE, r.tasks)]]
    for arm in r.arms:
        out.append([arm, "experts on other domains", *cells(r.abroad, arm)])
        for m in r.models(arm):
            if m != BASE and "/" not in m:
                out.append([arm, m, *cells(r.mean, arm, m, r.tasks)])
        if arm in r.main:
            out.append([arm, "multi-stage", *cells(r.last_stage, arm)])
    return _table(["arm", "model", "length, tokens", "truncated", "in another domain's form"], out)


def costs(r: Records) -> list[str]:
    """CPU seconds of the training processes. Waiting: each run on a core of its own, all experts at once."""

    def ways(seed: int, arm: str, way: str, waiting: bool) -> float:
        def cpu(name: str) -> list[float]:
            return [
                x["cpu_s"]
                for (a, s, n), x in r.runs.items()
                if (a, s) == (arm, seed) and (n == name or n.startswith(name + "/"))
            ]

        experts = cpu("experts")
        if not experts:
            return math.nan
        if way == "mixed":
            return sum(cpu("mixed") or [math.nan])
        if way == "multi-stage, one order":  # its first stage is an expert
            later = [cpu(f"multi_stage/{m.removeprefix('stages/')}") for m in r.models(arm) if m.startswith("stages/")]
            return float(np.mean([np.mean(experts) + sum(x) for x in later if x])) if any(later) else math.nan
        return (max(experts) if waiting else sum(experts)) + (
            sum(cpu("adapted") or [math.nan]) if "adapted" in way else 0.0
        )

    names = ("parallel", "parallel, adapted", "mixed", "multi-stage, one order")
    rows = [
        [a, n, *(r.shown(r.over_seeds(ways, a, n, w), ".0f") for w in (False, True))] for a in r.main for n in names
    ]
    return _table(["arm", "way", "CPU seconds", "seconds of waiting"], rows)


def signs(r: Records) -> list[str]:
    """The paper's table as signs: is the interval over seeds on the paper's side of 0 (of a margin, if the claim has one)?"""
    if not r.match:
        return []
    rl, sft = r.match

    def minus(of: Callable[..., float], *args: Any) -> Callable[[int], float]:
        return lambda s: of(s, rl, *args) - of(s, sft, *args)

    def model(s: int, name: str) -> float:
        return r.change(s, rl, name, r.tasks)

    claims: list[tuple[str, Callable[[int], float], int]] = [
        ("multi-stage SFT falls below the base", lambda s: r.stages(s, sft), -1),
        ("multi-stage RL rises above the base", lambda s: r.stages(s, rl), 1),
        ("multi-stage RL is better than mixed RL", lambda s: r.stages(s, rl) - model(s, "mixed"), 1),
        ("mixed SFT rises above the base", lambda s: r.change(s, sft, "mixed", r.tasks), 1),
        ("mixed RL rises above the base", lambda s: model(s, "mixed"), 1),
        ("an SFT expert lowers other domains", lambda s: r.others(s, sft), -1),
        ("an RL expert raises other domains", lambda s: r.others(s, rl), 1),
        ("RL's deltas are shorter (RL - SFT)", minus(r.weight, 0), -1),
        (SPARSER, minus(r.weight, 1), -1),
        ("RL's deltas overlap less (cosine, RL - SFT)", minus(r.weight, 4), -1),
        ("sum, lambda 1: RL keeps more of the score (RL - SFT)", minus(r.score_kept, "sum_1"), 1),
        ("sum, lambda 1: RL keeps more of the gain (RL - SFT)", minus(r.gain_kept, "sum_1"), 1),
        ("sum, lambda 0.6: RL keeps more of the gain (RL - SFT)", minus(r.gain_kept, "sum_0.6"), 1),
        ("RL: the sum, lambda 1, is above the base", lambda s: model(s, "sum_1"), 1),
        ("RL: TIES is better than the sum, lambda 1", lambda s: model(s, "ties_1") - model(s, "sum_1"), 1),
        ("RL: the adapted merge is better than the merge", lambda s: model(s, "adapted") - model(s, "sum_0.6"), 1),
        ("RL: the adapted merge is better than multi-stage", lambda s: model(s, "adapted") - r.stages(s, rl), 1),
        ("RL: the adapted merge is better than mixed", lambda s: model(s, "adapted") - model(s, "mixed"), 1),
        (
            "batch-normalised advantages keep less of the gain than GRPO, lambda 1",
            lambda s: r.gain_kept(s, "batch", "sum_1") - r.gain_kept(s, rl, "sum_1"),
            -1,
        ),
    ]
    return _table(
        ["claim", "measured", "verdict"],
        [[c, *_judged(r, r.over_seeds(of), sign, MARGINS.get(c, 0.0))] for c, of, sign in claims],
    )


def _judged(r: Records, values: Sequence[float], sign: int, margin: float) -> tuple[str, str]:
    return r.shown(values, "+.4f" if margin else "+.3f"), verdict(values, sign, margin)


def verdict(values: Sequence[float], sign: int, margin: float = 0.0) -> str:
    """What the interval over seeds says of a claim that a difference has this ``sign``, by more than ``margin`` at least."""
    low, high = sorted(sign * x for x in mean_interval(values))  # > 0: the claim's side
    if not math.isfinite(low):
        return "one seed" if values else "not measured"
    if low > margin:
        return "reproduced"
    if high < -margin:
        return "opposite"
    return "not reproduced" if high < margin else "not resolved"
