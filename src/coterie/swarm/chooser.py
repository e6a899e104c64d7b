"""Which of the waiting groups enter the update: scored here, fit in form, shared fairly among authors."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from coterie.config import SwarmConfig
from coterie.swarm.identity import short_name
from coterie.swarm.intake import Intake
from coterie.swarm.pool import Entry
from coterie.swarm.selection import Quotas, equal_share, fresh, select
from coterie.swarm.verify import ScoreFn, score_group
from coterie.swarm.wire import WireError
from coterie.swarm.yardstick import WINDOW, Yardstick, better
from coterie.types import Group

LogprobFn = Callable[[Sequence[Group]], Sequence[Sequence[NDArray[np.float32]]]]
_BREACH = ("breach", "an answer broke the scorer's bounds")
MARGIN = 3  # messages asked for per peer group wanted: some are uninformative, late or refused


class Chooser:
    """Chooses from the pool that ``intake`` fills. ``counts``: what was scored in the last step (cleared by the owner).

    Args:
        score: own verifier.
        logprobs: own log-probs of the policy tokens of each trajectory; None: likelihood is not looked at.
    """

    def __init__(self, cfg: SwarmConfig, intake: Intake, score: ScoreFn, logprobs: LogprobFn | None) -> None:
        self.cfg, self._intake, self.pool, self.ledger = cfg, intake, intake.pool, intake.ledger
        self._score_fn, self._logprobs = score, logprobs if cfg.less_likely else None
        self.yardstick = Yardstick(cfg.longer, cfg.less_likely if logprobs else 0.0)
        self.counts = Counter[str]()
        self._now = 0

    def choose(self, wanted: int, seed: int, now: int, deadline: float) -> list[Group]:
        """Score waiting groups until enough are fit, then select; what has no signal leaves the pool."""
        self._now = now
        order = self.pool.order(seed, self.ledger.idlers({e.group.author for e in self.pool.entries.values()}))
        goal = 3 * wanted if self.cfg.selection == "variance" else wanted
        while True:
            scored = [e.group for e in self.pool.entries.values() if e.scored]
            ready = fresh(scored, self.ledger.trusted(self._now), self.cfg.max_age)
            quotas = self._quotas(wanted, {g.author for g in ready})
            chosen = select(ready, goal, self.cfg.selection, seed, quotas)
            todo = [i for i in order if i in self.pool.entries and not self.pool.entries[i].scored]
            if len(chosen) >= goal or not todo or time.monotonic() > deadline:
                return select(ready, wanted, self.cfg.selection, seed, quotas)
            self._score([self.pool.entries[i] for i in todo[: max(1, goal - len(chosen))]])

    def _score(self, entries: Sequence[Entry]) -> None:
        scored = [(entry, *score_group(entry.group, self._score_fn)) for entry in entries]
        unfit = {g.id: _BREACH if breach else self._unfit(g, e.copied) for e, g, breach in scored}
        unfit |= self._implausible([g for _, g, _ in scored if g.informative and unfit[g.id] is None])
        for entry, group, _ in scored:
            self.counts["scored"] += 1
            self.counts["informative"] += group.informative
            self.counts["rewards"] += len(group.valid_rewards)
            self.counts["reward_sum_1e6"] += round(1e6 * sum(group.valid_rewards))
            self._sort(entry, group, unfit[group.id])

    def _sort(self, entry: Entry, group: Group, unfit: tuple[str, str] | None) -> None:
        """Keep a scored group in the pool, or remove it and say why. ``unfit``: kind and text of what is wrong with it."""
        if unfit is not None:
            self.pool.remove(group.id, unfit[0])
            self._intake.refuse(group.author, WireError(*unfit, signed=True), self._now)
        elif self.cfg.selection != "uniform" and not group.informative:
            self.pool.remove(group.id, "uninformative")
        else:
            self.pool.entries[group.id] = replace(entry, group=group, scored=True)
        if self.ledger.judge(group.author, group.informative and unfit is None):
            a = self.ledger.authors[group.author]
            said = f"of its last {a.scored} groups {a.useful} could teach something, far fewer than of own ones"
            self._intake.events.append(f"peer {short_name(group.author)}: {said}; it comes last")

    def _unfit(self, group: Group, copied: Sequence[bool]) -> tuple[str, str] | None:
        """Kind and text of what is wrong with the form of a group that has something to teach."""
        if not group.informative:
            return None
        best = {id(t) for t in better(group)}
        if copied and all(c for c, t in zip(copied, group.trajectories, strict=True) if id(t) in best):
            return "copy", "its right answers were here before"
        if self.yardstick.too_long(group):
            limit = self.yardstick.longest(group.problem.task)
            return "longer", f"a right answer of over {limit:.0f} tokens; own ones are shorter"
        return None

    def _implausible(self, groups: Sequence[Group]) -> dict[str, tuple[str, str] | None]:
        """By id, what is wrong with those groups that this node could hardly have written."""
        limit = self.yardstick.least_likely()
        if self._logprobs is None or not groups or limit == -np.inf:
            return {}
        said = "implausible", f"{WINDOW} tokens with a mean log-prob below {limit:.1f} here"
        rows = zip(groups, self._logprobs(groups), strict=True)
        return {g.id: said for g, logprobs in rows if self.yardstick.implausible(logprobs)}

    def _quotas(self, wanted: int, fit: set[str]) -> Quotas:
        """An author's share counts those who have something ``fit`` now or had lately, not those who only send."""
        lately = {n for n, a in self.ledger.authors.items() if self._now - a.used_at <= self.cfg.ttl}
        share = equal_share(wanted, len(fit | lately))
        most = self.cfg.per_peer or 2 * share
        return Quotas(most, self.cfg.per_task, min(share, most))

    def worth(self, accepted: Mapping[str, int], wanted: int) -> float:
        """Messages worth hearing among those ``accepted`` of each author: no author's beyond its share, and those of authors
        that seldom send anything useful by so much less."""
        fair = MARGIN * self._quotas(wanted, set(accepted)).share
        worth = self.ledger.worth(accepted)
        return sum(min(n, fair) * worth[author] for author, n in accepted.items())
