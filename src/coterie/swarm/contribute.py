"""Groups from a node that does not train: a script or a person writes lines to a JSONL inbox.

    {"problem": "reasoning_gym/gcd#17", "answers": ["gcd is <answer>6</answer>", "<answer>4</answer>"]}

Each line becomes one signed group of plain text; receivers encode it with their own tokenizer and score it themselves. A
group teaches something only if its answers differ in reward, so give right and wrong ones.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from coterie.errors import CoterieError, UserError
from coterie.swarm.access import Access
from coterie.swarm.exchange import Exchange, Request
from coterie.swarm.identity import Identity
from coterie.swarm.verify import ProblemFn
from coterie.swarm.wire import Text, WireGroup, WireTrajectory, digest_prompt, sign_body, statement_of
from coterie.types import Source

_LOOK_S, _BEAT_S = 0.02, 2.0


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """One line of the inbox."""

    problem: str
    answers: list[str]


def read_lines(inbox: Path, follow: bool, poll_s: float = 0.5) -> Iterator[tuple[int, bytes] | None]:
    """(line number, line) of the inbox; with ``follow``, whatever is appended later too, and None whenever there is nothing
    yet. Half a line waits for its end."""
    if not inbox.is_file():
        raise UserError(f"inbox {inbox}: no such file")
    with open(inbox, "rb") as f:
        number, part = 0, b""
        while True:
            part += f.readline()
            if part.endswith(b"\n") or (part and not follow):
                number += 1
                if part.strip():
                    yield number, part
                part = b""
            elif follow:
                yield None
                time.sleep(poll_s)
            else:
                return


def contribute(
    inbox: Path,
    exchange: Exchange,
    identity: Identity,
    access: Access,
    swarm: str,
    problem_of: ProblemFn,
    *,
    follow: bool = False,
    state: bool = False,
    say: Callable[[str], None] = print,
) -> int:
    """Send every good line of ``inbox``; a bad one is named and skipped. While the link is down it waits, and says so.
    ``state``: send a dataset's problems in full. Returns the number of groups sent."""
    tasks, beat = Counter[str](), float("-inf")
    exchange.collect(Request(1, 1))  # enter the swarm
    for found in read_lines(inbox, follow):
        if time.monotonic() - beat > _BEAT_S:
            beat = time.monotonic()
            exchange.beat(json.dumps({"state": "sharing", "published": tasks.total(), "tasks": tasks}))
        if found is None:
            continue
        number, line = found
        try:
            body = _body(msgspec.json.decode(line, type=Line), identity, tasks.total(), problem_of, state)
            frame = sign_body(body, identity, swarm).frame
        except (msgspec.DecodeError, CoterieError) as e:
            say(f"{inbox}:{number}: skipped: {e}")
            continue
        _deliver(exchange, access.seal(frame), say)
        tasks[body.task] += 1
    return tasks.total()


def _deliver(exchange: Exchange, frame: bytes, say: Callable[[str], None]) -> None:
    """Publish one message, and see it leave: nothing of an inbox is lost for want of a link."""

    def lost() -> float:
        return exchange.metrics().get("swarm/unsent", 0.0)

    waiting = False
    while True:
        if (status := exchange.status()).link == "down":
            if not waiting:
                say(f"waiting: {status.cause}")
            waiting = True
            time.sleep(_LOOK_S)
            exchange.collect(Request(1, 1))  # a file that was locked is tried again
            continue
        before = lost()
        exchange.publish([frame])
        while exchange.pending():
            time.sleep(_LOOK_S)
            exchange.publish([])
        if lost() == before:
            return


def _body(line: Line, identity: Identity, seq: int, problem_of: ProblemFn, state: bool) -> WireGroup:
    problem = problem_of(line.problem)
    if not line.answers:
        raise UserError("no answers")
    return WireGroup(
        problem=problem.id,
        task=problem.task,
        prompt=digest_prompt(problem.prompt),
        tokenizer="",
        policy_version=0,
        session=identity.session,
        seq=seq,
        sent_ms=int(time.time() * 1000),
        trajectories=[WireTrajectory([Text(int(Source.POLICY), a)], "eos") for a in line.answers],
        statement=statement_of(problem) if state else None,
    )
