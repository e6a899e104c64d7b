"""Calibration of the merge verdict on built pairs of `tiny` experts: conflicting, helpful, unrelated.

For each pair number a task A and a task B of another domain are taken, and four experts are trained from the base: A, A
with the reward turned around (*conflict*: same prompts, opposite reward), A on other problems (*helpful*), and B
(*unrelated*). Each pair is merged by sum, with lambda 1 and 0.5, and its gain retention measured on held-out problems. Every
predictor is then judged twice: does it separate conflict from the rest (AUC), and does it rank the pairs by the gain they keep
(Spearman)?
Predictors see the probe problems and a set of held-out problems that the retention is *not* measured on.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats as scipy_stats
from torch import Tensor

from coterie.config import Config, EvalConfig, RolloutConfig
from coterie.evaluation import evaluate
from coterie.merging.compatibility import decide
from coterie.merging.probe import ProbeSettings, Scores, collect
from coterie.merging.probe_figures import figures
from coterie.models import tiny_tasks
from coterie.parallel.evidence import Side, evidence
from coterie.parallel.scores import rates, retention
from coterie.rng import derive
from coterie.rollout import training_sampling
from coterie.run import build
from coterie.rundir import write_atomic
from coterie.tasks.scoring import Score, Scorer
from coterie.trainer import Trainer
from coterie.types import Problem

PAIRS = (
    ("count_bits", "products"),
    ("gcd", "spell_backward"),
    ("products", "letter_counting"),
    ("spell_backward", "count_bits"),
    ("letter_counting", "chain_sum"),
    ("chain_sum", "gcd"),
)
KINDS = ("conflict", "helpful", "unrelated")
LAMBDAS = (1.0, 0.5)
Rates = dict[str, list[float]]


class Negated:
    """A scorer that pays wrong answers and not right ones."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    def submit(self, problem: Problem, text: str) -> Future[Score]:
        out: Future[Score] = Future()

        def turn(done: Future[Score]) -> None:
            if (error := done.exception()) is not None:
                out.set_exception(error)
                return
            score = done.result()
            out.set_result(replace(score, reward=None if score.reward is None else 1 - score.reward))

        self._scorer.submit(problem, text).add_done_callback(turn)
        return out


@dataclass(frozen=True)
class Member:
    """One expert: its task, whether wrong answers are paid, its stream of problems."""

    task: str
    negated: bool
    seed: int


class Workshop:
    """Trains, merges and evaluates `tiny` experts in this process."""

    def __init__(self, parts: Trainer, steps: int, problems: int) -> None:
        self.parts, self.steps = parts, steps
        self.base = {n: w.clone() for n, w in parts.policy.weights().items()}
        found = parts.tasks.eval_problems(2 * problems)
        self.seen = {t: ps[:problems] for t, ps in found.items()}  # for predictors
        self.kept = {t: ps[problems:] for t, ps in found.items()}  # for what is predicted

    def delta(self, m: Member) -> dict[str, Tensor]:
        """Train an expert from the base; returns expert minus base."""
        p = self.parts
        self._set({})
        p.policy.load_optimizer_state({})
        one = p.cfg.model_copy(update={"seed": m.seed, "tasks": {m.task: p.cfg.tasks[m.task]}})
        scorer: Any = Negated(p.scorer) if m.negated else p.scorer
        tasks = type(p.tasks)({m.task: p.tasks.tasks[m.task]}, {m.task: 1.0})
        trainer = Trainer(one, p.policy, p.engine, tasks, scorer)
        for _ in range(self.steps):
            trainer.train_step()
        return {n: w - self.base[n] for n, w in p.policy.weights().items()}

    def rates(self, deltas: Sequence[dict[str, Tensor]], tasks: Sequence[str], kept: bool, lam: float = 1.0) -> Rates:
        """Shares of right answers of base + lam * sum of deltas, per task and problem."""
        self._set({n: lam * sum(d[n] for d in deltas) for n in self.base} if deltas else {})
        problems = {t: (self.kept if kept else self.seen)[t] for t in tasks}
        p = self.parts
        sampling = training_sampling(p.cfg.rollout)
        done = evaluate(p.engine, p.policy.encoder, problems, p.cfg.eval.samples, sampling, p.scorer, seed=0)
        return rates(done.to_json([1]))

    def probe(self, tasks: Sequence[str], problems: int, seed: int) -> Scores:
        p = self.parts
        self._set({})
        some = type(p.tasks)({t: p.tasks.tasks[t] for t in tasks}, dict.fromkeys(tasks, 1.0))
        return collect(p.policy, p.engine, some, p.scorer, ProbeSettings(problems=problems, seed=seed, sketch=1 << 16))

    def _set(self, delta: dict[str, Any]) -> None:
        self.parts.policy.load_weights({n: w + delta[n] if delta else w for n, w in self.base.items()})


