"""The helpers of a run: roles with their backends, tags, texts and budget, opened and closed together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from coterie.config import Config, HelperConfig, HelpersConfig
from coterie.errors import UserError
from coterie.helpers.budget import make_budget
from coterie.helpers.openai import OpenAIHelper
from coterie.helpers.pool import HelperPool
from coterie.helpers.prompts import Form, RolePrompt, load_form
from coterie.helpers.protocol import HelperReply, HelperRequest, InProcessHelper, Outcome, Tags, tag_strings
from coterie.helpers.sanitise import sanitise, strip_think
from coterie.helpers.scripted import call_helper, table_helper

if TYPE_CHECKING:
    from coterie.engines.base import Engine
    from coterie.policy import Policy
    from coterie.prompting import PromptEncoder

Helper = OpenAIHelper | InProcessHelper  # waited for while rows decode | asked between rounds
_CHARS_PER_TOKEN = 16  # more than any tokenizer averages; bounds the work on a giant reply


@dataclass(frozen=True, slots=True)
class Body:
    """A reply ready to insert: ids of the policy's tokenizer, log-probs (NaN: unknown), the text, whether it was cut."""

    token_ids: list[int]
    logprobs: list[float]
    text: str
    cut: bool


class HelperSet:
    """All helpers of a run, with everything that depends on the policy's tokenizer worked out. A context manager."""

    def __init__(
        self,
        cfg: HelpersConfig,
        encoder: PromptEncoder,
        max_response: int,
        helpers: Mapping[str, Helper],
        form: Form,
        *,
        context: int | None = None,
        span_mu: bool = False,
    ) -> None:
        """``context``: longest sequence the policy takes; None is unlimited. ``span_mu``: the loss wants log-probs of whole
        replies where those of their tokens are unknown."""
        self.span_mu = span_mu
        self.cfg = cfg
        self.encoder = encoder
        self.context = context
        self.form = form
        self.helpers = dict(helpers)
        self.offered_logprobs: dict[str, bool] = {}  # role -> whether its last reply came with log-probs
        self.tags: tuple[Tags, ...] = tuple(form.roles[r].tags for r in cfg.roles)
        self.end_tags = tuple(dict.fromkeys(t.end for t in self.tags))
        limits = {role: h.limit for role, h in cfg.roles.items()}
        self.block = form.system_block(limits)
        texts = {"open": form.open, "close": form.close, "close_cut": form.close_cut}
        texts |= {kind: form.note(kind, limits) for kind in form.notes}
        self.texts = texts
        self.ids = {name: encode_inner(encoder, text) for name, text in texts.items()}
        for name, text in [*texts.items(), *((f"{t.role} tag", s) for t in self.tags for s in (t.start, t.end))]:
            _check_writable(encoder, name, text)
        wrappers = len(self.ids["open"]) + max(len(self.ids["close"]), len(self.ids["close_cut"]))
        self.budget = make_budget(cfg, max_response, wrappers, len(self.ids["unavailable"]))
        ends = encoder.tokenizer.convert_ids_to_tokens(sorted(encoder.eos_ids))
        special = [t for t in dict.fromkeys((*encoder.tokenizer.all_special_tokens, *ends)) if t]
        around = [s.strip() for s in (form.open, form.close) if s]
        self._forbidden = [*around, *tag_strings(self.tags), *special]
        self._special_ids = frozenset({*encoder.tokenizer.all_special_ids, *encoder.eos_ids})
        self.pool = HelperPool(cfg) if any(isinstance(h, OpenAIHelper) for h in helpers.values()) else None

    def __enter__(self) -> HelperSet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.pool is not None:
            self.pool.close(*(h.aclose() for h in self.helpers.values() if isinstance(h, OpenAIHelper)))

    def prompt_ids(self, prompt: str) -> list[int]:
        """Ids of the tagged prompt (evaluation modes `tagged` and `helped`, and helped trajectories in training)."""
        if not self.encoder.tokenizer.chat_template:
            return self.encoder.prompt_ids(f"{self.block}\n\n{prompt}" if self.block else prompt)
        system = "\n\n".join(s for s in (self.encoder.system_prompt, self.block) if s)
        return self.encoder.prompt_ids(prompt, system=system)

    def available(self) -> bool:
        """False while every helper is down: roll out solo until one is back."""
        if self.pool is None:
            return True
        pool = self.pool
        return any(not (isinstance(h, OpenAIHelper) and pool.resting(h)) for h in self.helpers.values())

    def remote(self, role: str) -> bool:
        return isinstance(self.helpers[role], OpenAIHelper)

    def submit(self, request: HelperRequest) -> Future[Outcome]:
        """Ask a remote helper; returns at once."""
        helper = self.helpers[request.role]
        assert self.pool is not None and isinstance(helper, OpenAIHelper)
        return self.pool.submit(helper, request)

    def respond_batch(self, role: str, requests: Sequence[HelperRequest]) -> list[Outcome]:
        """Ask a helper of this process; returns when all are answered."""
        helper = self.helpers[role]
        assert not isinstance(helper, OpenAIHelper)
        return helper.respond_batch(requests)

    def max_tokens(self, role: str) -> int:
        return self.cfg.roles[role].max_tokens or self.cfg.feedback_tokens

    def body(self, role: str, reply: HelperReply) -> Body:
        """A reply as it goes into the trajectory; no ids if nothing usable is left of it.

        A reply in the policy's own tokens that needs no cleaning keeps its ids and log-probs (cutting at a token leaves
        the log-probs of the rest exact). Any other is cleaned and encoded; see :meth:`_shared` for its log-probs.
        """
        cap = self.cfg.feedback_tokens
        cut_answers = self.form.roles[role].cut_answers
        if reply.token_ids is not None:
            ids = list(reply.token_ids)
            while ids and ids[-1] in self.encoder.eos_ids:
                ids.pop()
            kept = ids[:cap]
            inner = self.encoder.decode(kept) if self._known(kept) else ""
            if inner.strip() and sanitise(inner, self._forbidden, cut_answers=cut_answers) == inner:
                known = [math.nan] * len(kept) if reply.logprobs is None else list(reply.logprobs[: len(kept)])
                return Body(kept, known, inner, len(ids) > cap)
        shown = strip_think(reply.text)
        limit = cap * _CHARS_PER_TOKEN
        clean = sanitise(shown[:limit], self._forbidden, cut_answers=cut_answers).strip()
        # What is special here is the mark for characters that the tokenizer does not know: those are left out.
        ids = [i for i in encode_inner(self.encoder, clean) if i not in self._special_ids] if clean else []
        kept = ids[:cap]
        inner = clean if len(kept) == len(ids) else self.encoder.decode(kept)
        logprobs = self._shared(reply, len(kept)) if inner == reply.text else [math.nan] * len(kept)
        return Body(kept, logprobs, inner, len(kept) < len(ids) or len(shown) > limit)

    def _shared(self, reply: HelperReply, n: int) -> list[float]:
        """Log-probs of the ``n`` policy tokens of a reply inserted whole, of which that of the text is known.

        One token has it all, and the tokens of a text that was certain are certain. With ``loss.mu_source = "span"`` any
        other text's is shared out evenly, for a loss that only looks at its mean over the reply.
        """
        total = reply.span_logprob
        if total is None or not (n == 1 or total == 0.0 or self.span_mu):
            return [math.nan] * n
        return [total / n] * n

    def _known(self, ids: Sequence[int]) -> bool:
        size = len(self.encoder.tokenizer)
        return all(0 <= i < size and i not in self._special_ids for i in ids)


