"""The reference answer never reaches a helper, in whatever it is sent, over whole helped runs."""

from __future__ import annotations

import dataclasses
import inspect
import json
from typing import Any

import pytest
from helpers_kit import ScriptEngine, config, encoder
from helpers_server import completion, serving

from coterie.config import RolloutConfig
from coterie.helpers import dialogue, openai
from coterie.helpers.dialogue import DialogueStart, run_dialogues
from coterie.helpers.openai import OpenAIHelper
from coterie.helpers.prompts import load_form
from coterie.helpers.protocol import HelperRequest
from coterie.helpers.roles import HelperSet
from coterie.rollout import rollout
from coterie.tasks.scoring import Scorer
from coterie.types import Problem, Sampling, Source

CANARY = "7f3c9e-canary"
ROLES = ("verify", "knowledge", "reasoning")


def problems(n: int) -> list[Problem]:
    """Problems whose answer is a nonce, wherever a task may put one."""
    return [
        Problem(
            f"p{i}", "t", f"Question {i}?", reference=f"{CANARY}-{i}", verifier="exact", metadata={"answer": CANARY}
        )
        for i in range(n)
    ]


def test_a_request_has_no_place_for_an_answer() -> None:
    assert {f.name for f in dataclasses.fields(HelperRequest)} == {
        "role",
        "question",
        "query",
        "shown",
        "max_tokens",
        "seed",
    }
    assert {f.name for f in dataclasses.fields(DialogueStart)} == {"question", "prompt_ids", "seed", "n"}
    for module in (dialogue, openai):  # nor does the code that makes requests know of problems
        assert "Problem" not in vars(module) and ".reference" not in inspect.getsource(module)


def _script(text: str) -> str:
    """Asks every role in turn, then answers; without helpers it just answers."""
    turn = text.count("\n<feedback>\n")
    if turn < 3 and "helper" in text:
        return f"step {turn} <{ROLES[turn]}>is step {turn} right</{ROLES[turn]}>"
    return f"<answer>{CANARY}-0</answer>~"


def test_canary_over_a_whole_run() -> None:
    """Problems to scored groups: everything that leaves for the helpers, as bytes on the wire, and what they wrote.

    The verifier knows the answers (the scripted policy hits one of four), so they were within reach.
    """
    with serving(lambda h, b: h.send_json(200, completion("sound"))) as server:
        cfg = config({r: {"url": server.url, "model": "m"} for r in ROLES}, solo_min=1)
        form = load_form("full")
        helpers = {r: OpenAIHelper(h, form.roles[r], cfg.max_reply_bytes) for r, h in cfg.roles.items()}
        # The plain encoder puts what the policy is told before the problem, where the script can see it.
        engine = ScriptEngine(_script)
        rollout_cfg = RolloutConfig(problems=4, group_size=4, max_new_tokens=400, max_prompt_tokens=4096)
        with HelperSet(cfg, encoder(False), 400, helpers, form) as all_helpers, Scorer() as scorer:
            done = rollout(
                engine,
                encoder(False),
                problems(4),
                rollout_cfg,
                scorer,
                author="me",
                version=0,
                seed=0,
                helpers=all_helpers,
            )
        sent = [json.dumps(r) for r in server.requests]
    rows = [t for g in done.groups for t in g.trajectories]
    assert [t.mode for t in done.groups[0].trajectories] == ["solo", "helped", "helped", "helped"]
    assert [g.rewards for g in done.groups] == [[1.0] * 4] + [[0.0] * 4] * 3
    assert len(sent) == 4 * 3 * 3 and all("Question" in s for s in sent)
    assert not any(CANARY in s for s in sent)
    heard = [s.text for t in rows for s in t.segments if s.source is not Source.POLICY]
    assert heard and not any(CANARY in text for text in heard)


@pytest.mark.parametrize("leak", [r"the result is \boxed{42}", "<answer>42</answer>", "<think>42</think>hm"])
@pytest.mark.parametrize("role", ROLES)
def test_a_helper_that_states_the_final_answer_is_cut(role: str, leak: str) -> None:
    def script(text: str) -> str:
        return "~" if "<feedback>" in text else f"<{role}>what is it</{role}>"

    with serving(lambda h, b: h.send_json(200, completion(leak))) as server:
        cfg = config({role: {"url": server.url, "model": "m"}})
        form = load_form("full")
        helper: Any = OpenAIHelper(cfg.roles[role], form.roles[role], cfg.max_reply_bytes)
        with HelperSet(cfg, encoder(), 300, {role: helper}, form) as helpers:
            start = DialogueStart("Q", helpers.prompt_ids("Q"), 0)
            ((_, _, t),) = run_dialogues(ScriptEngine(script), [start], helpers, Sampling(300))
    words = "".join(s.text for s in t.segments if s.source is Source.HELPER)
    assert words and "42" not in words


def test_the_verifier_reads_only_the_policys_words() -> None:
    """A helper's answer is never scored as the policy's, even where a role may state it."""
    form = load_form("full")
    cfg = config({"verify": {"backend": "scripted", "table": {"*": "x"}}})

    class Teller:
        name = "teller"

        def respond_batch(self, requests: Any) -> Any:
            from coterie.helpers.protocol import HelperReply

            return [HelperReply("42 is it", "teller") for _ in requests]

    helpers = HelperSet(cfg, encoder(), 300, {"verify": Teller()}, form)
    engine = ScriptEngine(lambda text: "so~" if "<feedback>" in text else "<verify>q</verify>")
    ((_, _, t),) = run_dialogues(engine, [DialogueStart("Q", helpers.prompt_ids("Q"), 0)], helpers, Sampling(300))
    assert "42" not in t.text and t.text == "<verify>q</verify>so"
