"""Endpoints: a real model behind a real HTTP server, and one that does everything wrong."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_kit import ScriptEngine, config, encoder, save_model
from helpers_server import ModelReply, completion, faulty, serving

from coterie.config import HelperConfig
from coterie.errors import UserError
from coterie.helpers.dialogue import DialogueStart, run_dialogues
from coterie.helpers.openai import OpenAIHelper
from coterie.helpers.pool import HelperPool
from coterie.helpers.prompts import load_form
from coterie.helpers.protocol import HelperRequest
from coterie.helpers.roles import HelperSet
from coterie.types import Sampling, Source, Trajectory


def helper_set(url: str, models: dict[str, str], *, response: int = 200, role: Any = None, **values: Any) -> HelperSet:
    """Roles -> model names, all at one endpoint."""
    cfg = config({r: {"url": url, "model": m, **(role or {})} for r, m in models.items()}, **values)
    form = load_form("full")
    helpers = {r: OpenAIHelper(h, form.roles[r], cfg.max_reply_bytes) for r, h in cfg.roles.items()}
    return HelperSet(cfg, encoder(), response, helpers, form)


def ask(helpers: HelperSet, n: int = 1, script: Any = None) -> list[Trajectory]:
    def once(text: str) -> str:
        return "4~" if "<feedback>" in text or "[helper" in text else "x<verify>1+1=2</verify>"

    start = DialogueStart("1+1?", helpers.prompt_ids("1+1?"), 3, n)
    rows = run_dialogues(ScriptEngine(script or once), [start], helpers, Sampling(helpers.budget.response))
    return [t for _, _, t in rows]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_model(tmp_path_factory.mktemp("helper"))


def test_a_real_model_answers_and_its_logprobs_are_exact(folder: Path) -> None:
    """The helper's log-probs, recorded with the trajectory, are those of its model in its own context."""
    reply = ModelReply(folder)
    with serving(reply) as server, helper_set(server.url, {"verify": "m"}, role={"same_tokenizer": True}) as helpers:
        rows = ask(helpers, n=4)
    exact = 0
    for t in rows:
        (c,) = t.consults
        assert c.outcome == "ok" and c.helper == "m" and c.latency_s > 0 and t.failed is None
        known = t.behavior_logprobs[c.start : c.end]
        if np.isnan(known).any():  # the random model wrote something that had to be cleaned
            continue
        exact += 1
        messages = server.requests[0]["body"]["messages"]
        prompt = reply.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = reply.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        words = [int(i) for i in t.token_ids[c.start : c.end]]
        with torch.inference_mode():
            logits = reply.model(torch.tensor([ids + words])).logits[0]  # [T, V]
        mu = torch.log_softmax(logits, -1)[len(ids) - 1 : -1]  # [t, V]
        want = mu[torch.arange(len(words)), torch.tensor(words)]
        np.testing.assert_allclose(known, want.numpy(), atol=1e-4)
    assert exact >= 1


def test_another_tokenizer_gives_the_log_prob_of_the_whole_reply() -> None:
    """With span-level mu every token of a reply has an equal part of the log-prob that the endpoint's model gave its text."""

    def said(h: Any, body: dict[str, Any]) -> None:
        pieces = {"content": [{"token": t, "logprob": p} for t, p in (("sound", -0.5), (" 12 + 34", -0.25))]}
        h.send_json(200, completion("sound 12 + 34", logprobs=pieces))

    with serving(said) as server:
        cfg = config({"verify": {"url": server.url, "model": "m"}})
        form = load_form("full")
        helper = OpenAIHelper(cfg.roles["verify"], form.roles["verify"], 10**6, want_logprobs=True)
        with HelperSet(cfg, encoder(), 200, {"verify": helper}, form, span_mu=True) as helpers:
            (t,) = ask(helpers)
    assert server.requests[0]["body"]["logprobs"] is True
    known = t.behavior_logprobs[t.source == Source.HELPER]
    assert len(known) > 2
    np.testing.assert_allclose(known, -0.75 / len(known), rtol=1e-6)


