"""Zenoh settings, one dictionary per role (client of relays, serverless mesh, relay).

Measured choices: shared memory off (it loses messages under CPU load and leaves files behind), multicast scouting off
(nothing is announced on a network unasked), admin space off, nodes are ``client`` because a relay never passes messages
between ``peer`` sessions. Ports beyond loopback are opened only if the user's endpoint names such an address.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import zenoh

from coterie.errors import UserError

_ENDPOINT = re.compile(r"^(tcp|tls|quic|ws|unixsock-stream)/\S+$")
LEASE_MS = 10_000


@dataclass(frozen=True)
class Security:
    """What the transport itself may check: TLS, mutual TLS, user and password. Paths to PEM files; "" = off."""

    ca: str = ""
    certificate: str = ""
    key: str = ""
    mutual: bool = False
    user: str = ""
    password: str = ""
    users_file: str = ""  # relay only: lines of user:password


def check_endpoints(endpoints: tuple[str, ...], what: str) -> None:
    for e in endpoints:
        if not _ENDPOINT.match(e):
            raise UserError(f"{what} {e!r}: an endpoint looks like tcp/HOST:7447 or tls/HOST:7447")


def node_config(connect: tuple[str, ...], listen: tuple[str, ...], security: Security) -> zenoh.Config:
    """A client of relays (``connect`` only), or a member of a small serverless mesh (``listen`` given)."""
    check_endpoints(connect, "connect")
    check_endpoints(listen, "listen")
    settings = _common(security, server=False)
    settings["mode"] = "peer" if listen else "client"
    settings["connect/endpoints"] = list(connect)
    settings["scouting/gossip/enabled"] = bool(listen)
    if listen:
        settings["listen/endpoints"] = list(listen)
        settings["connect/timeout_ms"] = -1
        settings["connect/exit_on_failure"] = False
    else:
        settings["connect/timeout_ms"] = 0
    return _build(settings)


def relay_config(
    listen: tuple[str, ...], connect: tuple[str, ...], security: Security, message_bytes: int, rate: float
) -> zenoh.Config:
    """A router with limits: bytes per message, groups per second and link, and no blocking behind a slow reader."""
    check_endpoints(listen, "listen")
    check_endpoints(connect, "connect")
    settings = _common(security, server=True)
    settings |= {
        "mode": "router",
        "listen/endpoints": list(listen),
        "connect/endpoints": list(connect),
        "scouting/gossip/enabled": False,
        "transport/unicast/max_sessions": 5000,
        "transport/unicast/accept_pending": 1000,
        "transport/link/rx/max_message_size": message_bytes + 4096,
        "transport/link/tx/queue/congestion_control/block/wait_before_close": 200_000,
        "low_pass_filter": [
            {
                "id": "size",
                "flows": ["ingress"],
                "messages": ["put", "query", "reply", "delete"],
                "key_exprs": ["**"],
                "size_limit": message_bytes,
            }
        ],
        "downsampling": [
            {
                "id": "rate",
                "flows": ["ingress"],
                "messages": ["put"],
                "rules": [{"key_expr": "coterie/**", "freq": rate}],
            }
        ],
        "qos/network": [
            {
                "id": "drop",
                "messages": ["put", "query", "delete"],
                "flows": ["ingress"],
                "overwrite": {"congestion_control": "drop"},
            }
        ],
    }
    if rate <= 0:
        del settings["downsampling"]
    return _build(settings)


def _common(s: Security, *, server: bool) -> dict[str, Any]:
    out: dict[str, Any] = {
        "scouting/multicast/enabled": False,
        "adminspace/enabled": False,
        "transport/shared_memory/enabled": False,
        "transport/link/tx/lease": LEASE_MS,
    }
    tls: dict[str, Any] = {"root_ca_certificate": s.ca} if s.ca else {}
    if s.certificate:
        side = "listen" if server else "connect"
        tls |= {f"{side}_certificate": s.certificate, f"{side}_private_key": s.key}
    if s.mutual:
        tls["enable_mtls"] = True
    if tls:
        out["transport/link/tls"] = tls
    login = {k: v for k, v in (("user", s.user), ("password", s.password)) if v}
    if server and s.users_file:
        login["dictionary_file"] = s.users_file
    if login:
        out["transport/auth/usrpwd"] = login
    return out


def _build(settings: dict[str, Any]) -> zenoh.Config:
    config = zenoh.Config()
    for key, value in settings.items():
        try:
            config.insert_json5(key, json.dumps(value))
        except zenoh.ZError as e:
            raise UserError(f"network setting {key} = {value!r} is not accepted: {e}") from e
    return config
