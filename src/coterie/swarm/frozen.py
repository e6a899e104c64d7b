"""A contributor that does not train: its model rolls out and publishes, and stays as it is."""

from __future__ import annotations

import time
from collections.abc import Callable

from coterie.config import Config
from coterie.errors import UserError
from coterie.rng import derive
from coterie.rollout import rollout
from coterie.run import build, check
from coterie.swarm.node import SwarmNode


def contribute_rollouts(cfg: Config, every_s: float, say: Callable[[str], None]) -> int:
    """Publish ``cfg.rollout.problems`` groups every ``every_s`` seconds (or as fast as the model writes), ``cfg.steps``
    times. Every start works on new problems. Nothing is collected, trained or kept but the identity.

    Returns: groups sent, without those that found no relay.

    Raises:
        UserError: no exchange, or a config that cannot be used.
    """
    cfg = cfg.model_copy(update={"swarm": cfg.swarm.model_copy(update={"peer_groups": 0})})
    check(cfg)
    with build(cfg) as parts:
        node = parts.node
        if not isinstance(node, SwarmNode):
            raise UserError("swarm contribute needs --swarm.exchange local or network")
        stream = f"{cfg.seed}/{node.author}/{node.identity.session}"
        said = None
        for step in range(cfg.steps):
            start = time.monotonic()
            problems = parts.tasks.draw(stream, step, cfg.rollout.problems)
            done = rollout(
                parts.engine,
                parts.policy.encoder,
                problems,
                cfg.rollout,
                parts.scorer,
                author=node.author,
                version=0,  # it never changes, so its groups never grow old
                seed=derive(stream, step),
                helpers=parts.helpers,
            )
            node.publish(done.groups)
            node.collect(step)  # asks for nothing: keeps the node's place and says how it is
            if node.state != said:
                said = node.state
                say(f"step {step + 1}: {said.mode}" + (f" ({said.cause})" if said.cause else ""))
            time.sleep(max(0.0, start + every_s - time.monotonic()))
        found = node.metrics()
    return int(found["swarm/published"] - found.get("swarm/unsent", 0.0))
