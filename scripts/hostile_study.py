"""What a hostile quarter of a swarm does to the others: three honest nodes and one hostile, in one process.

    python scripts/hostile_study.py --seeds 5 --out docs/results/hostile.jsonl

Each run is one line of the output; runs that are in it already are not done again, so a stopped study goes on. The table
(honest nodes' held-out accuracy, paired over seeds) is printed at the end:

    python scripts/hostile_study.py --table docs/results/hostile.jsonl

What an attack costs is measured against the swarm in which the fourth node is *absent*: a node that turns hostile no longer
contributes, which it could do by leaving as well, and which no defence can undo. The swarm in which it is honest (*clean*) is
reported beside it. All problems, draws, identities and choices are functions of (arm, seed, step), so an attack of which
nothing is used leaves the others with the same weights, bit for bit, as in *absent*; that is checked, not estimated.

What the arms mean: docs/results/swarm.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from hostile_nodes import ATTACKS, MARKER, Hostile, infected, person

from coterie.config import Config, config_from_dict
from coterie.models import tiny_tasks
from coterie.run import Run
from coterie.simulate import node_config
from coterie.stats import compare_paired
from coterie.swarm.memory import MemoryHub
from coterie.swarm.node import SwarmNode
from coterie.tasks.taskset import build_tasks

HONEST, TASKS = 3, ("gcd", "count_bits", "spell_backward")
STEPS, LR, PROBLEMS = 16, 5e-4, 40
NO_DEFENCE = {"longer": 0.0, "less_likely": 0.0}
# arm -> (attack of the fourth node or None, defences on). "absent": there is no fourth node; "clean": it is honest too;
# "content" and "form": a hostile node for each of these, more of them than there are honest ones.
SEVERAL = {
    "content": ("wrong_answers", "code", "refusable", "replay", "flood"),
    "form": ("over_long", "injected", "over_long_near", "bare"),
}
ARMS: dict[str, tuple[str | None, bool]] = {
    "absent": (None, True),
    "clean": (None, True),
    "content": ("content", True),
    "form": ("form", True),
    "wrong_answers": ("wrong_answers", True),
    "code": ("code", True),
    "refusable": ("refusable", True),
    "replay": ("replay", True),
    "flood": ("flood", True),
    "over_long": ("over_long", True),
    "injected": ("injected", True),
    "over_long_near": ("over_long_near", True),
    "bare": ("bare", True),
    "absent-off": (None, False),
    "clean-off": (None, False),
    "over_long-off": ("over_long", False),
    "injected-off": ("injected", False),
    "bare-off": ("bare", False),
}


def config(run_dir: str, arm: str, seed: int, steps: int, problems: int) -> Config:
    """``problems``: held-out problems per task, 4 answers each, at the end of each of the last four eighths of the run."""
    known = tiny_tasks()
    return config_from_dict(
        {
            "run_dir": run_dir,
            "steps": steps + 1,  # never done: evaluations are the study's own
            "seed": 1000 * (seed + 1),
            "threads": 1,
            "tasks": {t: known[t].model_dump() for t in TASKS},
            "rollout": {"problems": 4, "group_size": 8, "max_new_tokens": 48},
            "optim": {"lr": LR},
            "eval": {"every": 0, "problems": problems, "samples": 4},
            "checkpoint": {"every": steps + 1},
            "tracking": {"transcripts": 0},
            # virtual time: what a busy machine takes for a check must not decide what is checked
            "swarm": {"peer_groups": 4, "collect_s": 60.0} | ({} if ARMS[arm][1] else NO_DEFENCE),
        }
    )


def run_arm(arm: str, seed: int, steps: int, problems: int, known: dict[str, float] | None = None) -> dict[str, Any]:
    """One swarm of one arm: a record of the honest nodes 0..2. Everything is a function of arm, seed and steps.

    Args:
        known: digest of weights -> held-out accuracy, where it has been measured: what the same weights score is the same.
    """
    attack, _ = ARMS[arm]
    hub = MemoryHub()
    start = time.process_time()
    known = {} if known is None else known
    accuracy: list[list[float]] = [[] for _ in range(HONEST)]
    weights: list[list[str]] = [[] for _ in range(HONEST)]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        cfg = config(folder, arm, seed, steps, problems)
        nodes = HONEST + arm.startswith("clean")
        runs = [stack.enter_context(Run(node_config(cfg, i), quiet=True, hub=hub)) for i in range(nodes)]
        kinds = SEVERAL.get(attack, (attack,)) if attack is not None else ()
        encoder, tasks = runs[0].trainer.policy.encoder, build_tasks(cfg.tasks)
        honest = frozenset(_node(r).author for r in runs)
        evil: list[Hostile] = []
        for i, kind in enumerate(kinds):
            me = person(100 * seed + i + 1)
            evil.append(Hostile(kind, hub.join(seed, me.node_id), me, tasks, encoder, honest=honest))
        for step in range(1, steps + 1):
            for run in runs:
                run.advance()
            for one in evil:
                one.turn(step - 1)
            if step > steps // 2 and step % max(1, steps // 8) == 0:
                for run, scores, digests in zip(runs, accuracy, weights, strict=False):
                    digests.append(_digest(run.trainer.policy.weights()))
                    if digests[-1] not in known:
                        known[digests[-1]] = run.trainer.evaluate().accuracy()
                    scores.append(known[digests[-1]])
        cost = {"cpu_s": round(time.process_time() - start, 1)}
        found = {"evaluations": accuracy, "weights": weights}
        return _record(arm, seed, steps, runs[:HONEST], evil) | found | cost


def _record(arm: str, seed: int, steps: int, runs: list[Run], evil: list[Hostile]) -> dict[str, Any]:
    texts, lengths = [], []
    for run in runs:
        for _ in range(2):  # two more steps' answers, from problems nobody has trained on yet
            groups = run.trainer._own_groups().groups
            texts += [t.text for g in groups for t in g.trajectories]
            lengths += [t.response_length for g in groups for t in g.trajectories]
            run.trainer.step += 1
    record: dict[str, Any] = {
        "arm": arm,
        "seed": seed,
        "steps": steps,
        "infected": infected(texts),
        "length": float(np.mean(lengths)),
        "peer_groups_used": [_used(r, None) for r in runs],
        "refused": _sum(r.trainer.node.metrics() for r in runs),
        "code_ran": Path(MARKER).exists(),
    }
    if evil:
        them = {e.identity.node_id for e in evil}
        lines = [t for r in runs for t in _node(r).troubles() if any(e.identity.name in t for e in evil)]
        record |= {
            "hostile_sent": sum(e.sent for e in evil),
            "hostile_used": [sum(_used(r, n) for n in them) for r in runs],
            "used_by_attack": {e.attack: sum(_used(r, e.identity.node_id) for r in runs) for e in evil},
            "named": [all(any(e.identity.name in t for t in _node(r).troubles()) for e in evil) for r in runs],
            "honest_named": sum(p["node"] not in them and bool(p["named"]) for r in runs for p in _node(r).peers()),
            "trouble": sorted(set(lines)),
        }
    return record


def _digest(weights: Mapping[str, torch.Tensor]) -> str:
    h = hashlib.sha256()
    for name in sorted(weights):
        h.update(weights[name].contiguous().numpy().tobytes())
    return h.hexdigest()[:16]


def _node(run: Run) -> SwarmNode:
    assert isinstance(run.trainer.node, SwarmNode)
    return run.trainer.node


def _used(run: Run, author: str | None) -> int:
    return sum(a.used for n, a in _node(run).ledger.authors.items() if author in (None, n))


def _sum(metrics: Any) -> dict[str, float]:
    out: dict[str, float] = {}
    for row in metrics:
        for key, value in row.items():
            if key.startswith("swarm/refused/"):
                name = key.rsplit("/", 1)[1]
                out[name] = out.get(name, 0.0) + value
    return out


def accuracy(record: dict[str, Any]) -> float:
    """Mean over the honest nodes and the run's evaluations."""
    return float(np.mean(record["evaluations"]))


