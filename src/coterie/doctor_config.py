"""The part of ``coterie doctor`` that reads a config: does its model fit, do the helpers and relays it names answer?"""

from __future__ import annotations

import json
import math
import os
import socket
import ssl
import time
from pathlib import Path
from urllib.parse import urlsplit

from coterie.config import Config, SwarmConfig
from coterie.doctor import Check, available_memory, disk, existing
from coterie.errors import UserError

_WAIT_S = 3.0
_GIB = 2**30


def config_checks(cfg: Config) -> tuple[list[Check], list[float]]:
    """Checks of what ``cfg`` names, and this clock minus that of each peer heard on the way, in seconds."""
    found = [_settings(cfg), *_model(cfg)]
    found += [_helper(role, h.url, h.key_env) for role, h in cfg.helpers.roles.items() if h.backend == "openai"]
    if cfg.swarm.exchange == "local":
        found.append(_swarm_file(cfg))
    skews: list[float] = []
    if cfg.swarm.exchange == "network":
        dialled = [dial(e, cfg.swarm) for e in cfg.swarm.connect]
        found += dialled
        if any(c.level == "ok" for c in dialled):
            swarm, skews = _swarm(cfg.swarm)
            found.append(swarm)
    return found, skews


def _settings(cfg: Config) -> Check:
    from coterie.run import dry_run
    from coterie.swarm.build import make_access

    try:
        dry_run(cfg)
        make_access(cfg.swarm)
    except UserError as e:
        return Check("config", "fail", str(e), "correct the config; `coterie train CONFIG --dry-run` checks it again")
    return Check("config", "ok", f"{len(cfg.tasks)} tasks, run_dir {cfg.run_dir}")


def _model(cfg: Config) -> list[Check]:
    """Is the model there, and do training and its checkpoints fit? Nothing for models that are not in a folder yet."""
    from coterie.models_io import locate

    if cfg.model.name == "smollm2":  # made from its package at first use
        return []
    try:
        folder = Path(locate(cfg.model.name))
    except UserError as e:
        return [Check("model", "fail", str(e))]
    count = parameters(folder) if folder.is_dir() else None
    if count is None:
        return [Check("model", "note", f"{cfg.model.name}: not in a folder here", "it is fetched, or found in the cache, at the start")]  # fmt: skip # noqa: E501
    full = cfg.model.lora_rank == 0
    need, copies = count * (16 if full else 4), cfg.checkpoint.keep + 1
    size = f"{cfg.model.name}: {count / 1e6:.1f}M parameters"
    plan = f"{size}; weights{', gradients and moments' if full else ''} take {need / _GIB:.1f} GiB, activations more"
    fits = need < available_memory() or cfg.model.device.startswith("cuda")
    advice = "" if fits else "more than is free: train adapters (model.lora_rank = 16), or take a smaller model"
    model = Check("model", "ok" if fits else "fail", plan, advice)
    room = disk(Path(cfg.run_dir), need=count * 12 * copies if full else count * 4)
    return [model] if room.level == "ok" else [model, room]


def parameters(folder: Path) -> int | None:
    """Values in a folder's safetensors files, by their headers; None if it has none."""
    from safetensors import safe_open

    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="np") as weights:
            total += sum(math.prod(weights.get_slice(k).get_shape()) for k in weights.keys())  # noqa: SIM118
    return total or None


def _helper(role: str, url: str, key_env: str) -> Check:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    name = f"helper {role}"
    if key_env and not os.environ.get(key_env):
        return Check(name, "fail", f"the environment variable {key_env} is not set", f"export {key_env}=...")
    if (why := _refusal(parts.hostname or "", port)) is not None:
        return Check(
            name, "fail", f"{url}: {why}", "start the endpoint, or correct its url; `coterie helpers test` asks it"
        )
    return Check(name, "ok", f"{url}: answers")


def _swarm_file(cfg: Config) -> Check:
    """SQLite's locks need a local file system."""
    from coterie.swarm.build import exchange_path

    file = exchange_path(cfg)
    kind = file_system(existing(file.parent))
    if kind in ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "lustre"):
        return Check("swarm file", "fail", f"{file}: on a network file system ({kind})",
                     "set swarm.path to a local disk, or use the network exchange with a relay")  # fmt: skip
    return Check("swarm file", "ok", str(file))


