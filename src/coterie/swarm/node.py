"""A node's side of the swarm: publish own groups, collect peers' groups that are fit to train on.

One object serves every mode; with ``exchange = "none"`` it is a :class:`SoloNode` that does nothing, so the loop is the
same. Nothing here touches torch's or numpy's global randomness: a node that asks for no peer groups trains exactly as if
it were alone.
"""

from __future__ import annotations

import base64
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from coterie.config import SwarmConfig
from coterie.swarm.access import Access
from coterie.swarm.chooser import MARGIN, Chooser, LogprobFn
from coterie.swarm.controller import FixedShare
from coterie.swarm.exchange import Exchange, Request
from coterie.swarm.identity import Identity, short_name
from coterie.swarm.intake import Intake
from coterie.swarm.pool import Entry, Pool
from coterie.swarm.solo import Node, SoloNode, State
from coterie.swarm.trust import Ledger
from coterie.swarm.verify import Rebuilder, ScoreFn
from coterie.swarm.wire import WireError, encode_group
from coterie.types import Group

__all__ = ["LogprobFn", "Node", "SoloNode", "State", "SwarmNode"]

_CLOCK_S, _BEAT_S = 60.0, 2.0


def _line(state: State) -> str:
    return f"swarm: {state.mode}" + (f" ({state.cause})" if state.cause else "")