def table(records: list[dict[str, Any]]) -> str:
    """Markdown. Differences are honest nodes' mean held-out accuracy minus another arm's, in points, paired over seeds; "same
    weights": seeds in which all honest nodes have, at every evaluation, bit for bit the weights that they have where the
    fourth is absent."""
    of = {a: {r["seed"]: r for r in records if r["arm"] == a} for a in ARMS}
    titles = (
        "hostile", "held-out", "against absent (points)", "against clean (points)", "same weights as absent",
        "its groups used", "of all peers'", "nodes that named it", "its text in answers", "length", "seeds",
    )  # fmt: skip
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for arm, rows in of.items():
        if not rows:
            continue
        off = "-off" if arm.endswith("-off") else ""
        absent, clean = of["absent" + off], of["clean" + off]
        same = [s for s in rows.keys() & absent.keys() if rows[s]["weights"] == absent[s]["weights"]]
        equal = f"{len(same)} of {len(rows.keys() & absent.keys())}" if ARMS[arm][0] else ""
        used = sum(sum(r.get("hostile_used", [])) for r in rows.values())
        total = sum(sum(r["peer_groups_used"]) for r in rows.values())
        named = sum(sum(r.get("named", [])) for r in rows.values())
        text, length = (np.mean([r[k] for r in rows.values()]) for k in ("infected", "length"))
        who = f"{named} of {HONEST * len(rows)}" if ARMS[arm][0] else ""
        mean = np.mean([accuracy(r) for r in rows.values()])
        cells = [arm, f"{mean:.3f}", _against(rows, absent), _against(rows, clean), equal, str(used), str(total), who]
        lines.append(f"| {' | '.join(cells)} | {text:.0%} | {length:.1f} | {len(rows)} |")
    return "\n".join(lines)


