"""``coterie helpers test``: ask every configured helper once, and see what training would make of its reply."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coterie.console import make_console
from coterie.errors import CoterieError, UserError
from coterie.types import Source, Trajectory

if TYPE_CHECKING:
    from coterie.config import Config
    from coterie.helpers.roles import HelperSet
    from coterie.prompting import PromptEncoder

COLOURS = {Source.CONTEXT: "dim", Source.POLICY: "green", Source.HELPER: "magenta"}
helpers_app = typer.Typer(no_args_is_help=True, help="Models that the policy may ask while it works.")


def register(app: typer.Typer) -> None:
    app.add_typer(helpers_app, name="helpers")


@helpers_app.command("test", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def test(
    ctx: typer.Context,
    config: Annotated[Path, typer.Argument(help="TOML file with helper roles; values can be overridden.")],
    question: Annotated[
        str, typer.Option(help="The problem that the helpers are told about.")
    ] = "What is 17 + 25 - 8?",
    query: Annotated[str, typer.Option(help="What is asked.")] = "17 + 25 = 42",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a machine.")] = False,
) -> None:
    """One question per role: reply, latency, log-prob support, and token by token what would be trained on.

    Example: coterie helpers test configs/helpers.toml --query "Is 17 + 25 = 42?"
    """
    from coterie.config import load_config

    cfg = load_config(config, ctx.args)
    results = ask_all(cfg, question, query)
    if as_json:
        typer.echo(json.dumps(results, indent=2, ensure_ascii=False))
    else:
        console = make_console()
        for result in results:
            _show(console, result, cfg.loss.external_loss)
    lost = {r["role"]: r["reason"] for r in results if r["outcome"] != "ok"}
    if failed := [f"{role}: {reason.removeprefix(f'helper {role}: ')}" for role, reason in lost.items()]:
        raise CoterieError(f"helpers test: no usable reply from {'; '.join(failed)}")


def ask_all(cfg: Config, question: str, query: str) -> list[dict[str, Any]]:
    """Ask each role once, through the same state machine that training uses; only the policy's words are scripted.

    Raises:
        UserError: no roles, or a helper that cannot be opened as configured.
    """
    from coterie.helpers.roles import build_helpers, check_roles
    from coterie.models_io import load_tokenizer
    from coterie.policy import Policy
    from coterie.prompting import PromptEncoder

    if not cfg.helpers.roles:
        raise UserError("helpers test: the config has no [helpers.roles.*] section; see docs/helpers.md")
    check_roles(cfg)
    local = any(h.backend == "local" for h in cfg.helpers.roles.values())
    policy = Policy.load(cfg.model) if local else None
    encoder = policy.encoder if policy else PromptEncoder(load_tokenizer(cfg.model.name), cfg.model.system_prompt)
    with build_helpers(cfg, encoder, policy, want_logprobs=True) as helpers:
        return [_ask(helpers, encoder, role, question, query) for role in cfg.helpers.roles]


def _ask(helpers: HelperSet, encoder: PromptEncoder, role: str, question: str, query: str) -> dict[str, Any]:
    from coterie.engines.scripted import Answer, ScriptedEngine
    from coterie.helpers.dialogue import DialogueStart, run_dialogues
    from coterie.types import Sampling

    tags = helpers.form.roles[role].tags
    asked = f"{tags.start}{query}{tags.end}"
    prompt = helpers.prompt_ids(question)
    # Each turn's request holds the trajectory so far: the first is the bare prompt, the second ends with the reply.
    first = encoder.decode(prompt)
    engine = ScriptedEngine(encoder, lambda text, _: Answer(asked if text == first else "", math.nan))
    start = DialogueStart(question, prompt, 0)
    _, _, t = next(iter(run_dialogues(engine, [start], helpers, Sampling(helpers.budget.response))))
    consult = t.consults[0]
    reply = [s.text for s in t.segments if s.source is Source.HELPER]
    return {
        "role": role,
        "helper": consult.helper,
        "outcome": consult.outcome,
        "reason": t.failed or (consult.query if consult.outcome == "invalid" else ""),
        "reply": "".join(reply),
        "latency_s": round(consult.latency_s, 3),
        "offers_logprobs": helpers.offered_logprobs.get(role, False),
        "logprobs_usable": bool(reply) and bool(_helper_logprobs(t)),
        "tokens": _tokens(t, encoder),
    }


def _helper_logprobs(t: Trajectory) -> list[float]:
    known = zip(t.source, t.behavior_logprobs, strict=True)
    return [float(p) for s, p in known if s == Source.HELPER and math.isfinite(p)]


def _tokens(t: Trajectory, encoder: PromptEncoder) -> list[dict[str, Any]]:
    """The response token by token."""
    at = range(t.prompt_length, len(t.token_ids))
    return [
        {
            "id": int(t.token_ids[i]),
            "text": encoder.tokenizer.decode([int(t.token_ids[i])]),
            "source": Source(int(t.source[i])).name.lower(),
            "logprob": float(t.behavior_logprobs[i]) if math.isfinite(t.behavior_logprobs[i]) else None,
        }
        for i in at
    ]


def _show(console: Console, r: dict[str, Any], external_loss: str) -> None:
    trained = {"context": "no", "policy": "policy loss", "helper": f"external_loss = {external_loss}"}
    head = f"{r['role']}: {r['outcome']} from {r['helper'] or '-'} in {r['latency_s']:.2f} s"
    console.print(Text(head, style="bold" if r["outcome"] == "ok" else "bold red"))
    if r["reason"]:
        console.print(Text(r["reason"], style="red"))
    offered = "offered" if r["offers_logprobs"] else "not offered"
    usable = "and used (same tokens as the policy)" if r["logprobs_usable"] else "and not usable: mu is unknown"
    console.print(f"log-probs: {offered} {usable}")
    table = Table("token", "id", "source", "log-prob", "trained", box=None, pad_edge=False)
    for token in r["tokens"]:
        source = Source[token["source"].upper()]
        logprob = "" if token["logprob"] is None else f"{token['logprob']:.3f}"
        cells = (repr(token["text"]), str(token["id"]), token["source"], logprob, trained[token["source"]])
        table.add_row(*(Text(c, style=COLOURS[source]) for c in cells))
    console.print(table)
    console.print()