def encode_inner(encoder: PromptEncoder, text: str) -> list[int]:
    """Ids of ``text`` as it reads in the middle of a text.

    SentencePiece tokenizers put a space before the first word of whatever they encode; encoding after a short sentinel
    and slicing it off avoids that. Where the sentinel merges with the text, the text is encoded alone.
    """
    sentinel = "a" if text[:1].isspace() else "\n"
    before, both = encoder.encode(sentinel), encoder.encode(sentinel + text)
    clean = before and both[: len(before)] == before and encoder.decode(before).strip("\n") in ("", "a")
    return both[len(before) :] if clean and encoder.decode(before) == sentinel else encoder.encode(text)


def _check_writable(encoder: PromptEncoder, name: str, text: str) -> None:
    got = encoder.decode(encode_inner(encoder, text))
    if got.strip() != text.strip():
        raise UserError(
            f"helpers: the model's tokenizer cannot write the {name} {text!r} (it comes back as {got!r}); choose other "
            f"characters in helpers.prompts, or helpers.form = 'short'"
        )


def build_helpers(
    cfg: Config, encoder: PromptEncoder, policy: Policy | None = None, *, want_logprobs: bool = False
) -> HelperSet:
    """Open every helper named in ``cfg.helpers.roles``.

    ``policy``: with LoRA, the model `base` is this one with its adapters off; otherwise a frozen copy is loaded.
    ``want_logprobs``: ask endpoints for log-probs even where they cannot be used (to see whether they are offered).

    Raises:
        UserError: a role without a prompt, an endpoint without URL, model or key, a model that cannot be loaded, tags
            that the policy's tokenizer cannot write, or budgets that leave no room for any reply.
    """
    span_mu = cfg.loss.mu_source == "span"
    form, opened = _open(cfg, want_logprobs or span_mu)
    load = _LocalModels(cfg, encoder, policy)
    helpers: dict[str, Helper] = {}
    for role, helper in opened.items():
        h = cfg.helpers.roles[role]
        helpers[role] = helper or load(h.model or "base", form.roles[role], h.temperature)
    context = _context(policy) if policy is not None else None
    return HelperSet(cfg.helpers, encoder, cfg.rollout.max_new_tokens, helpers, form, context=context, span_mu=span_mu)


