"""``coterie swarm ...``: run several nodes here, join a network, serve as a relay, see who is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from coterie.console import make_console, say
from coterie.errors import CoterieError, UserError

if TYPE_CHECKING:
    from coterie.config import Config, SwarmConfig

app = typer.Typer(no_args_is_help=True, help="Share experience between nodes.")
_OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a machine.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check config and tasks, print the resolved config, stop.")]
ConfigPath = Annotated[Path, typer.Argument(help="TOML file; any value can be overridden: --optim.lr 1e-4")]
Connect = Annotated[list[str], typer.Option("--connect", help="Relay to dial, e.g. tcp/HOST:7447; may be repeated.")]
Name = Annotated[str, typer.Option("--name", help="Name of the swarm.")]
Ca = Annotated[
    str, typer.Option("--tls-ca", help="PEM file of the authority that signed the other side's certificate.")
]


def register(parent: typer.Typer) -> None:
    """Add ``swarm`` to the ``coterie`` command."""
    parent.add_typer(app, name="swarm")


@app.command(context_settings=_OVERRIDES)
def run(
    ctx: typer.Context,
    config: ConfigPath,
    nodes: Annotated[int, typer.Option(min=1, help="Processes on this machine.")] = 4,
    simulate: Annotated[int, typer.Option(min=0, help="Instead: so many nodes in one process, in turn.")] = 0,
    dry_run: DryRun = False,
) -> None:
    """Several nodes on this machine, sharing through a file; one table, one report.

    Example: coterie swarm run configs/swarm.toml --nodes 4 --run_dir runs/swarm
    """
    from coterie.config import load_config

    cfg = load_config(config, ctx.args)
    if dry_run:
        _dry_run(cfg)
        return
    if simulate:
        from coterie.simulate import simulate as run_simulation

        dirs = [s.run_dir for s in run_simulation(cfg, simulate, lambda step, _: typer.echo(f"step {step}"))]
    else:
        from coterie.swarm.launch import start, watch

        children = start(config, ctx.args, cfg, nodes)
        say(f"nodes: {nodes} started; each prints to its log in {cfg.run_dir}, node_0.log and so on")
        watch(children, cfg.steps, make_console())
        dirs = [c.run_dir for c in children]
    from coterie.report import write_report

    typer.echo(f"report: {write_report(dirs, Path(cfg.run_dir) / 'report.html')}")


@app.command(context_settings=_OVERRIDES)
def join(ctx: typer.Context, config: ConfigPath, connect: Connect, dry_run: DryRun = False) -> None:
    """Train one node that shares over the network. It only dials out: no port is opened, NAT is no obstacle.

    Example: coterie swarm join configs/swarm.toml --connect tcp/relay.example.org:7447 --run_dir runs/mine
    """
    from coterie.config import load_config

    where = json.dumps(connect)
    cfg = load_config(config, [*ctx.args, "--swarm.exchange", "network", "--swarm.connect", where])
    if dry_run:
        _dry_run(cfg)
        return
    from coterie.report import write_report
    from coterie.run import train

    done = train(cfg)
    typer.echo(f"report: {write_report([done.run_dir], done.run_dir / 'report.html')}")


def _dry_run(cfg: Config) -> None:
    from coterie.run import dry_run

    dry_run(cfg)
    typer.echo(cfg.to_toml(), nl=False)


@app.command()
def relay(
    listen: Annotated[list[str] | None, typer.Option(help="Endpoint to open; default tcp/127.0.0.1:7447.")] = None,
    connect: Annotated[list[str] | None, typer.Option(help="Other relays to link with.")] = None,
    max_message: Annotated[int, typer.Option(min=1024, help="Larger messages are dropped (bytes).")] = 262_144,
    rate: Annotated[float, typer.Option(min=0, help="Messages per second from one node; 0: no limit.")] = 200.0,
    tls_certificate: Annotated[str, typer.Option(help="PEM certificate, for tls/ endpoints.")] = "",
    tls_key: Annotated[str, typer.Option(help="PEM key of the certificate.")] = "",
    tls_ca: Ca = "",
    mutual: Annotated[bool, typer.Option(help="Ask nodes for a certificate signed by --tls-ca.")] = False,
    users_file: Annotated[str, typer.Option(help="Lines of user:password; read at the start only.")] = "",
) -> None:
    """A meeting point for nodes that can only dial out. Loopback only unless --listen names another address.

    Example: coterie swarm relay --listen tcp/0.0.0.0:7447
    """
    from coterie.swarm.relay import DEFAULT_LISTEN, Relay, serve
    from coterie.swarm.zenoh_config import Security

    where = tuple(listen or [DEFAULT_LISTEN])
    security = Security(ca=tls_ca, certificate=tls_certificate, key=tls_key, mutual=mutual, users_file=users_file)
    server = Relay(where, connect=tuple(connect or ()), security=security, message_bytes=max_message, rate=rate)
    typer.echo(f"relay: listening on {', '.join(where)}")
    serve(server, lambda text: typer.echo(text))


@app.command()
def status(
    connect: Connect = [],  # noqa: B006  (typer's way of a repeatable option)
    path: Annotated[Path | None, typer.Option(help="File of a local exchange instead.")] = None,
    name: Name = "swarm",
    tls_ca: Ca = "",
    tls_certificate: Annotated[str, typer.Option(help="Own PEM certificate, for a relay that asks for one.")] = "",
    tls_key: Annotated[str, typer.Option(help="PEM key of the certificate.")] = "",
    user: Annotated[str, typer.Option(help="User name for the relay.")] = "",
    password_file: Annotated[str, typer.Option(help="File with the password.")] = "",
    as_json: Json = False,
) -> None:
    """Who is there, what they do, how they are. What a node says about itself is its own claim.

    Example: coterie swarm status --connect tcp/relay.example.org:7447
    """
    from coterie.config import SwarmConfig

    if bool(connect) == (path is not None):
        raise UserError("swarm status needs either --connect RELAY or --path FILE")
    if path is not None:
        rows = _local_rows(path)
    else:
        rows = _network_rows(
            name,
            connect,
            SwarmConfig(
                tls_ca=tls_ca, tls_certificate=tls_certificate, tls_key=tls_key, user=user, password_file=password_file
            ),
        )
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    if rows:
        _show_nodes(rows)
    there = "1 node" if len(rows) == 1 else f"{len(rows)} nodes"
    if not rows:
        elsewhere = "; --name asks for another swarm than 'swarm'" if connect else ""
        there += f" now (a node enters when it starts, and reports after its first step{elsewhere})"
    elif waiting := sum(r["state"] == "starting" for r in rows):
        there += f", {waiting} of them without a report yet (nodes report after their first step)"
    typer.echo(there)


def _show_nodes(rows: list[dict[str, Any]]) -> None:
    table = Table("node", "state", "step", "tasks", "published", "used", "held-out", "seen", box=None)
    for r in rows:
        accuracy = r.get("accuracy")
        shown = f"{accuracy:.3f}" if isinstance(accuracy, float) else ""
        cells = (r["name"], r["state"], r.get("step", ""), len(_mix(r)) or "", r.get("published", ""))
        table.add_row(*(_plain(c, 40) for c in (*cells, r.get("used", ""), shown, r["seen"])))
    make_console().print(table)
    for r in rows:
        mix = ", ".join(f"{t} {n}" for t, n in _mix(r).items())
        troubles = r.get("troubles")
        named = "; ".join(map(str, troubles)) if isinstance(troubles, list) else ""
        parts = (r.get("cause"), mix and f"groups published: {mix}", named and f"trouble with {named}")
        if said := "; ".join(str(x) for x in parts if x):
            typer.echo(f"{r['name']}: {_plain(said, 300)}")


def _mix(row: dict[str, Any]) -> dict[str, Any]:
    """Task -> groups published, as the node says."""
    tasks = row.get("tasks")
    return tasks if isinstance(tasks, dict) else {}


def _plain(value: object, most: int) -> Text:
    """What a stranger wrote, without control characters, markup and excess."""
    return Text("".join(c if c.isprintable() else "?" for c in str(value))[:most])


def _local_rows(path: Path) -> list[dict[str, Any]]:
    from coterie.swarm.local import ALIVE_S, read_nodes

    rows = [_row(node, info, f"{age:.0f} s ago") | {"age": age} for node, _, age, info in read_nodes(path)]
    for row in rows:
        if row.pop("age") > ALIVE_S and row["state"] != "starting":  # a model may load, and be evaluated, for longer
            row["state"] = f"silent, last {row['state']}"
    return rows


def _network_rows(name: str, connect: list[str], access: SwarmConfig) -> list[dict[str, Any]]:
    import zenoh

    from coterie.swarm.build import security_of
    from coterie.swarm.network import read_swarm

    try:
        found = read_swarm(name, tuple(connect), security_of(access))
    except zenoh.ZError as e:
        raise CoterieError(f"no relay answers at {', '.join(connect)}") from e
    return [_row(node, info, "now") for node, info in found]


def _row(node: str, info: str, seen: str) -> dict[str, Any]:
    """What is known of a node: its own words, and whether it has said anything yet."""
    from coterie.swarm.network import describe

    return {"state": "unknown" if info else "starting"} | describe(info, node) | {"seen": seen}


@app.command()
def identity(
    path: Annotated[Path, typer.Argument(help="Key file, e.g. runs/mine/identity.pem; made if missing.")],
    export: Annotated[Path | None, typer.Option(help="Copy the private key there (keep it safe).")] = None,
    import_from: Annotated[Path | None, typer.Option("--import", help="Install this exported key at PATH.")] = None,
    as_json: Json = False,
) -> None:
    """Show, export or import a node's identity. Losing the key file loses the identity.

    Example: coterie swarm identity runs/mine/identity.pem --export backup.pem
    """
    from coterie.swarm.identity import export_identity, import_identity, open_identity, peek_identity

    if import_from is not None:
        import_identity(import_from, path)
    me = peek_identity(path) if path.exists() else open_identity(path)
    if export is not None:
        export_identity(path, export)
    if as_json:
        typer.echo(json.dumps({"name": me.name, "node": me.node_id, "path": str(path)}))
    else:
        typer.echo(f"{me.name}\n{me.node_id}" + (f"\nexported to {export}" if export is not None else ""))


@app.command()
def invite(path: Annotated[Path, typer.Argument(help="File to write.")]) -> None:
    """Make a shared secret for a closed swarm; give the file to its members and set swarm.invite_file.

    Example: coterie swarm invite invite.txt
    """
    from coterie.swarm.access import write_invite

    write_invite(path)
    typer.echo(f"{path}: hand it to members by a private channel")


@app.command(context_settings=_OVERRIDES)
def contribute(
    ctx: typer.Context,
    config: ConfigPath,
    inbox: Annotated[
        Path | None, typer.Option(help='Send this JSONL instead: {"problem": ID, "answers": [TEXT, ...]} per line.')
    ] = None,
    follow: Annotated[bool, typer.Option(help="Keep reading what is appended to the inbox.")] = False,
    every: Annotated[float, typer.Option(min=0, help="Seconds per step of the frozen model, at least.")] = 2.0,
) -> None:
    """Send groups without training: the config's model as it is, for `steps` steps, or answers of a script or a person.

    Example: coterie swarm contribute configs/swarm.toml --run_dir runs/pair/frozen --steps 100
    """
    from coterie.config import load_config

    cfg = load_config(config, ctx.args)
    if cfg.swarm.exchange not in ("local", "network"):
        raise UserError("swarm contribute needs --swarm.exchange local or network")
    if inbox is None:
        from coterie.swarm.frozen import contribute_rollouts

        sent = contribute_rollouts(cfg, every, typer.echo)
    else:
        sent = _send_inbox(cfg, inbox, follow)
    typer.echo(f"{sent} groups sent")


def _send_inbox(cfg: Config, inbox: Path, follow: bool) -> int:
    from coterie.swarm.build import check_swarm, make_access, make_exchange, training_problems
    from coterie.swarm.contribute import contribute as send
    from coterie.swarm.identity import IdentityLock, open_identity
    from coterie.tasks.taskset import build_tasks

    check_swarm(cfg)
    find = training_problems(build_tasks(cfg.tasks))
    me = open_identity(cfg.swarm.identity or inbox.with_suffix(".identity.pem"))
    lock = IdentityLock(me)
    try:
        exchange = make_exchange(cfg, me, None)
        typer.echo(f"contributing as {me.name}")
        try:
            return send(
                inbox,
                exchange,
                me,
                make_access(cfg.swarm),
                cfg.swarm.name,
                find,
                follow=follow,
                state=cfg.swarm.send_problems,
                say=typer.echo,
            )
        finally:
            exchange.close()
    finally:
        lock.close()
