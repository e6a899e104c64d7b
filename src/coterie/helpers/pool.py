"""Asking remote helpers: many at once, with limits, retries and a circuit breaker, while the main thread decodes.
Each helper has its own limit and breaker, so one that hangs keeps nobody from asking the others.

One background thread runs one asyncio loop. Nothing raised by a helper reaches the caller: a question ends as a reply or
as a :class:`HelperFailure` that says what went wrong.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from coterie.config import HelpersConfig
from coterie.helpers.protocol import HelperError, HelperFailure, HelperReply, HelperRequest, Outcome, RemoteHelper

_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 20.0


@dataclass
class Breaker:
    """Stops asking a helper that failed ``failures`` times in a row, for ``cooldown_s``; then lets one question through."""

    failures: int
    cooldown_s: float
    in_a_row: int = 0
    retry_at: float = 0.0

    def closed(self, now: float) -> bool:
        """Whether a question may be asked at ``now`` (seconds, any monotonic clock). Reserves the single probe."""
        if self.in_a_row < self.failures:
            return True
        if now < self.retry_at:
            return False
        self.retry_at = now + self.cooldown_s
        return True

    def record(self, ok: bool, now: float) -> None:
        self.in_a_row = 0 if ok else self.in_a_row + 1
        if self.in_a_row >= self.failures:
            self.retry_at = now + self.cooldown_s

    def resting(self, now: float) -> bool:
        """Like ``not closed(now)``, without reserving anything."""
        return self.in_a_row >= self.failures and now < self.retry_at


class HelperPool:
    """Context manager around the background loop."""

    def __init__(self, cfg: HelpersConfig) -> None:
        self._cfg = cfg
        self._breakers: dict[int, Breaker] = {}
        self._loop = asyncio.new_event_loop()
        self._gates: dict[int, asyncio.Semaphore] = {}
        self._thread = threading.Thread(target=self._loop.run_forever, name="coterie-helpers", daemon=True)
        self._thread.start()

    def submit(self, helper: RemoteHelper, request: HelperRequest) -> Future[Outcome]:
        return asyncio.run_coroutine_threadsafe(self._ask(helper, request), self._loop)

    def resting(self, helper: RemoteHelper) -> bool:
        """Whether ``helper`` failed so often that it is not being asked at the moment."""
        breaker = self._breakers.get(id(helper))
        return breaker is not None and breaker.resting(time.monotonic())

    def close(self, *clean_up: Coroutine[Any, Any, None]) -> None:
        """Cancel what is in flight, run the helpers' own clean-up on the loop they used, and stop the thread."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(clean_up), self._loop).result(timeout=10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=10)
            self._loop.close()

    async def _end(self, clean_up: Sequence[Coroutine[Any, Any, None]]) -> None:
        tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for t in tasks:
            t.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*clean_up)

    async def _ask(self, helper: RemoteHelper, request: HelperRequest) -> Outcome:
        start = time.monotonic()
        breaker = self._breakers.setdefault(
            id(helper), Breaker(self._cfg.breaker_failures, self._cfg.breaker_cooldown_s)
        )
        async with self._gates.setdefault(id(helper), asyncio.Semaphore(self._cfg.concurrency)):
            if not breaker.closed(time.monotonic()):
                detail = f"{helper.where}: too many failures in a row; not asked"
                return HelperFailure("breaker", detail, helper.name)
            try:
                reply = await self._tries(helper, request)
            except HelperError as e:
                breaker.record(False, time.monotonic())
                detail = f"{helper.where}: {e.detail}"
                return HelperFailure(e.kind, detail, helper.name, time.monotonic() - start)
        breaker.record(True, time.monotonic())
        return replace(reply, latency_s=time.monotonic() - start)

    async def _tries(self, helper: RemoteHelper, request: HelperRequest) -> HelperReply:
        wait = _FIRST_WAIT_S
        for left in reversed(range(self._cfg.tries)):
            try:
                async with asyncio.timeout(self._cfg.timeout_s):
                    return await helper.respond(request)
            except TimeoutError as e:
                error = HelperError("timeout", f"no reply within {self._cfg.timeout_s:g} s", retry=True)
                error.__cause__ = e
            except HelperError as e:
                error = e
            if not (error.retry and left):
                raise error
            # Jitter (not reproducible, and affecting only time) keeps many rollouts from asking again at the same moment.
            pause = max(wait * random.uniform(0.5, 1.5), min(error.retry_after_s, _LONGEST_WAIT_S))
            await asyncio.sleep(pause)
            wait = min(2 * wait, _LONGEST_WAIT_S)
        raise AssertionError("unreachable")