def run(
    pairs: int = 20,
    steps: int = 40,
    problems: int = 48,
    samples: int = 4,
    probe: int = 32,
    seed: int = 0,
    log: str = "",
) -> dict[str, Any]:
    """``pairs`` per kind. ``problems`` held-out problems per task, once for predictors and once for the outcome; ``probe``
    problems per task for gradients. ``log``: a JSONL file to which finished pairs are appended, and from which a stopped
    run goes on."""
    file = Path(log) if log else None
    rows = _logged(file) if file is not None and file.exists() else []
    done = {r["pair"] for r in rows}
    cfg = Config(
        tasks={t: tiny_tasks()[t] for t in sorted({t for pair in PAIRS for t in pair})},
        rollout=RolloutConfig(problems=8, group_size=8, max_new_tokens=64),
        eval=EvalConfig(problems=problems, samples=samples),
        threads=torch.get_num_threads(),
    )
    with build(cfg) as parts:
        shop = Workshop(parts, steps, problems)
        for n in range(pairs):
            if n in done:
                continue
            rows += _one(shop, n, probe, seed)
            if file is not None:
                write_atomic(file, "".join(json.dumps(r) + "\n" for r in rows))
    settings = {"pairs": pairs, "steps": steps, "problems": problems, "samples": samples, "probe": probe, "seed": seed}
    return {"settings": settings, **judge(rows), "rows": rows}


def _logged(file: Path) -> list[dict[str, Any]]:
    """Rows of numbers whose three pairs are all there; a line that a kill cut off is left out."""
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    whole = {n for n, count in Counter(r["pair"] for r in rows).items() if count == len(KINDS)}
    return [r for r in rows if r["pair"] in whole]


def _one(shop: Workshop, n: int, probe: int, seed: int) -> list[dict[str, Any]]:
    """The three pairs of one number."""
    began = time.perf_counter()
    a, b = PAIRS[n % len(PAIRS)]
    key = derive(seed, "verdict", n) % 2**31
    first = Member(a, False, key)
    second = {
        "conflict": Member(a, True, key + 1),
        "helpful": Member(a, False, key + 2),
        "unrelated": Member(b, False, key + 3),
    }
    deltas = {m: shop.delta(m) for m in (first, *second.values())}
    scores = shop.probe([a, b], 2 * probe, key)
    seen = {m: shop.rates([d], [a, b], kept=False) for m, d in deltas.items()}
    base = {kept: shop.rates([], [a, b], kept=kept) for kept in (False, True)}
    rows = []
    for kind, m in second.items():
        merged = {lam: shop.rates([deltas[first], deltas[m]], [a, b], kept=True, lam=lam) for lam in LAMBDAS}
        alone = {x: shop.rates([deltas[x]], [a, b], kept=True) for x in (first, m)}
        kept = {
            lam: [retention(_turned(base[True], x), _turned(alone[x], x), _turned(r, x), [x.task]) for x in (first, m)]
            for lam, r in merged.items()
        }
        found = figures(halves(scores, kind), "mean")
        rows.append(
            {
                "pair": n,
                "kind": kind,
                "members": [asdict(first), asdict(m)],
                "gain": [k["expert_gain"] for k in kept[1.0]],
                "merged_gain": {f"{lam:g}": [k["score"] - k["base"] for k in ks] for lam, ks in kept.items()},
                "retention": {f"{lam:g}": [k["gain_retention"] for k in ks] for lam, ks in kept.items()},
                **_predictors(base[False], seen, first, m, found, deltas[first], deltas[m]),
                "seconds": round((time.perf_counter() - began) / 3, 1),
            }
        )
    return rows


def _turned(r: Rates, m: Member) -> Rates:
    """Rates in the member's own reward."""
    return {t: [1 - x for x in xs] for t, xs in r.items()} if m.negated else r


