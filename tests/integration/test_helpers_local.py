"""Helpers that are frozen models in this process, and whole helped rollouts sampled by the real engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_kit import ScriptEngine, save_model

from coterie.config import Config, ModelConfig, config_from_dict
from coterie.engines.torch import TorchEngine
from coterie.helpers.dialogue import DialogueStart, run_dialogues
from coterie.helpers.modes import sample_mode
from coterie.helpers.protocol import HelperRequest
from coterie.helpers.roles import HelperSet, build_helpers
from coterie.policy import Policy
from coterie.types import Sampling, Source, Trajectory


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_model(tmp_path_factory.mktemp("policy"))


def make(folder: Path, role: dict[str, Any], model: dict[str, Any] | None = None, **helpers: Any) -> Config:
    values = {"feedback_tokens": 12, "reserve": 0.1, "roles": {"knowledge": {"backend": "local", **role}}, **helpers}
    data = {"model": {"name": str(folder), **(model or {})}, "rollout": {"max_new_tokens": 160}, "helpers": values}
    return config_from_dict(data)


def ask(helpers: HelperSet, n: int = 6) -> list[Trajectory]:
    engine = ScriptEngine(
        lambda text: "4~" if "<feedback>" in text or "[helper" in text else "<knowledge>gcd</knowledge>"
    )
    start = DialogueStart("Q?", helpers.prompt_ids("Q?"), 5, n)
    return [t for _, _, t in run_dialogues(engine, [start], helpers, Sampling(helpers.budget.response))]


def mu_of(model: Any, helpers: HelperSet, t: Trajectory, temperature: float) -> np.ndarray[Any, Any]:
    """Log-probs of the reply under ``model`` in the helper's own context."""
    (c,) = t.consults
    helper = helpers.helpers["knowledge"]
    request = HelperRequest("knowledge", "Q?", c.query, "", 0, 0)
    system, user = helper.prompt.messages(request)  # type: ignore[union-attr]
    prompt = helpers.encoder.prompt_ids(user, system=system)
    words = [int(i) for i in t.token_ids[c.start : c.end]]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + words])).logits[0] / temperature  # [T, V]
    p = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]  # [t, V]
    return p[torch.arange(len(words)), torch.tensor(words)].numpy()  # type: ignore[no-any-return]


def exact(rows: list[Trajectory]) -> list[Trajectory]:
    """Rows whose reply did not need cleaning."""
    return [t for t in rows if not np.isnan(t.behavior_logprobs[t.consults[0].start])]


def test_adapters_off_is_the_start_model_and_on_again_afterwards(folder: Path) -> None:
    cfg = make(folder, {"temperature": 0.7}, {"lora_rank": 2})
    policy = Policy.load(cfg.model)
    with torch.no_grad():  # train: the policy moves away from the start model
        for p in policy.weights().values():
            p.add_(torch.randn_like(p) * 0.5)
    ids = torch.tensor([policy.encoder.prompt_ids("Q?")])
    with torch.inference_mode():
        before = policy.model(ids).logits
    with build_helpers(cfg, policy.encoder, policy) as helpers:
        rows = ask(helpers)
    with torch.inference_mode():
        assert torch.equal(policy.model(ids).logits, before)
    start = Policy.load(ModelConfig(name=str(folder))).model
    assert not torch.allclose(start(ids).logits, before, atol=0.1)
    assert exact(rows)
    for t in exact(rows):
        words = t.behavior_logprobs[t.source == Source.HELPER]
        np.testing.assert_allclose(words, mu_of(start, helpers, t, 0.7), atol=1e-4)


def test_a_frozen_copy_does_not_follow_the_policy(folder: Path) -> None:
    cfg = make(folder, {"model": "base"})
    policy = Policy.load(cfg.model)
    with build_helpers(cfg, policy.encoder, policy) as helpers:
        with torch.no_grad():
            for p in policy.weights().values():
                p.mul_(0.5)
        rows = ask(helpers)
    start = Policy.load(cfg.model).model
    for t in exact(rows):
        words = t.behavior_logprobs[t.source == Source.HELPER]
        np.testing.assert_allclose(words, mu_of(start, helpers, t, 1.0), atol=1e-4)
    assert exact(rows) and {c.helper for t in rows for c in t.consults} == {"base"}