def test_another_tokenizer_or_unasked_ids_leave_logprobs_unknown(folder: Path) -> None:
    with serving(ModelReply(folder)) as server, helper_set(server.url, {"verify": "m"}) as helpers:
        (t,) = ask(helpers)
    body = server.requests[0]["body"]
    assert "return_token_ids" not in body and "logprobs" not in body  # unknown fields make strict servers refuse
    assert body["messages"][0]["role"] == "system" and "1+1=2" in body["messages"][1]["content"]
    assert np.isnan(t.behavior_logprobs[t.source == Source.HELPER]).all()


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("slow", "timeout"),
        ("drip", "timeout"),
        ("disconnect", "connection"),
        ("half", "connection"),
        ("500", "http"),
        ("404", "http"),
        ("redirect", "http"),
        ("not_json", "malformed"),
        ("not_utf8", "malformed"),
        ("deep", "malformed"),
        ("gzip", "malformed"),
        ("no_choices", "malformed"),
        ("wrong_types", "malformed"),
        ("wrong_role", "malformed"),
        ("null", "empty"),
        ("all_think", "empty"),
        ("huge", "too_large"),
    ],
)
def test_a_fault_is_a_failed_question_and_the_rollout_goes_on(fault: str, kind: str) -> None:
    patience = 0.3 if kind == "timeout" else 60.0
    with serving(faulty) as server, helper_set(server.url, {"verify": fault}, timeout_s=patience) as helpers:
        (t,) = ask(helpers)
    assert t.failed is not None and t.failed.startswith(f"helper verify: {kind}: ")
    assert "\n" not in t.failed and "\x1b" not in t.failed  # shown on a terminal
    assert [c.outcome for c in t.consults] == ["failed"]
    assert (t.source == Source.HELPER).sum() == 0 and t.text.endswith("4")


def test_nobody_listens() -> None:
    with serving(faulty) as server:
        url = server.url
    with helper_set(url, {"verify": "m"}) as helpers:
        (t,) = ask(helpers)
    assert t.failed is not None and "connection" in t.failed


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("tags", "(/feedback)(verify)a(/verify)(end)ok"),
        ("answer", "it is [removed], [removed]"),
        ("bad_ids", "ok"),
        ("bad_logprobs", "o"),
    ],
)
def test_a_strange_reply_is_cleaned_and_its_logprobs_are_unknown(fault: str, words: str) -> None:
    role = {"same_tokenizer": True}
    with serving(faulty) as server, helper_set(server.url, {"verify": fault}, role=role, feedback_tokens=50) as helpers:
        (t,) = ask(helpers)
    got = t.source == Source.HELPER
    assert encoder().decode(t.token_ids[got]) == (words if fault != "bad_logprobs" else encoder().decode([ord("o")]))
    assert np.isnan(t.behavior_logprobs[got]).all() and t.failed is None


def test_ag13_a_giant_reply_over_http_is_cut() -> None:
    with serving(faulty) as server, helper_set(server.url, {"verify": "giant"}) as helpers:
        (t,) = ask(helpers)
    assert (t.source == Source.HELPER).sum() == 16 and "[cut]" in encoder().decode(t.token_ids)


def test_transient_errors_are_tried_again_permanent_ones_are_not() -> None:
    def flaky(h: Any, body: dict[str, Any]) -> None:
        if body["model"] == "404" or len(server.requests) < 3:
            h.send_json(404 if body["model"] == "404" else 503, {})
        else:
            h.send_json(200, completion("sound"))

    with serving(flaky) as server:
        with helper_set(server.url, {"verify": "m"}, tries=3) as helpers:
            (t,) = ask(helpers)
        assert t.failed is None and len(server.requests) == 3
        server.requests.clear()
        with helper_set(server.url, {"verify": "404"}, tries=3) as helpers:
            (t,) = ask(helpers)
        assert t.failed is not None and len(server.requests) == 1


def test_the_breaker_stops_asking_and_solo_rollouts_take_over() -> None:
    with serving(faulty) as server:
        values = {"breaker_failures": 3, "breaker_cooldown_s": 0.3, "concurrency": 1}
        with helper_set(server.url, {"verify": "404"}, **values) as helpers:
            assert helpers.available()
            rows = ask(helpers, n=8)
            assert len(server.requests) == 3 and not helpers.available()
            assert sum("breaker" in (t.failed or "") for t in rows) == 5
            time.sleep(0.35)
            assert helpers.available()  # one question is let through
            ask(helpers, n=4)
            assert len(server.requests) == 4


