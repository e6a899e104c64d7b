"""The swarm inside the real loop."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coterie.config import Config, TaskConfig, config_from_dict
from coterie.errors import UserError
from coterie.run import Run
from coterie.simulate import simulate
from coterie.swarm.controller import AdaptiveShare
from coterie.swarm.frozen import contribute_rollouts
from coterie.swarm.identity import peek_identity
from coterie.swarm.likelihood import own_logprobs
from coterie.swarm.memory import MemoryHub
from coterie.swarm.yardstick import better
from coterie.tasks.taskset import build_tasks


def config(run_dir: Path, **swarm: Any) -> Config:
    return config_from_dict(
        {
            "run_dir": str(run_dir),
            "steps": 2,
            "seed": 3,
            "threads": 1,
            "tasks": {"count_bits": {"params": {"min_n": 1, "max_n": 1023}}},
            "rollout": {"problems": 4, "group_size": 6, "max_new_tokens": 32},
            "eval": {"every": 0, "problems": 1, "samples": 1},
            "swarm": {"share": "all"} | swarm,
        }
    )


def weights(cfg: Config) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Weights after the run, and its last metrics; fails if the run has not changed the weights."""
    with Run(cfg, quiet=True) as run:
        before = {k: v.clone() for k, v in run.trainer.policy.weights().items()}
        while not run.done:
            run.advance()
        after = {k: v.clone() for k, v in run.trainer.policy.weights().items()}
        assert any(not torch.equal(before[k], after[k]) for k in after)
        return after, run.metrics


@pytest.mark.parametrize("peer_loss", ["positive", "surrogate"])
def test_own_log_probs_of_peers_text_equal_those_at_sampling(tmp_path: Path, peer_loss: str) -> None:
    """Groups of a node with the same weights: the yardstick's view of what the loss would use is the author's own."""
    cfg = config(tmp_path / "a")
    cfg = cfg.model_copy(update={"loss": cfg.loss.model_copy(update={"peer_loss": peer_loss})})
    with Run(cfg, quiet=True) as run:
        groups = run.trainer._own_groups().groups
        found = own_logprobs(run.trainer.policy, cfg)(groups)
    assert any(g.informative for g in groups)
    for group, rows in zip(groups, found, strict=True):
        used = better(group) if peer_loss == "positive" else group.trajectories
        for t, row in zip(used, rows, strict=True):
            np.testing.assert_allclose(row, t.behavior_logprobs[t.prompt_length :], atol=1e-4)


def test_a_node_that_asks_for_no_peer_groups_trains_as_if_alone(tmp_path: Path) -> None:
    alone, _ = weights(config(tmp_path / "alone"))
    path = str(tmp_path / "swarm.sqlite")
    member, metrics = weights(config(tmp_path / "member", exchange="local", path=path, peer_groups=0))
    assert metrics["swarm/published"] == 8
    assert alone.keys() == member.keys() and all(torch.equal(alone[k], member[k]) for k in alone)
    assert (
        metrics["swarm/publish_s"] < 0.2 * metrics["time/step_s"]
    )  # 1% in docs/results/swarm.md; this machine may be busy


def test_sw09_a_node_that_hears_nobody_trains_as_if_alone(tmp_path: Path) -> None:
    alone, _ = weights(config(tmp_path / "alone"))
    path = str(tmp_path / "swarm.sqlite")
    lone, metrics = weights(config(tmp_path / "lone", exchange="local", path=path, peer_groups=4))
    assert metrics["swarm/state"] == 0 and metrics["swarm/wanted"] == 4
    assert all(torch.equal(alone[k], lone[k]) for k in alone)


def test_a_run_that_was_stopped_goes_on_with_the_groups_that_waited(tmp_path: Path) -> None:
    """What the pool held is in the checkpoint: not heard again (the file is read from its end), not lost, not used twice."""
    path, said = str(tmp_path / "swarm.sqlite"), list[str]()
    cfg = config(tmp_path / "node", exchange="local", path=path, peer_groups=2, selection="uniform")
    cfg = cfg.model_copy(update={"steps": 4})
    with Run(cfg, quiet=True) as run:
        contribute_rollouts(config(tmp_path / "frozen", exchange="local", path=path), 0.0, said.append)
        run.advance()
        waiting = set(run.trainer.node.pool.entries)
        assert run.metrics["update/peer_groups"] == 2 and len(waiting) >= 4
    with Run(cfg, quiet=True) as run:
        assert run.trainer.step == 1 and set(run.trainer.node.pool.entries) == waiting
        run.advance()
        run.advance()
        assert run.metrics["swarm/received"] == 0 and run.metrics["update/peer_groups"] == 2
        assert set(run.trainer.node.pool.entries) < waiting
        assert sum(p["used"] for p in run.trainer.node.peers()) == 6  # of before the stop and after, each once


