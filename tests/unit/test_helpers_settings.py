"""Prompts as data, budgets, scripted helpers, and the make-up of groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_kit import config, encoder, scripted

from coterie.config import HelpersConfig, config_from_dict
from coterie.errors import UserError
from coterie.helpers.budget import make_budget
from coterie.helpers.mixing import CollapseGuard, solo_count, too_many_failed
from coterie.helpers.prompts import load_form
from coterie.helpers.protocol import HelperFailure, HelperReply, HelperRequest
from coterie.helpers.roles import build_helpers
from coterie.helpers.scripted import call_helper, table_helper
from coterie.run import check
from coterie.types import Consult, Group, Problem, Segment, Source, StopReason, Trajectory

LARGE = {"name": "some/model"}  # whose context is not known before it is loaded
ROOM = {"model": LARGE, "rollout": {"max_new_tokens": 512}}  # for a question and its reply
REQUEST = HelperRequest("verify", "Q $query {x}", "1+1", "so $question", 16, 0)


def test_filled_in_text_is_not_a_template() -> None:
    _, user = load_form("full").roles["verify"].messages(REQUEST)
    assert "Q $query {x}" in user and "so $question" in user and "1+1" in user


def test_the_system_block_names_roles_tags_and_limits() -> None:
    block = load_form("full").system_block({"verify": 2, "reasoning": 1})
    assert "<verify> your question </verify>" in block and "Limit: 2" in block and "<knowledge>" not in block


def test_a_users_file_changes_only_what_it_names(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text('[full]\nopen = "<<"\nclose = ">>"\n[full.roles.search]\nstart = "<s>?"\nend = "?"\n'
                    'description = "finds"\nexample = ""\ncut_answers = false\nsystem = ""\nuser = "$query $$5"\n')  # fmt: skip
    form = load_form("full", str(file))
    assert form.open == "<<" and form.roles["verify"].tags == load_form("full").roles["verify"].tags
    assert form.roles["search"].messages(REQUEST) == ("", "1+1 $5")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[full]\nopne = 'x'", "unknown key opne"),
        ("[full]\nblock = '$rolse'", r"block: cannot fill in 'rolse'; known: \$roles"),
        ("[full.roles.verify]\nuser = 'costs $5'", "user: cannot fill in"),
        ("[full.roles.verify]\nstart = '<knowledge>'", "two roles have the same start tag"),
        ("[full.roles.verify]\nend = '<verify>'", "start and end tag are the same"),
        ("[full.roles.verify]\nstart = 'verify'", "no sign that sets it apart"),
        ("[mine]\nblock = ''", "no form 'other'"),
        ("[full", "not valid TOML"),
    ],
)
def test_a_bad_prompts_file_is_explained(tmp_path: Path, text: str, error: str) -> None:
    file = tmp_path / "p.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=error):
        load_form("other" if "mine" in text else "full", str(file))


def test_tags_the_tokenizer_cannot_write_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from coterie.prompting import PromptEncoder

    known = PromptEncoder.encode
    # A character tokenizer without the sign "<".
    monkeypatch.setattr(PromptEncoder, "encode", lambda self, text: known(self, text.replace("<", "")))
    with pytest.raises(UserError, match="tokenizer cannot write"):
        scripted({"verify": lambda r: "ok"})


def test_budget() -> None:
    cfg = config({"verify": {"backend": "scripted", "table": {"*": "ok"}, "limit": 2}}, total_limit=3, reserve=0.25)
    b = make_budget(cfg, 101, wrappers=10, note=4)
    assert (b.cost, b.reserve) == (26, 26)  # 10 + 16; a quarter of 101, rounded up
    assert b.allows("verify", {}, 52) and not b.allows("verify", {}, 51)
    assert not b.allows("verify", {"verify": 2}, 101)
    assert not b.allows("verify", {"verify": 1, "x": 2}, 101)
    assert make_budget(cfg, 200, wrappers=1, note=99).cost == 99
    with pytest.raises(UserError, match="no question could ever be served"):
        make_budget(cfg, 34, wrappers=10, note=4)


def test_table_helper() -> None:
    helper = table_helper({"1+1": "2"})
    other = HelperRequest("verify", "", "3", "", 16, 0)
    ok, missing = helper.respond_batch([REQUEST, other])
    assert isinstance(ok, HelperReply) and ok.text == "2"
    assert isinstance(missing, HelperFailure) and missing.kind == "script" and "'3'" in missing.detail
    assert isinstance(table_helper({"*": "x"}).respond_batch([other])[0], HelperReply)
    assert isinstance(table_helper({"*": " "}).respond_batch([other])[0], HelperFailure)


def test_call_helper(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def f(request):\n    return request.query + '!'\nn = 3\n")
    (reply,) = call_helper(f"{file}:f", "x").respond_batch([REQUEST])
    assert isinstance(reply, HelperReply) and reply.text == "1+1!"
    file.write_text("def f(request):\n    return request.query, -0.5\ndef g(request):\n    return 'x', 0.5\n")
    said, impossible = (call_helper(f"{file}:{n}", "x").respond_batch([REQUEST])[0] for n in "fg")
    assert isinstance(said, HelperReply) and (said.text, said.span_logprob) == ("1+1", -0.5)
    assert isinstance(impossible, HelperReply) and impossible.span_logprob is None
    file.write_text("n = 3\n")
    for spec, error in [("f", "as module:function"), (f"{file}:g", "no function g"), (f"{file}:n", "no function n"),
                        ("/none.py:f", "no such file"), ("no_such_module_x:f", "cannot import")]:  # fmt: skip
        with pytest.raises(UserError, match=error):
            call_helper(spec, "x")


@pytest.mark.parametrize(
    ("role", "error"),
    [
        ({"backend": "openai", "model": "m"}, "url"),
        ({"backend": "openai", "url": "http://localhost/v1"}, "name the model"),
        ({"backend": "openai", "url": "http://localhost/v1", "model": "m", "key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY"),
        ({"backend": "scripted"}, "exactly one of"),
        ({"backend": "scripted", "call": "a:b", "table": {"*": "x"}}, "exactly one of"),
    ],
)
def test_an_incomplete_role_is_refused_by_name(role: dict[str, Any], error: str) -> None:
    cfg = config_from_dict(ROOM | {"helpers": {"roles": {"verify": role}}})
    with pytest.raises(UserError, match=f"helpers.roles.verify.*{error}"):
        build_helpers(cfg, encoder())


def test_unknown_roles_and_forms_are_refused() -> None:
    role = {"backend": "scripted", "table": {"*": "x"}}
    with pytest.raises(UserError, match="no such role in form 'full'; verify, knowledge, reasoning exist"):
        build_helpers(config_from_dict(ROOM | {"helpers": {"roles": {"oracle": role}}}), encoder())
    with pytest.raises(UserError, match="no form 'long'; there are: full, short"):
        build_helpers(config_from_dict(ROOM | {"helpers": {"form": "long", "roles": {"verify": role}}}), encoder())
    with pytest.raises(UserError, match=r"unknown key 'limt' in \[helpers.roles.verify\]; did you mean 'limit'"):
        config_from_dict({"helpers": {"roles": {"verify": {"limt": 2}}}})


def test_no_roles_is_off() -> None:
    assert HelpersConfig().roles == {}
    assert solo_count(HelpersConfig(), 8, 0) == 8


@pytest.mark.parametrize(("step", "solo"), [(0, 2), (50, 4), (100, 6), (1000, 6)])
def test_solo_share_moves_from_a_quarter_to_three_quarters(step: int, solo: int) -> None:
    assert solo_count(config({"verify": {}}), 8, step) == solo


def test_solo_share_keeps_its_minimum_and_never_exceeds_the_group() -> None:
    assert solo_count(config({"verify": {}}), 4, 0) == 2
    assert solo_count(config({"verify": {}}), 1, 0) == 1
    assert solo_count(config({"verify": {}}, solo_min=0, solo_start=0.0), 8, 0) == 0


def trajectory(outcome: str | None = None, failed: str | None = None, mode: str = "helped") -> Trajectory:
    consults = (Consult("verify", "h", "q", outcome, 1, 2),) if outcome else ()
    one = np.zeros(2)
    return Trajectory(one.astype(np.int32), one.astype(np.uint8), one.astype(np.float32), 1,
                      (Segment(Source.POLICY, "x"),), StopReason.EOS, failed=failed, mode=mode, consults=consults)  # fmt: skip


def test_groups_that_lost_too_many_are_named() -> None:
    rows = [trajectory(failed="helper"), trajectory(), trajectory(mode="solo"), trajectory(mode="solo")]
    assert not too_many_failed(rows, 0.5) and too_many_failed(rows, 0.49)
    assert not too_many_failed([trajectory(mode="solo")], 0.0)


def test_collapse_guard() -> None:
    def step(*rows: Trajectory) -> list[Group]:
        return [Group("g", Problem("p", "t", "q"), "a", 0, "h", rows)]

    guard = CollapseGuard(patience=2)
    assert guard.update(step(trajectory()))["helpers/collapsed"] == 0
    assert guard.update(step(trajectory(mode="solo")))["helpers/quiet_steps"] == 1  # says nothing
    assert guard.update(step(trajectory("invalid")))["helpers/collapsed"] == 1  # not understood is not asked
    assert guard.update(step(trajectory("ok"))) == {"helpers/quiet_steps": 0.0, "helpers/collapsed": 0.0}


@pytest.mark.parametrize(("solo_min", "group"), [(9, 8), (8, 8), (2, 2)])
def test_a_group_of_which_none_may_ask_is_refused(solo_min: int, group: int) -> None:
    data = {
        "tasks": {"gcd": {}},
        "model": LARGE,
        "rollout": {"max_new_tokens": 512, "group_size": group},
        "helpers": {"solo_min": solo_min, "roles": {"verify": {"backend": "scripted", "table": {"*": "x"}}}},
    }
    with pytest.raises(UserError, match=f"solo_min = {solo_min} leaves none of rollout.group_size = {group}"):
        check(config_from_dict(data))
    check(config_from_dict(data | {"rollout": {"max_new_tokens": 512, "group_size": solo_min + 1}}))
    check(config_from_dict(data | {"helpers": {"solo_min": solo_min}}))


def test_a_baseline_without_anything_to_compare_with_is_refused() -> None:
    def settings(baseline: str, **helpers: float) -> None:
        roles = {"verify": {"backend": "scripted", "table": {"*": "x"}}}
        tasks = {"gcd": {"params": {}}}
        check(
            config_from_dict(
                ROOM | {"tasks": tasks, "advantage": {"baseline": baseline}, "helpers": {"roles": roles, **helpers}}
            )
        )

    settings("solo_mean")
    settings("own_mode", solo_min=0, solo_start=0.0, solo_end=0.0)
    settings("solo_mean", solo_min=1, solo_start=0.0, solo_end=0.0)
    for start, end in ((0.0, 0.5), (0.5, 0.0)):
        with pytest.raises(UserError, match="solo_mean compares with plain rollouts"):
            settings("solo_mean", solo_min=0, solo_start=start, solo_end=end)