def _context(policy: Policy) -> int | None:
    """Longest sequence the model takes, where its config says so."""
    return getattr(policy.causal_lm.config.get_text_config(), "max_position_embeddings", None)


def check_roles(cfg: Config) -> None:
    """Refuse helpers that could not be asked as configured; loads no model and asks nobody.

    Raises:
        UserError: names the role and the setting.
    """
    if cfg.helpers.roles:
        _open(cfg, want_logprobs=False)


def _open(cfg: Config, want_logprobs: bool) -> tuple[Form, dict[str, Helper | None]]:
    """Tags and texts, and the helper of each role; None stands for a local model, which is not loaded here."""
    form = load_form(cfg.helpers.form, cfg.helpers.prompts)
    if unknown := [r for r in cfg.helpers.roles if r not in form.roles]:
        raise UserError(
            f"helpers.roles.{unknown[0]}: no such role in form {form.name!r}; {', '.join(form.roles)} exist"
        )
    return form, {
        role: _without_model(role, h, cfg.helpers, form.roles[role], want_logprobs)
        for role, h in cfg.helpers.roles.items()
    }


def _without_model(
    role: str, h: HelperConfig, cfg: HelpersConfig, prompt: RolePrompt, want_logprobs: bool
) -> Helper | None:
    if h.backend == "openai":
        return OpenAIHelper(h, prompt, cfg.max_reply_bytes, want_logprobs)
    if h.backend == "local":
        _check_folder(role, h.model)
        return None
    if bool(h.call) == bool(h.table):
        raise UserError(f"helpers.roles.{role}: a scripted helper needs exactly one of `call` and `table`")
    return call_helper(h.call, f"helpers.roles.{role}.call") if h.call else table_helper(h.table)


def _check_folder(role: str, model: str) -> None:
    """Refuse a folder that is not there; whether a hub has a model shows when it is loaded."""
    from coterie.models_io import locate

    if model in ("", "base", "smollm2"):  # smollm2 is made from its package at first use
        return
    try:
        locate(model)
    except UserError as e:
        raise UserError(f"helpers.roles.{role}.model: {e}") from e


class _LocalModels:
    """Loads each local model once, whatever number of roles use it."""

    def __init__(self, cfg: Config, encoder: PromptEncoder, policy: Policy | None) -> None:
        self.cfg, self.encoder, self.policy = cfg, encoder, policy
        self._loaded: dict[str, Policy] = {}

    def __call__(self, model: str, prompt: RolePrompt, temperature: float) -> InProcessHelper:
        from coterie.engines.torch import TorchEngine
        from coterie.helpers.local import AdaptersOff, LocalHelper

        engine: Engine
        if model == "base" and self.policy is not None and self.policy.lora:
            owner = self.policy
            engine = AdaptersOff(TorchEngine(owner, self.cfg.rollout.token_budget), owner)
        else:
            owner = self._frozen(self.cfg.model.name if model == "base" else model)
            engine = TorchEngine(owner, self.cfg.rollout.token_budget)
        same = owner.encoder.tokenizer_hash == self.encoder.tokenizer_hash
        return LocalHelper(model, engine, owner.encoder, prompt, temperature, same, _context(owner))

    def _frozen(self, name: str) -> Policy:
        from coterie.policy import Policy

        if name not in self._loaded:
            frozen = Policy.load(self.cfg.model.model_copy(update={"name": name, "lora_rank": 0, "system_prompt": ""}))
            frozen.model.requires_grad_(False)
            self._loaded[name] = frozen
        return self._loaded[name]
