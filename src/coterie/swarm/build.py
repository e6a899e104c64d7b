"""From a config to a node: the identity, the exchange it names, and who may take part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.config import Config, SwarmConfig
from coterie.errors import UserError
from coterie.rng import derive
from coterie.swarm.access import Access, read_invite
from coterie.swarm.controller import AdaptiveShare, FixedShare
from coterie.swarm.exchange import Exchange
from coterie.swarm.identity import Identity, IdentityLock, new_identity, open_identity
from coterie.swarm.memory import MemoryHub
from coterie.swarm.node import LogprobFn, Node, SoloNode, SwarmNode
from coterie.swarm.verify import ProblemFn, Rebuilder, ScoreFn
from coterie.swarm.wire import Limits, WireError
from coterie.types import Problem

if TYPE_CHECKING:
    from coterie.prompting import PromptEncoder
    from coterie.swarm.zenoh_config import Security
    from coterie.tasks.taskset import TaskSet


@dataclass(frozen=True)
class Link:
    """A node's place in its swarm: who it is, what carries its groups, and whom it lets in."""

    identity: Identity
    exchange: Exchange
    access: Access
    unlock: Callable[[], None]  # lets another process have the identity

    def close(self) -> None:
        self.exchange.close()
        self.unlock()


def check_swarm(cfg: Config) -> None:
    """Refuse settings of a swarm that cannot be used; enters nothing and dials nobody.

    Raises:
        UserError: settings that contradict each other, or files that cannot be read.
    """
    swarm = cfg.swarm
    if swarm.exchange == "none":
        return
    make_access(swarm)
    _node_ids("trust", swarm.trust)
    if swarm.exchange == "network":
        from coterie.swarm.zenoh_config import check_endpoints

        if not (swarm.connect or swarm.listen):
            raise UserError("swarm.exchange = 'network' needs swarm.connect (relays to dial) or swarm.listen (a mesh)")
        check_endpoints(swarm.connect, "connect")
        check_endpoints(swarm.listen, "listen")
        security_of(swarm)


def open_link(cfg: Config, hub: MemoryHub | None = None) -> Link | None:
    """Enter the swarm that ``cfg.swarm`` names; None if it names no exchange. Before a model is loaded: who asks for the state
    of the swarm sees the node from now on.

    Args:
        hub: where the nodes of one process meet (``exchange = "memory"``).

    Raises:
        UserError: settings that contradict each other, unreadable files, an identity in use.
    """
    check_swarm(cfg)
    if cfg.swarm.exchange == "none":
        return None
    virtual = cfg.swarm.exchange == "memory"  # identity and clock are functions of the config: it can be repeated
    identity = _virtual_identity(cfg) if virtual else open_identity(identity_path(cfg))
    with ExitStack() as stack:
        if not virtual:
            stack.callback(IdentityLock(identity).close)
        exchange = make_exchange(cfg, identity, hub)
        return Link(identity, exchange, make_access(cfg.swarm), stack.pop_all().close)


def open_node(
    cfg: Config,
    link: Link | None,
    *,
    encoder: PromptEncoder,
    problem_of: ProblemFn,
    score: ScoreFn,
    logprobs: LogprobFn | None = None,
) -> Node:
    """The node at ``link``, which it closes in the end; a :class:`SoloNode` without one."""
    swarm = cfg.swarm
    if link is None:
        return SoloNode()
    longest = swarm.max_tokens or cfg.rollout.max_new_tokens
    limits = Limits(
        message_bytes=swarm.message_bytes,
        decompressed_bytes=16 * swarm.message_bytes,
        trajectories=swarm.max_trajectories,
        response_tokens=longest,
        response_chars=64 * longest,
        prompt_tokens=cfg.rollout.max_prompt_tokens,
    )
    return SwarmNode(
        swarm,
        link.identity,
        link.exchange,
        Rebuilder(problem_of, encoder, limits, Counter(), _node_ids("trust", swarm.trust)),
        score,
        access=link.access,
        share=AdaptiveShare(swarm.peer_groups) if swarm.ratio == "adaptive" else FixedShare(swarm.peer_groups),
        logprobs=logprobs,
        seed=derive(cfg.seed, "swarm", link.identity.node_id),
        clock=(lambda: 0.0) if swarm.exchange == "memory" else None,
        on_close=link.unlock,
    )


def _virtual_identity(cfg: Config) -> Identity:
    """Of a node that lives in one process with its peers."""
    seed = derive(cfg.seed, "identity", Path(cfg.run_dir).name)
    return replace(new_identity(seed.to_bytes(32, "little")), session=1)


def training_problems(tasks: TaskSet) -> ProblemFn:
    """Problems a peer may send to a run with these tasks: theirs, without the held-out ones (a peer that sends those
    would spoil every measurement)."""
    from coterie.tasks.taskset import split_of

    def find(problem_id: str) -> Problem:
        problem = tasks.problem_from_id(problem_id)
        if split_of(problem) == "eval":
            raise WireError("held_out", f"{problem_id[:200]!r} is held out for evaluation", signed=True)
        return problem

    return find


def make_access(swarm: SwarmConfig) -> Access:
    invite = read_invite(swarm.invite_file) if swarm.invite_file else None
    return Access(swarm.name, allow=_node_ids("allow", swarm.allow), invite=invite)


def _node_ids(setting: str, nodes: Collection[str]) -> frozenset[str]:
    for node in nodes:
        if len(node) != 64 or set(node) - set("0123456789abcdef"):
            raise UserError(f"swarm.{setting}: {node!r} is not a node id (64 hex digits; see `coterie swarm identity`)")
    return frozenset(nodes)


def identity_path(cfg: Config) -> Path:
    return Path(cfg.swarm.identity or Path(cfg.run_dir) / "identity.pem")


def exchange_path(cfg: Config) -> Path:
    return Path(cfg.swarm.path or Path(cfg.run_dir).parent / "swarm.sqlite")


def security_of(swarm: SwarmConfig) -> Security:
    from coterie.swarm.zenoh_config import Security

    password = ""
    if swarm.password_file:
        try:
            password = Path(swarm.password_file).read_text(encoding="utf-8").strip()
        except OSError as e:
            raise UserError(f"swarm.password_file {swarm.password_file}: {e.strerror}") from e
    return Security(
        ca=swarm.tls_ca,
        certificate=swarm.tls_certificate,
        key=swarm.tls_key,
        mutual=bool(swarm.tls_certificate),
        user=swarm.user,
        password=password,
    )


def make_exchange(cfg: Config, identity: Identity, hub: MemoryHub | None) -> Exchange:
    swarm = cfg.swarm
    if swarm.exchange == "memory":
        if hub is None:
            raise UserError(
                "swarm.exchange = 'memory' joins nodes of one process (simulation); use 'local' or 'network'"
            )
        return hub.join(cfg.seed, identity.node_id)
    if swarm.exchange == "local":
        from coterie.swarm.local import LocalExchange

        return LocalExchange(exchange_path(cfg), identity.node_id, seed=cfg.seed)
    from coterie.swarm.network import NetworkExchange

    return NetworkExchange(
        swarm.name,
        identity,
        swarm.connect,
        listen=swarm.listen,
        security=security_of(swarm),
        published=float(cfg.rollout.problems),
        pace=swarm.pace,
        seed=cfg.seed,
    )