def _against(rows: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]]) -> str:
    """Difference in points with its 95% interval (t over seeds)."""
    pairs = sorted(rows.keys() & base.keys())
    if rows is base or len(pairs) < 2:
        return ""
    ours, theirs = ([accuracy(r[s]) for s in pairs] for r in (rows, base))
    if ours == theirs:
        return "0"
    c = compare_paired(ours, theirs)
    return f"{100 * c.difference:+.1f} ({100 * c.low:+.1f} to {100 * c.high:+.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="5", help="a number N (seeds 0 .. N-1), or a list such as 3,4,")
    parser.add_argument("--attacks", default=",".join(ARMS), help="arms, comma-separated")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--problems", type=int, default=PROBLEMS, help="held-out problems per task")
    parser.add_argument("--out", type=Path, default=Path("runs/hostile.jsonl"))
    parser.add_argument("--table", type=Path, help="only print the table of this file")
    args = parser.parse_args()
    file = args.table or args.out
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if args.table is None:
        arms = args.attacks.split(",")
        if unknown := [a for a in arms if a not in ARMS]:
            parser.error(f"unknown arm {unknown[0]}; there are {', '.join(ARMS)}")
        file.parent.mkdir(parents=True, exist_ok=True)
        seeds = [int(s) for s in args.seeds.split(",") if s] if "," in args.seeds else range(int(args.seeds))
        for seed in seeds:
            for arm in arms:
                if any(r["arm"] == arm and r["seed"] == seed and r["steps"] == args.steps for r in done):
                    continue
                same = [r for r in done if r["seed"] == seed and r["problems"] == args.problems]
                pairs = ((r["weights"][i], r["evaluations"][i]) for r in same for i in range(HONEST))
                known = {d: a for digests, scores in pairs for d, a in zip(digests, scores, strict=True)}
                done.append(run_arm(arm, seed, args.steps, args.problems, known) | {"problems": args.problems})
                with open(file, "a") as f:
                    f.write(json.dumps(done[-1]) + "\n")
                print(f"seed {seed} {arm}: {accuracy(done[-1]):.3f} ({done[-1]['cpu_s']} s)", flush=True)
    print(table(done))


if __name__ == "__main__":
    assert ATTACKS.keys() | SEVERAL.keys() >= {a for a, _ in ARMS.values() if a}
    main()