def file_system(folder: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """Kind of file system that holds ``folder``; "" where that cannot be known."""
    if not mounts.exists():
        return ""
    rows = [line.split() for line in mounts.read_text().splitlines()]
    at = [(len(r[1]), r[2]) for r in rows if len(r) > 2 and folder.resolve().is_relative_to(r[1])]
    return max(at)[1] if at else ""


def dial(endpoint: str, cfg: SwarmConfig) -> Check:
    """Try one relay the way a node would: find the host, connect, and for tls/ check its certificate."""
    kind, _, where = endpoint.partition("/")
    name = f"relay {endpoint}"
    host, _, port = where.partition("#")[0].partition("?")[0].rpartition(":")
    if kind not in ("tcp", "tls", "ws"):
        return Check(name, "note", "this kind of endpoint is not dialled here", "the swarm check below uses it")
    if not port.isdigit() or not host:
        return Check(name, "fail", "not an endpoint", "write tcp/HOST:7447 or tls/HOST:7447")
    host = host.strip("[]")
    if (why := _refusal(host, int(port))) is not None:
        advice = (
            f"is `coterie swarm relay` running there, does it listen on an address others can reach (tcp/0.0.0.0:{port}, "
            f"not 127.0.0.1), and do firewalls let TCP port {port} through? Try: nc -vz {host} {port}"
        )
        return Check(name, "fail", why, advice)
    if kind == "tls" and (bad := _certificate(host, int(port), cfg)) is not None:
        return Check(name, "fail", *bad)
    return Check(name, "ok", "answers" + (", its certificate is good" if kind == "tls" else ""))


def _refusal(host: str, port: int) -> str | None:
    """Why no TCP connection can be made; None if it can."""
    try:
        socket.create_connection((host, port), timeout=_WAIT_S).close()
    except socket.gaierror:
        return f"no host is called {host}"
    except TimeoutError:
        return f"no answer within {_WAIT_S:.0f} s (a firewall that drops packets looks like this)"
    except ConnectionRefusedError:
        return "connection refused: the host is there, nothing listens on that port"
    except OSError as e:
        return str(e.strerror or e)
    return None


def _certificate(host: str, port: int, cfg: SwarmConfig) -> tuple[str, str] | None:
    """(what is wrong, what to do) with the relay's certificate, or with the files that this node would show it."""
    try:
        context = ssl.create_default_context(cafile=cfg.tls_ca or None)
        if cfg.tls_certificate:
            context.load_cert_chain(cfg.tls_certificate, cfg.tls_key or None)
        with socket.create_connection((host, port), timeout=_WAIT_S) as raw:
            context.wrap_socket(raw, server_hostname=host).close()
    except ssl.SSLCertVerificationError as e:
        if "expired" in e.verify_message or "not yet valid" in e.verify_message:
            now = time.strftime("%Y-%m-%d", time.gmtime())
            return f"TLS: {e.verify_message} (this clock says {now})", "correct this clock, or renew the certificate"
        return (
            f"TLS: {e.verify_message}",
            "set swarm.tls_ca to the PEM of the authority that signed the relay's certificate",
        )
    except (ssl.SSLError, OSError) as e:
        return f"TLS: {e}", "check that the relay listens on tls/, and swarm.tls_ca, tls_certificate and tls_key"
    return None


def _swarm(cfg: SwarmConfig) -> tuple[Check, list[float]]:
    """Enter as a reader, as ``coterie swarm status`` does: who is there, and what do their clocks say?"""
    import zenoh

    from coterie.swarm.build import security_of
    from coterie.swarm.network import read_swarm

    try:
        said = read_swarm(cfg.name, cfg.connect, security_of(cfg))
    except UserError as e:
        return Check("swarm", "fail", str(e)), []
    except zenoh.ZError:
        return Check("swarm", "fail", "something answers there, but lets this node not in as a relay would",
                     "is it a coterie relay? Does it ask for a user (swarm.user, swarm.password_file) or for a certificate "
                     "(swarm.tls_certificate, swarm.tls_key)?"), []  # fmt: skip
    heard = [_clock_of(info) for _, info in said]
    skews = [time.time() - at for at in heard if at is not None]
    return Check("swarm", "ok", f"{len(said)} nodes of swarm {cfg.name!r} are there"), skews


def _clock_of(info: str) -> float | None:
    """Seconds since 1970 by the clock of the node that sent ``info`` a moment ago; None if it does not say."""
    try:
        return float(json.loads(info)["clock_ms"]) / 1000
    except (ValueError, KeyError, TypeError):
        return None