class SwarmNode:
    """A member of a swarm.

    Args:
        cfg: the ``[swarm]`` section.
        identity: this node's key.
        exchange: what carries the messages; closed with the node.
        rebuilder: own problems, own tokenizer, own limits.
        score: own verifier, ``score([(problem, text), ...]) -> scores`` with ``.reward`` and ``.outcome``.
        access: who may take part.
        share: how many groups to ask for.
        logprobs: own log-probs of the policy tokens of each trajectory, for ``less_likely``.
        seed: of the selection.
        clock: seconds, for the time written on messages, which decides nothing; given for virtual time, in which no step is
            cut short by ``collect_s``.
        on_close: run after the exchange is closed (locks).
    """

    def __init__(
        self,
        cfg: SwarmConfig,
        identity: Identity,
        exchange: Exchange,
        rebuilder: Rebuilder,
        score: ScoreFn,
        *,
        access: Access | None = None,
        share: FixedShare | None = None,
        logprobs: LogprobFn | None = None,
        seed: int = 0,
        clock: Callable[[], float] | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.cfg, self.identity, self.author = cfg, identity, identity.node_id
        self.exchange, self._rebuild = exchange, rebuilder
        self._access = access or Access(cfg.name)
        self.share = share or FixedShare(cfg.peer_groups)
        self._seed, self._on_close = seed, on_close
        self.pool = Pool(cfg.pool, cfg.ttl)
        self.ledger = Ledger(cfg.max_age)
        self._clock = clock or (lambda: time.time())  # looked up at each call
        self._patience_s = (
            cfg.collect_s if clock is None else math.inf
        )  # of virtual time: a busy machine decides nothing
        self._intake = Intake(cfg.name, self.author, self._access, rebuilder, self.ledger, self.pool, self._clock)
        self._chooser = Chooser(cfg, self._intake, score, logprobs)
        self._counts = self._chooser.counts
        self.events = self._intake.events  # quarantines, changes of state, a wrong clock
        self._said = State("solo")
        self._now = 0  # collects so far: this node's only clock
        self._seq = 0
        self._published = self._sent_bytes = self._unsendable = 0
        self._used_at = -(10**9)
        self._beat_at = float("-inf")
        self._tasks = Counter[str]()  # of the groups published
        self._accuracy: float | None = None
        self._publish_s = 0.0
        self._useful: float | None = None  # messages of the last collect that were worth hearing
        self._last: dict[str, float] = {}

    def publish(self, groups: Sequence[Group]) -> None:
        """Sign and send own groups (never blocks on a peer). What cannot be sent is counted as ``swarm/unsendable``."""
        self._chooser.yardstick.note(groups)
        for group in groups:
            self.ledger.note_own(group.informative)
        if self.cfg.share == "nothing":
            return
        start = time.monotonic()
        frames = []
        for group in groups:
            self.pool.remember(group)
            if self.cfg.share == "informative" and not group.informative:
                continue
            try:
                message = encode_group(
                    group,
                    self.identity,
                    self.cfg.name,
                    seq=self._seq,
                    sent_ms=int(self._clock() * 1000),
                    token_ids=self.cfg.token_ids,
                    logprobs=self.cfg.logprobs,
                    state=self.cfg.send_problems,
                )
            except WireError:
                self._unsendable += 1
                continue
            self._seq += 1
            self._tasks[group.problem.task] += 1
            frames.append(self._access.seal(message.frame))
        self._published += len(frames)
        self._sent_bytes += sum(map(len, frames))
        self.exchange.publish(frames)
        self._publish_s = time.monotonic() - start

    def collect(self, step: int) -> list[Group]:
        """Peers' groups for this step: verified, scored here, chosen; none of them ever returned before.

        Takes at most about ``collect_s`` (plus one scoring call) and never waits for a peer beyond ``wait_s``.
        """
        start = time.monotonic()
        self._now += 1
        wanted = self.share.wanted
        chosen: list[Group] = []
        self._counts.clear()
        if wanted > 0:
            deadline = start + self._patience_s
            request = Request(MARGIN * wanted, self.cfg.message_bytes + 64, self.cfg.wait_s, self._useful)
            frames = self.exchange.collect(request)
            self._counts["received"] = len(frames)
            self.pool.expire(self._now)
            accepted = self._intake.take(frames, self._now, deadline, max(8, request.messages))
            self._counts["accepted"] = accepted.total()
            chosen = self._chooser.choose(wanted, self._seed * 1_000_003 + step, self._now, deadline)
            self._useful = self._chooser.worth(accepted, wanted)
        for g in chosen:
            self.pool.remove(g.id, "used")
            record = self.ledger.authors[g.author]
            record.used, record.used_at = record.used + 1, self._now
        self._used_at = self._now if chosen else self._used_at
        self._note(chosen, wanted, time.monotonic() - start)
        self._beat(step)
        return chosen

    def feedback(self, accuracy: float, kl: float) -> None:
        """Own held-out accuracy and KL to the start model, after an evaluation (used by ``ratio = "adaptive"``)."""
        self._accuracy = accuracy
        self.share.feedback(accuracy, kl)

    @property
    def state(self) -> State:
        """Sharing: a peer's group was used lately (or, asking for none, the link is up). Solo: nobody there."""
        status = self.exchange.status()
        lately = self._now - self._used_at <= self.cfg.ttl
        if status.link == "down":
            return State("degraded" if lately else "solo", status.cause)
        if lately or (self.share.wanted == 0 and (status.nodes or 1) > 1):
            return State("sharing")
        heard = max((a.heard_at for a in self.ledger.authors.values()), default=-(10**9))
        if self._now - heard > self.cfg.ttl:
            if status.nodes == 1:
                return State("solo", "no other node is in the swarm")
            since = "yet" if heard < 0 else f"for over {self.cfg.ttl} steps"
            return State("degraded", f"connected, but no message from any peer {since}")
        return State("degraded", f"messages arrive, but none was fit to train on: {self._why()}")

    def _why(self) -> str:
        reasons = Counter(self.ledger.refused) + Counter({k: v for k, v in self.pool.dropped.items() if k != "used"})
        return ", ".join(f"{n} {k}" for k, n in reasons.most_common(3)) or "all wait to be scored"

    def _note(self, chosen: Sequence[Group], wanted: int, seconds: float) -> None:
        ages = [self.ledger.age(g) for g in chosen]
        rewards = self._counts["rewards"]
        self._last = {
            "swarm/used_groups": float(len(chosen)),
            "swarm/wanted": float(wanted),
            "swarm/peers_in_batch": float(len({g.author for g in chosen})),
            "swarm/staleness": float(np.mean(ages)) if ages else 0.0,
            "swarm/received": float(self._counts["received"]),
            "swarm/accepted": float(self._counts["accepted"]),
            "swarm/collect_s": seconds,
            "swarm/publish_s": self._publish_s,
        }
        if rewards:
            self._last["peer/reward"] = self._counts["reward_sum_1e6"] / 1e6 / rewards
            self._last["peer/informative"] = self._counts["informative"] / self._counts["scored"]
        state = self.state
        if state.mode != self._said.mode:
            self._said = state
            self.events.append(_line(state))
        skew = self.ledger.skew_s()
        if abs(skew) > _CLOCK_S and self._now % 100 == 1:
            self.events.append(f"this clock differs from most peers' by {skew:.0f} s (nothing depends on it)")

    def _beat(self, step: int) -> None:
        """Tell ``coterie swarm status`` how this node is, every few seconds."""
        if time.monotonic() - self._beat_at < _BEAT_S:
            return
        self._beat_at = time.monotonic()
        info = {
            "step": step,
            "state": self.state.mode,
            "cause": self.state.cause,
            "published": self._published,
            "used": sum(a.used for a in self.ledger.authors.values()),
            "tasks": dict(self._tasks),
            "accuracy": self._accuracy,
            "troubles": self.troubles()[:8],
            "clock_ms": int(time.time() * 1000),  # so that `coterie doctor` can compare
        }
        self.exchange.beat(json.dumps(info))

    def metrics(self) -> dict[str, float]:
        """Of the last collect; counters (``published``, ``bytes_*``, ``refused*``, ``dropped*``) since the start."""
        mode = {"sharing": 2.0, "degraded": 1.0, "solo": 0.0}[self.state.mode]
        status = self.exchange.status()
        out = {"swarm/state": mode, **self._last, **self.exchange.metrics()}
        if status.nodes is not None:
            out["swarm/nodes"] = float(status.nodes)
        out |= {
            "swarm/pool": float(len(self.pool)),
            "swarm/published": float(self._published),
            "swarm/bytes_sent": float(self._sent_bytes),
            "swarm/unsendable": float(self._unsendable),
            "swarm/quarantined": float(len(self.ledger.quarantined(self._now))),
            "swarm/clock_skew_s": self.ledger.skew_s(),
            "swarm/refused": float(sum(self.ledger.refused.values())),
        }
        out |= {f"swarm/refused/{k}": float(n) for k, n in self.ledger.refused.items()}
        out |= {f"swarm/dropped/{k}": float(n) for k, n in self.pool.dropped.items()}
        out |= {f"swarm/{k}": float(n) for k, n in self._rebuild.counts.items()}
        return out

    def summary(self) -> str:
        """How sharing went, in one line for the end of a run."""
        used = {n: a.used for n, a in self.ledger.authors.items() if a.used}
        text = (
            f"{_line(self.state)}; published {self._published} groups, used {sum(used.values())} from {len(used)} peers"
        )
        bad = [short_name(n) for n, a in self.ledger.authors.items() if a.bars]
        text += f"; had in quarantine: {', '.join(bad)}" if bad else ""
        troubles = self.troubles()
        return text + (f"; trouble with {'; '.join(troubles[:8])}" if troubles else "")

    def troubles(self) -> list[str]:
        """Peers that were named for something, a line each."""
        return self._intake.troubles()

    def peers(self) -> list[dict[str, Any]]:
        """Every author heard of: see :meth:`Ledger.table`."""
        return self.ledger.table(self._now)

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON data for the checkpoint: with it, a restarted node takes no group twice."""
        return {
            "node": self.author,
            "session": self.identity.session,
            "now": self._now,
            "used_at": self._used_at,
            "seq": self._seq,
            "published": self._published,
            "sent_bytes": self._sent_bytes,
            "ledger": self.ledger.state(),
            "pool": self.pool.state(),
            "share": self.share.state(),
            "own": self._chooser.yardstick.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`. A state of another identity is taken over too: what was used stays used."""
        self._now, self._used_at = int(state["now"]), int(state["used_at"])
        if state["node"] == self.author and state["session"] == self.identity.session:
            self._seq = int(state["seq"])  # same start: go on counting
        self._published, self._sent_bytes = int(state["published"]), int(state["sent_bytes"])
        self.ledger.load(state["ledger"])
        self.pool.load_contents(state["pool"])
        self.share.load(state["share"])
        self._chooser.yardstick.load(state["own"])
        for data, arrived, rewards, copied in state["pool"]["entries"]:
            self._restore(base64.b64decode(data), int(arrived), rewards, tuple(copied))

    def _restore(
        self, frame: bytes, arrived: int, rewards: list[float | None] | None, copied: tuple[bool, ...]
    ) -> None:
        """Put a saved entry back; one that this node would refuse today (its tasks have changed) is dropped."""
        try:
            group = self._intake.restore(frame)
        except WireError:
            self.pool.dropped["unrestored"] += 1
            return
        if rewards is not None:
            rows = tuple(replace(t, reward=r) for t, r in zip(group.trajectories, rewards, strict=True))
            group = replace(group, trajectories=rows)
        self.pool.add(Entry(group, frame, arrived, copied, scored=rewards is not None))

    def close(self) -> None:
        self.exchange.close()
        self._on_close()