def halves(scores: Scores, kind: str) -> Scores:
    """The probe of one built pair: the first half of A's problems against A's other half (negated or not), or against B."""
    problems = np.unique(scores.group[scores.task == 0])
    half = set(problems[: len(problems) // 2].tolist())
    first = np.array([g in half for g in scores.group])
    other = (scores.task == 1) if kind == "unrelated" else (scores.task == 0) & ~first
    rows = np.flatnonzero(first | other)
    task = np.where(first[rows], 0, 1)
    reward = scores.reward[rows]
    return replace(
        scores,
        tasks=("first", "second"),
        task=task,
        group=scores.group[rows],
        reward=np.where(task == 1, 1 - reward, reward) if kind == "conflict" else reward,
        length=scores.length[rows],
        entropy=scores.entropy[rows],
        concentration=scores.concentration[rows],
        distinct=np.ones(2),
        gram=scores.gram[np.ix_(rows, rows)],
        reference_norm=(None, None),
    )


def _predictors(
    base: Rates, seen: dict[Member, Rates], a: Member, b: Member, found: dict[str, Any], da: Any, db: Any
) -> dict[str, Any]:
    """What is known before merging, and the verdict it gives."""
    sides = [Side(_turned(base, x), _turned(seen[x], x), _turned(seen[y], x), [x.task]) for x, y in ((a, b), (b, a))]
    known = evidence(("first", "second"), (sides[0], sides[1]), found)
    assert known.scores is not None
    pair = found["pairs"][0]
    dot = sum(float((da[n].double() * db[n].double()).sum()) for n in da)
    norms = [sum(float(d[n].double().square().sum()) for n in d) ** 0.5 for d in (da, db)]
    return {
        "verdict": asdict(decide(known)),
        "resolved": known.overlap is not None,
        "predictors": {
            "worst transfer": min(known.scores.transfer),
            "raw gradient cosine": pair["raw_cosine"],
            "disattenuated cosine": pair["cosine"],
            "delta cosine": dot / (norms[0] * norms[1]) if all(norms) else None,
        },
    }


def judge(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Per predictor: AUC of conflict against the rest, and Spearman correlation with the gain kept. Per kind: the verdicts.

    The gain kept by a pair is the smaller of its two members' (merged gain / expert gain), over pairs whose experts both
    gained; which pairs that leaves is stated.
    """
    predictors: dict[str, Any] = {}
    for name in rows[0]["predictors"] if rows else ():
        known = [r for r in rows if r["predictors"][name] is not None]
        value = [r["predictors"][name] for r in known]
        predictors[name] = {
            "auc_conflict_lower": auc(
                [v for v, r in zip(value, known, strict=True) if r["kind"] != "conflict"],
                [v for v, r in zip(value, known, strict=True) if r["kind"] == "conflict"],
            ),
            "gain_kept": {f"{lam:g}": _ranks(known, value, f"{lam:g}") for lam in LAMBDAS},
            "known": len(known),
        }
    lams = [f"{lam:g}" for lam in LAMBDAS]
    kept = {
        lam: {k: [x for r in rows if r["kind"] == k and (x := _kept(r, lam)) is not None] for k in KINDS}
        for lam in lams
    }
    return {
        "predictors": predictors,
        "verdicts": {k: dict(Counter(r["verdict"]["outcome"] for r in rows if r["kind"] == k)) for k in KINDS},
        "least_gain_kept": {
            lam: {k: (float(np.mean(v)) if v else None) for k, v in of.items()} for lam, of in kept.items()
        },
        "pairs_whose_experts_both_gained": {k: len(v) for k, v in kept["1"].items()},
    }


def _kept(row: dict[str, Any], lam: str) -> float | None:
    return None if None in row["retention"][lam] else min(row["retention"][lam])


def _ranks(rows: Sequence[dict[str, Any]], value: Sequence[float], lam: str) -> dict[str, Any]:
    both = [(v, k) for v, r in zip(value, rows, strict=True) if (k := _kept(r, lam)) is not None]
    x, y = [v for v, _ in both], [k for _, k in both]
    if len(both) < 4 or len(set(x)) < 2 or len(set(y)) < 2:
        return {"spearman": None, "p": None, "pairs": len(both)}
    found = scipy_stats.spearmanr(x, y)
    return {"spearman": float(found.statistic), "p": float(found.pvalue), "pairs": len(both)}


def auc(high: Sequence[float], low: Sequence[float]) -> float | None:
    """Chance that a value of ``high`` exceeds one of ``low`` (ties count half)."""
    if not high or not low:
        return None
    wins = sum((h > x) + 0.5 * (h == x) for h in high for x in low)
    return wins / (len(high) * len(low))
