"""Writes group_v1.json. Run only when the wire format gets a new version: a change here breaks every older node."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from swarm_kit import encoder, group, person, problem, trajectory

from coterie.swarm.wire import encode_group
from coterie.types import Segment, Source, StopReason


def main() -> None:
    me = person(7, session=3)
    helped = trajectory(
        problem(4),
        "4+5 9 9",
        source=np.array([0, 0, 0, 0, 0, 1, 1, 1, 0, 2, 0, 1, 1], np.uint8),
        behavior_logprobs=np.array([np.nan] * 5 + [-0.5, -0.25, -2, np.nan, np.nan, np.nan, -0.125, -1], np.float32),
        segments=(Segment(Source.POLICY, "4+5"), Segment(Source.CONTEXT, " "), Segment(Source.HELPER, "9"),
                  Segment(Source.CONTEXT, " "), Segment(Source.POLICY, "9")),
        mode="helped",
    )  # fmt: skip
    cut = trajectory(problem(4), "4+5=", stop_reason=StopReason.EOS)
    cases = {
        "solo_float16": dict(group=group(me, 4, version=12), token_ids=True, logprobs="float16"),
        "solo_float32": dict(group=group(me, 4, version=12), token_ids=True, logprobs="float32"),
        "text_only": dict(group=group(me, 4, version=12), token_ids=False, logprobs="none"),
        "helped": dict(group=group(me, 4, trajectories=(helped, cut)), token_ids=True, logprobs="float16"),
    }
    out = {}
    for name, case in cases.items():
        made = encode_group(case.pop("group"), me, "swarm", seq=5, sent_ms=1_700_000_000_000, **case)
        body = json.loads(msgspec.json.encode(made.body))
        out[name] = {
            "swarm": "swarm",
            "author": me.node_id,
            "id": made.id.hex(),
            "frame": made.frame.hex(),
            "body": body,
        }
    assert encoder().decode(helped.token_ids[5:8]) == "4+5"
    Path(__file__).with_name("group_v1.json").write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
