"""Tags and texts of the helper protocol, read from data (``prompts.toml`` beside this file, and the user's own)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from coterie.errors import UserError
from coterie.helpers.protocol import HelperRequest, Tags

_FORM_KEYS = {"block", "role_block", "open", "close", "close_cut", "notes", "roles"}
_NOTE_KEYS = {"limit", "invalid", "unavailable"}
_ROLE_KEYS = {"start", "end", "description", "example", "cut_answers", "system", "user"}
_REQUEST_FIELDS = {"question": "", "query": "", "shown": ""}


@dataclass(frozen=True)
class RolePrompt:
    """Tags of one role, what the policy is told about it, and what the helper is sent."""

    tags: Tags
    description: str
    example: str
    cut_answers: bool
    system: str
    user: Template

    def messages(self, request: HelperRequest) -> tuple[str, str]:
        """(system, user) for the helper. Filled-in text is never read as a template again."""
        values = {"question": request.question, "query": request.query, "shown": request.shown}
        return self.system, self.user.substitute(values).strip()


@dataclass(frozen=True)
class Form:
    """One complete set of tags and texts."""

    name: str
    block: Template
    role_block: Template
    open: str
    close: str
    close_cut: str
    notes: Mapping[str, str]
    roles: Mapping[str, RolePrompt]

    def system_block(self, limits: Mapping[str, int]) -> str:
        """What the policy is told about the roles in ``limits`` (role -> consultations allowed); may be empty."""
        parts = []
        for role, limit in limits.items():
            r = self.roles[role]
            values = {"name": role, "description": r.description, "start": r.tags.start, "end": r.tags.end}
            values["example"] = r.example
            parts.append(self.role_block.substitute(values, limit=limit).strip())
        return self.block.substitute(roles="\n\n".join(parts)).strip()

    def note(self, kind: str, roles: Mapping[str, int]) -> str:
        """An error note: ``limit``, ``invalid`` or ``unavailable``."""
        tags = ", ".join(f"{self.roles[r].tags.start} {self.roles[r].tags.end}" for r in roles)
        return Template(self.notes[kind]).substitute(tags=tags)


def load_form(name: str, path: str = "") -> Form:
    """The form ``name`` of the shipped prompts, with the tables of the user's file ``path`` laid over it.

    Raises:
        UserError: no such file or form, a missing or unknown key, a template with an unknown $name, tags that clash.
    """
    data = tomllib.loads(resources.files("coterie.helpers").joinpath("prompts.toml").read_text(encoding="utf-8"))
    where = "helpers.prompts"
    if path:
        where = path
        if not Path(path).is_file():
            raise UserError(f"helpers.prompts: no such file: {path}")
        try:
            data = _laid_over(data, tomllib.loads(Path(path).read_text(encoding="utf-8")))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
            raise UserError(f"{path}: not valid TOML: {e}") from e
    if name not in data:
        raise UserError(f"helpers.form: no form {name!r}; there are: {', '.join(sorted(data))}")
    return _form(name, data[name], f"{where} [{name}]")


def _laid_over(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in top.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = _laid_over(out[key], value) if both else value
    return out


def _form(name: str, data: Any, where: str) -> Form:
    _check_keys(data, _FORM_KEYS, where)
    _check_keys(data["notes"], _NOTE_KEYS, f"{where} notes")
    roles = {}
    for role, r in data["roles"].items():
        at = f"{where} roles.{role}"
        _check_keys(r, _ROLE_KEYS, at)
        user = _template(r["user"], _REQUEST_FIELDS, f"{at}.user")
        roles[role] = RolePrompt(
            Tags(role, r["start"], r["end"]), r["description"], r["example"], bool(r["cut_answers"]), r["system"], user
        )
    for kind, text in data["notes"].items():
        _template(text, {"tags": ""}, f"{where} notes.{kind}")
    _check_tags([r.tags for r in roles.values()], data, where)
    role_fields = {"name": "", "description": "", "start": "", "end": "", "limit": "", "example": ""}
    return Form(
        name,
        _template(data["block"], {"roles": ""}, f"{where} block"),
        _template(data["role_block"], role_fields, f"{where} role_block"),
        data["open"],
        data["close"],
        data["close_cut"],
        data["notes"],
        roles,
    )


def _check_keys(data: Any, known: set[str], where: str) -> None:
    if not isinstance(data, dict):
        raise UserError(f"{where}: must be a table")
    if missing := known - data.keys():
        raise UserError(f"{where}: missing {', '.join(sorted(missing))}")
    if unknown := data.keys() - known:
        raise UserError(f"{where}: unknown key {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}")


def _check_tags(tags: list[Tags], data: Mapping[str, Any], where: str) -> None:
    marks = {f"{t.role}.{k}": v for t in tags for k, v in (("start", t.start), ("end", t.end))}
    around = {key: data[key].strip() for key in ("open", "close") if data[key]}  # a reply may also stand bare
    for key, mark in {**marks, **around}.items():
        if not any(not (c.isalnum() or c.isspace() or c == "_") for c in mark):
            raise UserError(f"{where} {key}: {mark!r} has no sign that sets it apart from ordinary words")
    starts = [t.start for t in tags]
    if len(set(starts)) < len(starts):
        raise UserError(f"{where}: two roles have the same start tag")
    if any(t.start == t.end for t in tags):
        raise UserError(f"{where}: a role's start and end tag are the same")


def _template(text: str, values: Mapping[str, str], where: str) -> Template:
    try:
        Template(text).substitute(values)
    except (KeyError, ValueError) as e:
        raise UserError(
            f"{where}: cannot fill in {e}; known: {', '.join('$' + v for v in values)}; write $$ for $"
        ) from e
    return Template(text)
