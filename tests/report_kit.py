"""Run directories as training leaves them, for the tests of reports."""

from __future__ import annotations

import json
from pathlib import Path


def run_of(folder: Path, steps: int = 60) -> Path:
    """A run directory with every chart of a report, long names, and a transcript with a helper's words."""
    folder.mkdir(parents=True)
    rows = []
    for step in range(steps + 1):
        row: dict[str, float] = {"step": step}
        if step % 20 == 0:
            share = 0.4 + 0.3 * step / steps
            row |= {"eval/accuracy": share, "policy/kl_to_start": 0.001 * step}
            row |= {"eval_tagged/accuracy": share, "eval_helped/accuracy": share + 0.1, "eval_helped/gap": 0.1}
            for task in ("intermediate_integration", "gcd"):
                row |= {f"eval/{task}/{k}": share + d for k, d in (("accuracy", 0), ("low", -0.1), ("high", 0.1))}
                row |= {f"eval/{task}/length": 21.5, f"eval/{task}/truncated": 0.01}
        if step:
            row |= {"own/reward": 0.3 + 0.005 * step, "own/informative": 0.9, "own/solved": 0.1, "own/length": 20.0}
            row |= {"own/length_ended": 18.0, "own/truncated": 0.02, "loss/own/entropy": 0.8 - 0.005 * step}
            row |= {"policy/grad_norm": 0.5, "time/tokens_per_s": 4000.0, "policy/skipped": 0.0, "peer/reward": 0.4}
            row |= {"policy/nothing_to_train": 0.0, "update/own_groups": 4.0, "update/peer_groups": 4.0}
            row |= {"swarm/state": 2.0 if step > 5 else 0.0, "swarm/staleness": 1.5, "swarm/used_groups": 4.0}
            row |= {"swarm/wanted": 5.0, "swarm/refused": 3.0 * step, "swarm/refused/signature": 3.0 * step}
            row |= {"helpers/reward/solo": 0.4, "helpers/reward/helped": 0.5, "helpers/consults": 0.2}
            row |= {"tokens/generated": 900.0, "time/step_s": 0.4}
        rows.append(row)
    segments = [{"source": "policy", "text": "3+4=7<verify>7?</verify>" * 9}, {"source": "helper", "text": "yes " * 40}]
    consult = {"role": "verify", "helper": "h", "query": "7?", "outcome": "ok", "latency_s": 0.1, "tokens": 40}
    told = {"step": 1, "task": "gcd", "problem": "reasoning_gym/gcd#" + "1" * 90, "prompt": "3 + 4 = " * 30, "reward": 1.0,
            "segments": segments, "group_rewards": [1.0, None], "stop_reason": "eos", "consults": [consult]}  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "trajectories.jsonl").write_text(json.dumps(told) + "\n")
    (folder / "config.toml").write_text("steps = 60\n" + "# " + "x" * 300 + "\n")
    (folder / "DONE").touch()
    return folder
