"""What a hostile quarter of a swarm does to the others: three honest nodes and one hostile, in one process.

    python scripts/hostile_study.py --seeds 5 --out docs/results/hostile.jsonl

Each run is one line of the output; runs that are in it already are not done again, so a stopped study goes on. The table
(honest nodes' held-out accuracy against a clean swarm, paired over seeds) is printed at the end:

    python scripts/hostile_study.py --table docs/results/hostile.jsonl

What the arms mean: docs/results/swarm.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

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
DEFENCE = {"likelihood_low": -3.0, "max_tokens": 40}
# arm -> (attack of the fourth node or None, defences). "clean": it is honest too; "absent": there is none.
ARMS: dict[str, tuple[str | None, bool]] = {
    "clean": (None, False),
    "over_long": ("over_long", False),
    "injected": ("injected", False),
    "over_long+defence": ("over_long", True),
    "injected+defence": ("injected", True),
    "wrong_answers": ("wrong_answers", False),
    "flood": ("flood", False),
    "refusable": ("refusable", False),
    "replay": ("replay", False),
    "code": ("code", False),
    "clean+defence": (None, True),
    "bare": ("bare", False),
    "absent": (None, False),
}


def config(run_dir: str, arm: str, seed: int, steps: int, problems: int) -> Config:
    """``problems``: held-out problems per task, 4 answers each, at the start and the end."""
    known = tiny_tasks()
    return config_from_dict(
        {
            "run_dir": run_dir,
            "steps": steps,
            "seed": 1000 * (seed + 1),
            "threads": 1,
            "tasks": {t: known[t].model_dump() for t in TASKS},
            "rollout": {"problems": 4, "group_size": 8, "max_new_tokens": 48},
            "optim": {"lr": 5e-4},
            "eval": {"every": 0, "problems": problems, "samples": 4},
            "checkpoint": {"every": steps},
            "tracking": {"transcripts": 0},
            # virtual time: what a busy machine takes for a check must not decide what is checked
            "swarm": {"peer_groups": 4, "collect_s": 60.0} | (DEFENCE if ARMS[arm][1] else {}),
        }
    )


def run_arm(arm: str, seed: int, steps: int, problems: int) -> dict[str, Any]:
    """One swarm of one arm: a record of the honest nodes 0..2."""
    attack, _ = ARMS[arm]
    hub = MemoryHub()
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        cfg = config(folder, arm, seed, steps, problems)
        nodes = HONEST + arm.startswith("clean")
        runs = [stack.enter_context(Run(node_config(cfg, i), quiet=True, hub=hub)) for i in range(nodes)]
        evil: Hostile | None = None
        if attack is not None:
            encoder = runs[0].trainer.policy.encoder
            evil = Hostile(attack, hub.join(seed), person(seed + 1), build_tasks(cfg.tasks), encoder)
        for step in range(steps):
            for run in runs:
                run.advance()
            if evil is not None:
                evil.turn(step)
        return _record(arm, seed, steps, runs[:HONEST], evil) | {"cpu_s": round(time.process_time() - start, 1)}


def _record(arm: str, seed: int, steps: int, runs: list[Run], evil: Hostile | None) -> dict[str, Any]:
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
        "accuracy": [r.metrics["eval/accuracy"] for r in runs],
        "infected": infected(texts),
        "length": float(np.mean(lengths)),
        "peer_groups_used": [_used(r, None) for r in runs],
        "refused": _sum(r.trainer.node.metrics() for r in runs),
        "code_ran": Path(MARKER).exists(),
    }
    if evil is not None:
        me = evil.identity.node_id
        rows = [p for r in runs for p in _node(r).peers() if p["node"] == me]
        record |= {
            "hostile_sent": evil.sent,
            "hostile_used": [_used(r, me) for r in runs],
            "quarantines": [_node(r).ledger.authors[me].bars if me in _node(r).ledger.authors else 0 for r in runs],
            "named": sum(evil.identity.name in _node(r).summary() for r in runs),
            "faults": {
                k: sum(p["faults"].get(k, 0) for p in rows) for k in sorted({k for p in rows for k in p["faults"]})
            },
        }
    return record


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


def table(records: list[dict[str, Any]]) -> str:
    """Markdown. Differences are honest nodes' mean held-out accuracy minus the clean swarm's, in points, paired over seeds."""
    of = {a: {r["seed"]: r for r in records if r["arm"] == a} for a in ARMS}
    titles = (
        "fourth node", "held-out", "against clean (points)", "95% interval", "its groups used", "of all peers'",
        "quarantines", "answers with its text", "length", "seeds",
    )  # fmt: skip
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for arm, rows in of.items():
        if not rows:
            continue
        mean = float(np.mean([r["accuracy"] for r in rows.values()]))
        pairs = sorted(rows.keys() & of["clean"].keys())
        shown = ["", ""]
        if arm != "clean" and len(pairs) > 1:
            c = compare_paired(*([float(np.mean(of[a][s]["accuracy"])) for s in pairs] for a in (arm, "clean")))
            shown = [f"{100 * c.difference:+.1f}", f"{100 * c.low:+.1f} to {100 * c.high:+.1f}"]
        used = sum(sum(r.get("hostile_used", [])) for r in rows.values())
        total = sum(sum(r["peer_groups_used"]) for r in rows.values())
        bars = np.mean([np.mean(r.get("quarantines", [0])) for r in rows.values()])
        text, length = (np.mean([r[k] for r in rows.values()]) for k in ("infected", "length"))
        cells = [arm, f"{mean:.3f}", *shown, f"{used}", f"{total}", f"{bars:.1f}", f"{text:.0%}"]
        lines.append(f"| {' | '.join(cells)} | {length:.1f} | {len(rows)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="5", help="a number N (seeds 0 .. N-1), or a list such as 3,4,")
    parser.add_argument("--attacks", default=",".join(ARMS), help="arms, comma-separated")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--problems", type=int, default=40, help="held-out problems per task")
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
                done.append(run_arm(arm, seed, args.steps, args.problems))
                with open(file, "a") as f:
                    f.write(json.dumps(done[-1]) + "\n")
                print(f"seed {seed} {arm}: {np.mean(done[-1]['accuracy']):.3f} ({done[-1]['cpu_s']} s)", flush=True)
    print(table(done))


if __name__ == "__main__":
    assert ATTACKS.keys() >= {a for a, _ in ARMS.values() if a}
    main()