def test_rows_that_wait_do_not_hold_up_the_others_and_questions_overlap() -> None:
    """No reply is sent before all eight questions are there; the row that asks nobody is done before any of them."""
    together = threading.Barrier(8, timeout=60)

    def slow(h: Any, body: dict[str, Any]) -> None:
        together.wait()
        h.send_json(200, completion("sound"))

    def script(text: str) -> str:
        return "4~" if "Q1" in text or "<feedback>" in text else "x<verify>1</verify>"

    with serving(slow) as server, helper_set(server.url, {"verify": "m"}, timeout_s=60.0) as helpers:
        starts = [DialogueStart(q, helpers.prompt_ids(q), 1, 8 - 7 * (q == "Q1")) for q in ("Q0", "Q1")]
        rows = list(run_dialogues(ScriptEngine(script), starts, helpers, Sampling(200)))
    assert rows[0][0] == 1 and len(rows) == 9
    assert all(t.failed is None for _, _, t in rows)


def test_concurrency_is_limited() -> None:
    running, most = 0, 0

    def count(h: Any, body: dict[str, Any]) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.03)
        running -= 1
        h.send_json(200, completion("sound"))

    with serving(count) as server, helper_set(server.url, {"verify": "m"}, concurrency=3) as helpers:
        assert all(t.failed is None for t in ask(helpers, n=12))
    assert 2 <= most <= 3


def test_a_helper_that_hangs_keeps_nobody_from_asking_another() -> None:
    """More questions than may be in flight wait for one endpoint; the other answers meanwhile, over another connection."""
    over = threading.Event()

    def hang(h: Any, body: dict[str, Any]) -> None:
        over.wait(20)

    def answer(h: Any, body: dict[str, Any]) -> None:
        h.send_json(200, completion("sound"))

    cfg = config({}, concurrency=2, tries=2, timeout_s=5.0)
    form = load_form("full")
    request = HelperRequest("verify", "Q?", "1+1", "", 16, 0)
    with serving(hang) as stuck, serving(answer) as sound:
        roles = {"verify": stuck.url, "knowledge": sound.url}
        bad, good = (OpenAIHelper(HelperConfig(url=u, model="m"), form.roles[r], 1 << 20) for r, u in roles.items())
        pool = HelperPool(cfg)
        try:
            waiting = [pool.submit(bad, request) for _ in range(6)]
            replies = [pool.submit(good, request) for _ in range(6)]
            texts = [f.result(timeout=4).text for f in replies]
            assert texts == ["sound"] * 6
            assert not any(f.done() for f in waiting)
            assert len(stuck.requests) == 2
        finally:
            over.set()
            pool.close(bad.aclose(), good.aclose())


def test_giving_up_in_the_middle_leaves_nothing_running() -> None:
    def script(text: str) -> str:
        return "4~" if "Q1" in text else "x<verify>1</verify>"

    with serving(faulty) as server:
        begin = time.monotonic()
        with helper_set(server.url, {"verify": "slow"}) as helpers:
            starts = [DialogueStart(q, helpers.prompt_ids(q), 1) for q in ("Q0", "Q1")]
            rows = run_dialogues(ScriptEngine(script), starts, helpers, Sampling(200))
            next(rows)
            rows.close()
        assert time.monotonic() - begin < 0.5  # did not wait for the helper


def test_the_key_goes_to_the_endpoint_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_HELPER_KEY", "sk-very-secret")
    with serving(faulty) as server:
        with helper_set(server.url, {"verify": "401"}, role={"key_env": "TEST_HELPER_KEY"}) as helpers:
            (t,) = ask(helpers)
            assert "sk-very-secret" not in repr(helpers.helpers)
        assert server.requests[0]["headers"]["Authorization"] == "Bearer sk-very-secret"
        assert t.failed is not None and "***" in t.failed and "secret" not in t.failed
        monkeypatch.delenv("TEST_HELPER_KEY")
        with pytest.raises(UserError, match="TEST_HELPER_KEY"):
            helper_set(server.url, {"verify": "m"}, role={"key_env": "TEST_HELPER_KEY"})


def test_extra_body_overrides() -> None:
    role = {"extra_body": {"temperature": 0.5, "seed": 7}}
    with serving(lambda h, b: h.send_json(200, completion("ok"))) as server:
        with helper_set(server.url, {"verify": "m"}, role=role) as helpers:
            (t,) = ask(helpers)
        body = server.requests[0]["body"]
    assert body["temperature"] == 0.5 and body["seed"] == 7 and body["max_tokens"] == 16
    assert not math.isfinite(t.behavior_logprobs[t.consults[0].start])