def test_a_simulation_can_be_repeated_bit_for_bit(tmp_path: Path) -> None:
    """Identities, times and choices are functions of the seed, wherever and whenever the nodes run."""
    found = []
    for name in ("first", "again"):
        now: list[dict[str, torch.Tensor]] = []

        def keep(step: int, runs: list[Run], now: list[dict[str, torch.Tensor]] = now) -> None:
            now[:] = [{k: v.clone() for k, v in r.trainer.policy.weights().items()} for r in runs]

        done = simulate(config(tmp_path / name, exchange="memory", peer_groups=2), 2, keep)
        assert sum(s.metrics["update/peer_groups"] for s in done) >= 1
        found.append(now)
    for a, b in zip(*found, strict=True):
        assert all(torch.equal(a[k], b[k]) for k in a)


def test_the_adaptive_share_follows_the_evaluations_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first evaluation, before any training, is what later ones are compared with."""
    seen: list[tuple[float, float]] = []
    feedback = AdaptiveShare.feedback
    monkeypatch.setattr(AdaptiveShare, "feedback", lambda self, a, kl: (seen.append((a, kl)), feedback(self, a, kl))[1])
    path = str(tmp_path / "swarm.sqlite")
    cfg = config(tmp_path / "a", exchange="local", path=path, ratio="adaptive")
    with Run(cfg.model_copy(update={"eval": cfg.eval.model_copy(update={"every": 1})}), quiet=True) as run:
        run.begin()
        start = run.metrics["eval/accuracy"]
        run.advance()
        assert seen[0] == (start, 0.0)
        assert seen[1:] == [(run.metrics["eval/accuracy"], run.metrics["policy/kl_to_start"])]


def test_a_simulation_writes_no_clock_into_its_metrics(tmp_path: Path) -> None:
    hub = MemoryHub()
    first, second = (Run(config(tmp_path / name, exchange="memory"), quiet=True, hub=hub) for name in "ab")
    with first as a, second as b:
        a.advance()
        b.advance()
        assert b.metrics["swarm/received"] > 0 and b.metrics["swarm/clock_skew_s"] == 0.0


def test_a_frozen_model_contributes_and_a_node_trains_on_what_it_wrote(tmp_path: Path) -> None:
    """Through the file: the node's batch holds the contributor's groups; the contributor leaves nothing but its key."""
    path, said = str(tmp_path / "swarm.sqlite"), list[str]()
    with Run(config(tmp_path / "node", exchange="local", path=path), quiet=True) as run:
        giver = config(tmp_path / "frozen", exchange="local", path=path)
        assert contribute_rollouts(giver, 0.0, said.append) == 8
        assert contribute_rollouts(giver.model_copy(update={"steps": 1}), 0.0, said.append) == 4  # new problems
        me = peek_identity(tmp_path / "frozen" / "identity.pem").node_id
        run.advance()
        assert run.metrics["swarm/accepted"] == 12 and run.metrics["update/peer_groups"] >= 1
        assert {p["node"]: p["used"] for p in run.trainer.node.peers()} == {me: run.metrics["update/peer_groups"]}
    assert said[0].startswith("step 1: sharing")
    assert {p.name for p in (tmp_path / "frozen").iterdir()} == {"identity.pem", "identity.pem.session"}


def test_a_node_learns_from_a_dataset_that_only_a_trusted_peer_has(tmp_path: Path) -> None:
    source = build_tasks(config(tmp_path).tasks)
    lines = [
        {"prompt": p.metadata["question"], "answer": p.metadata["entry"]["answer"], "verifier": "numeric"}
        for p in source.draw("lines", 0, 40)
    ]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shared = {"exchange": "local", "path": str(tmp_path / "swarm.sqlite")}
    owner = config(tmp_path / "owner", send_problems=True, **shared)
    suffix = source.tasks["count_bits"].suffix
    mine = {"mine": TaskConfig(kind="jsonl", path=str(tmp_path / "mine.jsonl"), suffix=suffix)}
    taken = {}
    with ExitStack() as stack:
        giver = stack.enter_context(Run(owner.model_copy(update={"tasks": mine}), quiet=True))
        trust = {"believer": [giver.trainer.node.author], "doubter": []}
        takers = {
            name: stack.enter_context(Run(config(tmp_path / name, trust=ids, **shared), quiet=True))
            for name, ids in trust.items()
        }
        giver.advance()
        for name, run in takers.items():
            run.advance()
            taken[name] = run.metrics["update/peer_groups"], run.metrics.get("swarm/refused/other_task", 0)
    assert taken["believer"][0] > 0 and taken["believer"][1] == 0
    assert taken["doubter"][1] > 0


def test_a_contributor_needs_an_exchange(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="swarm contribute needs"):
        contribute_rollouts(config(tmp_path / "x"), 0.0, print)
