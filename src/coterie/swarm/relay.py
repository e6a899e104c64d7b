"""``coterie swarm relay``: a meeting point for nodes that can only dial out. A zenoh router session with limits.

It needs no torch, no identity and no disk; it sees all groups in clear unless the swarm uses an invite. Relays can be
linked (``--connect``); nodes given several relays move to another one by themselves.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zenoh

from coterie.errors import CoterieError, UserError
from coterie.swarm.zenoh_config import Security, relay_config

DEFAULT_LISTEN = "tcp/127.0.0.1:7447"


class Relay:
    """A running relay.

    Args:
        listen: endpoints to open; loopback only unless they name another address.
        message_bytes: larger messages are dropped.
        rate: messages per second from one connection: what follows sooner is dropped, so nodes pace their sending
            well below it; 0: no limit.
    """

    def __init__(
        self,
        listen: tuple[str, ...] = (DEFAULT_LISTEN,),
        *,
        connect: tuple[str, ...] = (),
        security: Security | None = None,
        message_bytes: int = 262_144,
        rate: float = 200.0,
    ) -> None:
        tls = security or Security()
        if any(e.startswith(("tls/", "quic/")) for e in listen) and not (tls.certificate and tls.key):
            raise UserError("relay: a tls/ endpoint needs --tls-certificate and --tls-key")
        if tls.users_file and not Path(tls.users_file).is_file():
            raise UserError(f"relay: --users-file {tls.users_file}: no such file")
        config = relay_config(listen, connect, security or Security(), message_bytes, rate)
        try:
            self._session: Any = zenoh.open(config)
        except zenoh.ZError as e:
            raise CoterieError(f"relay: cannot open {', '.join(listen)}: {str(e).split(' at ')[0]}") from e

    def links(self) -> int:
        """Connected sessions."""
        info = self._session.info
        return len(list(info.transports()))

    def close(self) -> None:
        self._session.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(relay: Relay, say: Callable[[str], None], every_s: float = 5.0) -> None:
    """Run until SIGINT or SIGTERM, saying now and then how many sessions are connected (when that has changed)."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    said = -1
    while not stop.wait(every_s if said >= 0 else 0.1):
        if relay.links() != said:
            said = relay.links()
            say(f"relay: {said} connected")
    relay.close()
