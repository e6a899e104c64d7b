"""A node in its own process, for the integration tests: publishes two groups a step, collects, reports as JSON lines.

python swarm_worker.py NUMBER STEPS PAUSE_S EXCHANGE [key=value ...]
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import swarm_kit as kit

from coterie.config import Config, SwarmConfig
from coterie.errors import UserError
from coterie.swarm.build import open_link, open_node


def main() -> None:
    number, steps, pause = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    settings: dict[str, object] = dict(a.split("=", 1) for a in sys.argv[6:])
    for key in ("connect", "listen"):
        if key in settings:
            settings[key] = tuple(str(settings[key]).split(","))
    cfg = Config(run_dir=sys.argv[5], seed=number, swarm=SwarmConfig(exchange=sys.argv[4], share="all", **settings))
    state = Path(sys.argv[5]) / "state.json"
    try:
        node = open_node(cfg, open_link(cfg), encoder=kit.encoder(), problem_of=kit.problem_of, score=kit.score)
    except UserError as e:
        print(json.dumps({"refused": str(e)}), flush=True)
        sys.exit(2)
    first = 0
    if state.exists():
        saved = json.loads(state.read_text())
        node.load_state_dict(saved["node"])
        first = saved["step"]
    for step in range(first, first + steps):
        start = time.monotonic()
        node.publish([kit.group(kit.person(1), 100_000 * number + 2 * step + k) for k in range(2)])
        got = node.collect(step)
        spent = time.monotonic() - start
        saved = {"step": step + 1, "node": node.state_dict()}
        state.with_suffix(".part").write_text(json.dumps(saved))
        state.with_suffix(".part").rename(state)
        line = {"node": node.author, "step": step, "s": spent, "mode": node.state.mode, "cause": node.state.cause}
        print(json.dumps(line | {"got": [g.id for g in got], "authors": [g.author for g in got]}), flush=True)
        time.sleep(pause)
    node.close()
    print(json.dumps({"done": node.metrics() if cfg.swarm.exchange == "local" else {}}), flush=True)


if __name__ == "__main__":
    main()
