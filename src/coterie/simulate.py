"""Several nodes in one process, in turn, joined by the memory exchange: for research, tests and the demo.

Nodes, selection, wire format and trust are those of a real swarm; only the carrier and the clock differ (every node takes
one step per turn). What experiments need beyond that, and no real swarm has, is a :class:`Simulation`:

    python -m coterie.simulate CONFIG --nodes 8 --simulation FILE --run_dir runs/x --seed 0
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field

from coterie.config import Config, Section, config_from_dict, load_config
from coterie.importing import load_function
from coterie.rng import derive
from coterie.rollout import rollout
from coterie.run import Run, Summary
from coterie.swarm.memory import MemoryHub
from coterie.swarm.selection import select
from coterie.swarm.solo import SoloNode
from coterie.tasks.reasoning_gym import remembering
from coterie.tasks.taskset import TaskSet
from coterie.trainer import Trainer
from coterie.types import Group, Problem

NODE = "node_{}"
OWN_ROUNDS = 3  # rollouts a node may need for its own "peers" before it makes do with fewer


class Simulation(Section):
    """What a simulated swarm may have that a real one has not."""

    problems: Literal["distinct", "same"] = "distinct"
    """`same`: at every step all nodes draw the same problems, and each answers them for itself."""
    peers: Literal["others", "self"] = "others"
    """`self`: what a node takes for peers' groups are further samples of its own policy on other problems, chosen by the
    same rule; their tokens are counted in `tokens/extra`."""
    vary: tuple[dict[str, Any], ...] = ()
    """Changes of the config: node i has the one at i modulo their number (other task weights, another model, ...)."""
    guests: dict[str, int] = Field(default_factory=dict)
    """Function (`module:function` or `path/file.py:function`) -> how many members it makes. It is given the hub, the trainer
    of node 0 and a number, and returns an object whose `turn(step)` is called after each turn of the nodes."""


class Guest(Protocol):
    """A member of the swarm that is no node: an attacker, a script."""

    def turn(self, step: int) -> None: ...


class OwnSamples(SoloNode):
    """Peers that are none: further samples of the node's own policy, chosen as peers' groups would be. The control that
    tells more groups from other people's groups."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.trainer, self._tokens = trainer, 0

    def collect(self, step: int) -> list[Group]:
        t, cfg = self.trainer, self.trainer.cfg
        found: list[Group] = []
        self._tokens = 0
        for attempt in range(OWN_ROUNDS):
            wanted = cfg.swarm.peer_groups - len(found)
            problems = t.tasks.draw(f"{cfg.seed}/extra{attempt}", step, wanted)
            seed = derive(cfg.seed, "extra", step, attempt)
            done = rollout(
                t.engine, t.policy.encoder, problems, cfg.rollout, t.scorer, author="extra", version=step, seed=seed
            )
            self._tokens += sum(x.response_length for g in done.groups for x in g.trajectories)
            found += select(done.groups, wanted, cfg.swarm.selection, seed)
            if len(found) == cfg.swarm.peer_groups:
                break
        return found

    def metrics(self) -> dict[str, float]:
        return {"tokens/extra": float(self._tokens)}


class CommonProblems(TaskSet):
    """The tasks of a node, drawn from the swarm's stream whatever the node's own seed is."""

    def __init__(self, tasks: TaskSet, own: int, common: int) -> None:
        super().__init__(tasks.tasks, tasks.weights)
        self._own, self._common = str(own), str(common)

    def draw(self, stream: str, step: int, k: int, weights: Mapping[str, float] | None = None) -> list[Problem]:
        return super().draw(self._common + stream.removeprefix(self._own), step, k, weights)


def node_config(cfg: Config, i: int, vary: Sequence[dict[str, Any]] = ()) -> Config:
    """Node ``i`` of a simulated swarm: its own seed (so its own problems), run directory, and changes."""
    swarm = cfg.swarm.model_copy(update={"exchange": "memory"})
    own = cfg.model_copy(update={"seed": cfg.seed + i, "run_dir": f"{cfg.run_dir}/{NODE.format(i)}", "swarm": swarm})
    return config_from_dict(merged(own.model_dump(), vary[i % len(vary)])) if vary else own


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes``, section by section."""
    out = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merged(out[key], value) if both else value
    return out


def simulate(
    cfg: Config,
    nodes: int,
    on_step: Callable[[int, list[Run]], None] = lambda step, runs: None,
    simulation: Simulation | None = None,
) -> list[Summary]:
    """Train ``nodes`` nodes, each for ``cfg.steps`` steps. ``on_step(step, runs)`` is called after each turn of all.

    Raises:
        UserError: as :class:`coterie.run.Run`; a guest's function that cannot be imported.
    """
    sim = simulation or Simulation()
    made = [(load_function(name), n) for name, n in sim.guests.items()]
    hub = MemoryHub()
    with ExitStack() as stack:
        configs = [node_config(cfg, i, sim.vary) for i in range(nodes)]
        records = remembering()
        runs = [stack.enter_context(Run(c, quiet=True, hub=hub, records=records)) for c in configs]
        for run in runs:
            if sim.problems == "same":
                run.trainer.tasks = CommonProblems(run.trainer.tasks, run.cfg.seed, cfg.seed)
            if sim.peers == "self":
                run.trainer.node = OwnSamples(run.trainer)
        guests: list[Guest] = [make(hub, runs[0].trainer, k) for make, n in made for k in range(n)]
        for run in runs:
            run.begin()
        on_step(0, runs)
        while not all(run.done for run in runs):
            for run in runs:
                if not run.done:
                    run.advance()
            step = max(run.trainer.step for run in runs)
            for guest in guests:
                guest.turn(step)
            on_step(step, runs)
        return [run.finish() for run in runs]


def main() -> None:
    """One simulated swarm from a config file; further arguments are dotted flags as for ``coterie train``."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--simulation", type=Path, help="TOML file with the fields of Simulation")
    args, flags = parser.parse_known_args()
    text = args.simulation.read_text(encoding="utf-8") if args.simulation else ""
    simulation = Simulation.model_validate(tomllib.loads(text))
    simulate(load_config(args.config, flags), args.nodes, lambda step, _: print(f"step {step}"), simulation)


if __name__ == "__main__":
    main()
