"""Groups from a node that does not train: a script or a person writes lines to a JSONL inbox.

    {"problem": "reasoning_gym/gcd#17", "answers": ["gcd is <answer>6</answer>", "<answer>4</answer>"]}

Each line becomes one signed group of plain text; receivers encode it with their own tokenizer and score it themselves. A
group teaches something only if its answers differ in reward, so give right and wrong ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from coterie.errors import CoterieError, UserError
from coterie.swarm.access import Access
from coterie.swarm.exchange import Exchange, Request
from coterie.swarm.identity import Identity
from coterie.swarm.verify import ProblemFn
from coterie.swarm.wire import Text, WireGroup, WireTrajectory, digest_prompt, sign_body
from coterie.types import Source


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """One line of the inbox."""

    problem: str
    answers: list[str]


def read_lines(inbox: Path, follow: bool, poll_s: float = 0.5) -> Iterator[tuple[int, bytes]]:
    """(line number, line) of the inbox; with ``follow``, whatever is appended later too. Half a line waits for its end."""
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
    say: Callable[[str], None] = print,
) -> int:
    """Send every good line of ``inbox``; a bad one is named and skipped. Returns the number of groups sent."""
    sent = 0
    exchange.collect(Request(1, 1))  # enter the swarm
    for number, line in read_lines(inbox, follow):
        try:
            body = _body(msgspec.json.decode(line, type=Line), identity, sent, problem_of)
        except (msgspec.DecodeError, CoterieError) as e:
            say(f"{inbox}:{number}: skipped: {e}")
            continue
        exchange.publish([access.seal(sign_body(body, identity, swarm).frame)])
        sent += 1
    return sent


def _body(line: Line, identity: Identity, seq: int, problem_of: ProblemFn) -> WireGroup:
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
    )