def test_a_greedy_reply_has_no_known_logprobs(folder: Path) -> None:
    cfg = make(folder, {"temperature": 0.0})
    policy = Policy.load(cfg.model)
    with build_helpers(cfg, policy.encoder, policy) as helpers:
        rows = ask(helpers, 2)
    assert all(np.isnan(t.behavior_logprobs[t.source == Source.HELPER]).all() for t in rows)


def test_a_question_that_does_not_fit_is_a_failure_of_the_helper(tmp_path: Path) -> None:
    small = save_model(tmp_path / "small", context=40)
    cfg = make(tmp_path / "small", {"model": str(small)})
    policy = Policy.load(cfg.model)
    with build_helpers(cfg, policy.encoder, policy) as helpers:
        (t,) = ask(helpers, 1)
    assert t.failed is not None and "too_long" in t.failed


# Tags so short that a random model writes them now and then.
PROMPTS = """
[mini]
block = ""
role_block = ""
open = "["
close = "]"
close_cut = "]"
notes = { limit = "[-]", invalid = "[?]", unavailable = "[!]" }
[mini.roles.knowledge]
start = "("
end = ")"
description = ""
example = ""
cut_answers = true
system = ""
user = "$query"
"""


def test_the_real_engine_samples_helped_rollouts_whose_logprobs_the_learner_agrees_with(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "p.toml").write_text(PROMPTS)
    role = {"backend": "scripted", "table": {"*": "a fact"}}
    cfg = make(folder, role, form="mini", prompts=str(tmp_path / "p.toml"), reserve=0.0, notes_limit=4)
    policy = Policy.load(cfg.model)
    head = torch.nn.Linear(32, len(policy.tokenizer))  # brackets come often; everything else as before
    with torch.no_grad():
        head.weight.copy_(policy.model.lm_head.weight * 0.2)
        head.bias.zero_()
        head.bias[[policy.encoder.encode(sign)[0] for sign in "()"]] = 4.0
    policy.model.lm_head = head
    engine = TorchEngine(policy)
    with build_helpers(cfg, policy.encoder, policy) as helpers:
        sampling = Sampling(cfg.rollout.max_new_tokens)
        out = list(sample_mode("helped", engine, policy.encoder, ["Q1", "Q2"], 8, sampling, [1, 2], helpers))
    assert sum(c.outcome == "ok" for _, _, t in out for c in t.consults) >= 3
    for _, _, t in out:
        with torch.inference_mode():
            logits = policy.model(torch.tensor(t.token_ids[None].astype(np.int64))).logits[0]  # [T, V]
        p = torch.log_softmax(logits, -1)  # [T, V]
        at = np.flatnonzero(t.source == Source.POLICY)
        want = p[torch.tensor(at - 1), torch.tensor(t.token_ids[at].astype(np.int64))]
        np.testing.assert_allclose(t.behavior_logprobs[at], want.numpy(), atol=1e-4)


def test_modes_differ_in_prompt_and_in_who_answers(folder: Path) -> None:
    role = {"backend": "scripted", "table": {"*": "a fact"}}
    cfg = make(folder, role)
    policy = Policy.load(cfg.model)
    engine = ScriptEngine(lambda text: "4~" if "<feedback>" in text else "<knowledge>q</knowledge>~")
    found = {}
    with build_helpers(cfg, policy.encoder, policy) as helpers:
        for mode in ("plain", "tagged", "helped"):
            rows = sample_mode(mode, engine, policy.encoder, ["Q"], 1, Sampling(160), [0], helpers)  # type: ignore[arg-type]
            ((_, _, found[mode]),) = rows
    assert found["plain"].prompt_length < found["tagged"].prompt_length == found["helped"].prompt_length
    assert not found["plain"].consults and not found["tagged"].consults and found["helped"].consults
    assert found["tagged"].text == "<knowledge>q</knowledge>"  # nobody answers, nothing stops
