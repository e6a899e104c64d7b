"""Simulated swarms for experiments: own samples in peers' place, common problems, nodes that differ, guests; curves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from coterie.config import config_from_dict
from coterie.curves import at_same, curve, value_at
from coterie.errors import UserError
from coterie.experiment import load_experiment, run_experiment
from coterie.importing import load_function
from coterie.run import Run
from coterie.rundir import read_jsonl
from coterie.simulate import Simulation, merged, simulate

GUEST = """
from coterie.swarm.exchange import Request
class Listener:
    def __init__(self, hub, number):
        self.exchange, self.number = hub.join(number), number
    def turn(self, step):
        heard = len(self.exchange.collect(Request(64, 1 << 20)))
        with open("heard.txt", "a") as f:
            f.write(f"{self.number} {step} {heard}\\n")
def listener(hub, trainer, number):
    return Listener(hub, number)
"""


def config(tmp_path: Path, **changes: Any) -> Any:
    base = {
        "run_dir": str(tmp_path / "swarm"),
        "steps": 2,
        "threads": 1,
        "tasks": {
            "gcd": {"params": {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 99}},
            "letter_counting": {"params": {"min_words": 2, "max_words": 3}},
        },
        "rollout": {"problems": 2, "group_size": 4, "max_new_tokens": 24},
        "eval": {"every": 0, "problems": 1, "samples": 1},
        "swarm": {"peer_groups": 2, "collect_s": 60.0},
    }
    return config_from_dict(base | changes)


def logs(tmp_path: Path, nodes: int) -> list[list[dict[str, Any]]]:
    return [list(read_jsonl(tmp_path / "swarm" / f"node_{i}" / "metrics.jsonl")) for i in range(nodes)]


def problems_seen(cfg: Any, simulation: Simulation, nodes: int) -> list[list[str]]:
    """Ids of the problems that each node rolled out in its first step."""
    seen: list[list[str]] = []

    def look(step: int, runs: list[Run]) -> None:
        if step == 0:
            seen.extend([p.id for p in r.trainer.tasks.draw(str(r.cfg.seed), 0, 4)] for r in runs)

    simulate(cfg, nodes, look, simulation)
    return seen


def test_a_guest_that_cannot_be_made_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.py"):
        simulate(config(tmp_path), 2, simulation=Simulation(guests={"nowhere.py:f": 1}))
    assert not (tmp_path / "swarm").exists()


def test_own_samples_stand_for_peers_and_are_counted(tmp_path: Path) -> None:
    simulate(config(tmp_path), 2, simulation=Simulation(peers="self"))
    for log in logs(tmp_path, 2):
        for row in log[1:]:
            assert row["update/peer_groups"] > 0 and row["loss/peer/tokens"] > 0
            assert row["tokens/extra"] > 0 and "swarm/state" not in row
            assert row["loss/peer/behavior_gap"] < 1e-4  # the very policy that is updated wrote them


def test_nodes_draw_their_own_problems_or_common_ones(tmp_path: Path) -> None:
    own = problems_seen(config(tmp_path / "a", steps=1), Simulation(), 2)
    common = problems_seen(config(tmp_path / "b", steps=1), Simulation(problems="same"), 2)
    assert own[0] != own[1] and common[0] == common[1] == own[0]


def test_nodes_differ_and_guests_take_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("guest.py").write_text(GUEST)
    vary = ({"tasks": {"gcd": {"weight": 0.0}}}, {"tasks": {"letter_counting": {"weight": 0.0}}, "optim": {"lr": 1e-5}})
    simulate(config(tmp_path), 2, simulation=Simulation(vary=vary, guests={"guest.py:listener": 2}))
    first, second = logs(tmp_path, 2)
    assert all("own/reward/gcd" not in r and "own/reward/letter_counting" in r for r in first[1:])
    assert all("own/reward/letter_counting" not in r and r["policy/lr"] == 1e-5 for r in second[1:])
    assert second[-1]["update/peer_groups"] > 0, "a specialist takes groups of a task it does not roll out itself"
    lines = [line.split() for line in Path("heard.txt").read_text().splitlines()]
    assert [(n, s) for n, s, _ in lines] == [("0", "1"), ("1", "1"), ("0", "2"), ("1", "2")]
    assert sum(int(n) for *_, n in lines) > 0


SPEC = """
question = "Does the curve say what was spent?"
seeds = [1, 2]
nodes = 2
[config]
steps = 2
threads = 1
[config.tasks.letter_counting]
params = { min_words = 2, max_words = 3 }
[config.rollout]
problems = 1
group_size = 4
max_new_tokens = 24
[config.eval]
every = 1
problems = 2
samples = 1
[config.swarm]
peer_groups = 1
[arms.shared]
[arms.own.simulation]
peers = "self"
[[compare]]
first = "shared"
second = "own"
axis = "tokens"
"""


def test_an_experiment_of_swarms_records_curves(tmp_path: Path) -> None:
    kinds = '[[compare]]\nfirst = "own:1"\nsecond = "shared"\naxis = "tokens"\n'
    vary = 'peers = "self"\nvary = [{}, { rollout = { problems = 2 } }]'
    (tmp_path / "e.toml").write_text(SPEC.replace('peers = "self"', vary) + kinds)
    text = run_experiment(tmp_path / "e.toml", tmp_path / "out", jobs=1).read_text()
    assert "| shared - own, at equal generated tokens |" in text and "| own:1 - shared, at equal" in text
    records = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [r["arm"] for r in records] == 2 * ["shared", "own", "own:1"]
    whole, kind = records[1], records[2]
    assert (whole["nodes"], kind["nodes"]) == (2, 1) and kind["end_per_node"] == whole["end_per_node"][1:]
    assert kind["generated_tokens"] > whole["generated_tokens"], "twice as many own problems as the other node"
    for r in records:
        points = r["curve"]
        assert [p["step"] for p in points] == [0, 1, 2] and points[0]["tokens"] == 0 == points[0]["cpu_s"]
        assert points[-1]["tokens"] == r["generated_tokens"] and points[-1]["metric"] == r["end"]["eval/accuracy"]
        assert points[-1]["cpu_s"] > 0 and points[-1]["low"] <= points[-1]["metric"] <= points[-1]["high"]
    seeds = [(tmp_path / "out/runs/shared" / f"seed_{s}/node_1/config.toml").read_text() for s in (1, 2)]
    assert "seed = 1001" in seeds[0] and "seed = 2001" in seeds[1]


def test_kinds_of_nodes_that_an_arm_has_not_are_refused(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(SPEC.replace('second = "own"', 'second = "own:0"'))
    with pytest.raises(UserError, match=r"'own:0'; there are shared, own$"):
        load_experiment(tmp_path / "e.toml")


def test_a_swarm_stopped_between_two_nodes_begins_anew(tmp_path: Path) -> None:
    path, out = tmp_path / "e.toml", tmp_path / "out"
    path.write_text(SPEC.replace("seeds = [1, 2]", "seeds = [1]").partition("[arms.own")[0])
    run_experiment(path, out, jobs=1)
    first, second = (out / "runs" / "shared" / "seed_1" / f"node_{i}" for i in (0, 1))
    (second / "DONE").unlink()
    shutil.rmtree(second / "checkpoints")
    run_experiment(path, out, jobs=1)
    assert all([r["step"] for r in read_jsonl(d / "metrics.jsonl")] == [0, 1, 2] for d in (first, second))
    assert all((d / "DONE").exists() for d in (first, second))
    assert all(r["update/peer_groups"] > 0 for r in list(read_jsonl(second / "metrics.jsonl"))[1:])


def test_curves_are_read_where_both_have_come_equally_far() -> None:
    rows = [
        {"step": 0, "acc": 0.2},
        {"step": 1, "tokens/generated": 10.0, "time/cpu_s": 1.0, "own/reward": 0.0, "update/mix_reward": 0.5},
        {
            "step": 2,
            "tokens/generated": 30.0,
            "time/cpu_s": 1.0,
            "own/reward": 1.0,
            "update/mix_reward": 0.7,
            "acc": 0.6,
        },
    ]
    twice = [r | {"tokens/extra": r["tokens/generated"]} if r["step"] else r for r in rows]
    one, two = curve([rows, rows], "acc"), curve([twice], "acc")
    assert [p["tokens"] for p in one] == [0, 40] and [p["tokens"] for p in two] == [0, 80]
    assert one[-1]["own_reward"] == 0.5 and one[-1]["mix_reward"] == pytest.approx(0.6)
    assert value_at(one, "tokens", 20) == pytest.approx(0.4)
    first, second = at_same("tokens", [one], [two])
    assert first == pytest.approx([0.6]) and second == pytest.approx([0.4])
    first, second = at_same("step", [one], [two])
    assert first == second == pytest.approx([0.6])


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "experiments").glob("sharing*.toml")))
def test_the_experiments_on_sharing_are_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parents[1])
    spec = load_experiment(path)
    for arm, changes in spec.arms.items():
        config_from_dict(spec.settings(arm))
        for change in (simulation := Simulation.model_validate(changes.get("simulation", {}))).vary:
            config_from_dict(merged(spec.settings(arm), change))
        for guest in simulation.guests:
            load_function(guest)
