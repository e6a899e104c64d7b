"""Several nodes in one process, in turn, joined by the memory exchange: for research, tests and the demo.

Nodes, selection, wire format and trust are those of a real swarm; only the carrier and the clock differ (every node takes
one step per turn).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from coterie.config import Config
from coterie.run import Run, Summary
from coterie.swarm.memory import MemoryHub

NODE = "node_{}"


def node_config(cfg: Config, i: int) -> Config:
    """Node ``i`` of a simulated swarm: its own seed (so its own problems) and its own run directory."""
    swarm = cfg.swarm.model_copy(update={"exchange": "memory"})
    return cfg.model_copy(update={"seed": cfg.seed + i, "run_dir": f"{cfg.run_dir}/{NODE.format(i)}", "swarm": swarm})


def simulate(
    cfg: Config, nodes: int, on_step: Callable[[int, list[Run]], None] = lambda step, runs: None
) -> list[Summary]:
    """Train ``nodes`` nodes, each for ``cfg.steps`` steps. ``on_step(step, runs)`` is called after each turn of all.

    Raises:
        UserError: as :class:`coterie.run.Run`.
    """
    hub = MemoryHub()
    with ExitStack() as stack:
        runs = [stack.enter_context(Run(node_config(cfg, i), quiet=True, hub=hub)) for i in range(nodes)]
        for run in runs:
            run.begin()
        on_step(0, runs)
        while not all(run.done for run in runs):
            for run in runs:
                if not run.done:
                    run.advance()
            on_step(max(run.trainer.step for run in runs), runs)
        return [run.finish() for run in runs]
