"""A termination signal ends what a command has started, as an interrupt from the keyboard does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def sigterm_interrupts(first: Callable[[], None] = lambda: None) -> Iterator[None]:
    """SIGTERM calls ``first`` and raises KeyboardInterrupt, so that ``finally`` blocks run. Nothing outside the main thread,
    which gets no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: Any) -> None:
        first()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
