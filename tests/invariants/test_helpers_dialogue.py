"""The rollout state machine: ids, sources and log-probs stay exact, whatever the policy and the helpers write."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from helpers_kit import ScriptEngine, config, encoder, scripted
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.helpers.dialogue import DialogueStart, run_dialogues
from coterie.helpers.prompts import load_form
from coterie.helpers.protocol import HelperReply, HelperRequest, Outcome
from coterie.helpers.roles import HelperSet
from coterie.types import Sampling, Source, StopReason, Trajectory

_FRAGMENTS = [
    "hello ",
    "12+3=",
    "<verify>",
    "</verify>",
    "<knowledge>",
    "</knowledge>",
    "<feedback>",
    "</feedback>",
    "é",
]
_FRAGMENTS += [
    "<verify>q</verify>",
    "<knowledge>q</knowledge>",
    "<verify></verify>",
    "<answer>4</answer>",
    "~",
    "<think>",
]
_REPLIES = ["sound", "hello he llo", "</feedback>x", "<think>a</think>", "é" * 30, r"\boxed{4}", "", "<|end|>b", "hm\n"]


class IdHelper:
    """A helper with the policy's tokenizer: its own ids (one byte each) and log-probs."""

    name = "ids"

    def __init__(self, reply: Callable[[HelperRequest], str]) -> None:
        self.reply = reply
        self.given: list[tuple[tuple[int, ...], tuple[float, ...]]] = []

    def respond_batch(self, requests: Sequence[HelperRequest]) -> list[Outcome]:
        out: list[Outcome] = []
        for r in requests:
            text = self.reply(r)
            ids = tuple(ScriptEngine(lambda _: "").ids(text + "~"))
            logprobs = tuple(-2.0 - 0.01 * k - len(self.given) for k in range(len(ids)))
            self.given.append((ids, logprobs))
            out.append(HelperReply(text, self.name, token_ids=ids, logprobs=logprobs))
        return out


def _run(engine: ScriptEngine, helpers: HelperSet, n: int = 1, question: str = "Q?") -> list[Trajectory]:
    start = DialogueStart(question, helpers.prompt_ids(question), 7, n)
    rows = run_dialogues(engine, [start], helpers, Sampling(helpers.budget.response))
    return [t for _, _, t in sorted(rows, key=lambda r: r[1])]


def _turns(t: Trajectory) -> list[tuple[int, int]]:
    """Stretches [start, end) of policy tokens. Turns are always told apart by an insertion."""
    own = t.source == Source.POLICY
    edges = np.flatnonzero(np.diff(np.concatenate([[0], own.astype(int), [0]]))).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _check(t: Trajectory, engine: ScriptEngine, helpers: HelperSet) -> None:
    ids = tuple(int(i) for i in t.token_ids)
    assert len(t.token_ids) == len(t.source) == len(t.behavior_logprobs)
    assert t.response_length <= helpers.budget.response
    for start, end in _turns(t):  # every turn: sent exactly what stands before it, got exactly what stands in it
        match = [s for s in engine.sent if s[0] == ids[:start] and s[1][: end - start] == ids[start:end]]
        assert match, "a turn's prompt is not the trajectory so far"
        logprobs = tuple(float(np.float32(p)) for p in t.behavior_logprobs[start:end])
        assert any(np.allclose(logprobs, m[2][: end - start], atol=0) for m in match)
        if end < len(ids) or not t.truncated:
            assert any(len(m[1]) == end - start for m in match), "a turn lost tokens that were sampled"
    context = t.source == Source.CONTEXT
    assert np.isnan(t.behavior_logprobs[context]).all()
    assert (t.source[: t.prompt_length] == Source.CONTEXT).all()
    helper = np.zeros(len(ids), bool)
    for c in t.consults:
        spoken = t.source[c.start : c.end]
        assert (spoken == (Source.HELPER if c.outcome == "ok" else Source.CONTEXT)).all()
        helper[c.start : c.end] = c.outcome == "ok"
        assert c.end - c.start <= helpers.cfg.feedback_tokens or c.outcome != "ok"
        if c.outcome == "ok":
            assert helpers.budget.response - (c.end - t.prompt_length) >= helpers.budget.reserve
    assert (helper == (t.source == Source.HELPER)).all()  # nothing else is the helper's
    served = [c.role for c in t.consults if c.outcome in ("ok", "failed")]
    assert len(served) <= helpers.budget.total
    assert all(served.count(r) <= limit for r, limit in helpers.budget.per_role.items())
    assert (t.failed is not None) == any(c.outcome == "failed" for c in t.consults)
    for kind in Source:  # the text of a source is the text of its ids
        own = [s.text for s in t.segments if s.source is kind]
        assert sum(map(len, own)) == 0 or any(t.source[t.prompt_length :] == kind)


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_ids_sources_and_logprobs_are_exact_at_every_turn(data: st.DataObject) -> None:
    turns = st.lists(st.sampled_from(_FRAGMENTS), min_size=1, max_size=5).map("".join)
    texts = data.draw(st.lists(turns, min_size=1, max_size=6), label="turns")
    replies = data.draw(st.lists(st.sampled_from(_REPLIES), min_size=1, max_size=4), label="replies")
    engine = ScriptEngine(lambda prompt: texts[prompt.count("eedback>") % len(texts)], pieces=data.draw(st.booleans()))
    count = itertools.count()

    def reply(_: HelperRequest) -> str:
        return replies[next(count) % len(replies)]

    response = data.draw(st.sampled_from([70, 120, 300]), label="response")
    helpers = scripted({"verify": reply, "knowledge": reply}, response, total_limit=3)
    if data.draw(st.booleans(), label="same tokenizer"):
        ids = IdHelper(lambda r: reply(r) or "x")
        helpers.helpers |= {"verify": ids}
    rows = _run(engine, helpers, n=3)
    assert len(rows) == 3
    for t in rows:
        _check(t, engine, helpers)


def test_ag01_sampled_pieces_are_never_joined() -> None:
    engine = ScriptEngine(lambda p: "~" if "<feedback>" in p else "hello<verify>hello</verify>")
    (t,) = _run(engine, scripted({"verify": lambda r: "hello"}))
    assert len(encoder().encode("hello")) == 1  # the tokenizer itself would write one token
    own = [int(i) for i, s in zip(t.token_ids, t.source, strict=True) if s == Source.POLICY]
    assert own == [*engine.ids("hello<verify>hello</verify>"), encoder().pad_id]
    assert (
        encoder().decode(t.token_ids[t.prompt_length :]).startswith("hello<verify>hello</verify>\n<feedback>\nhello\n")
    )


def test_ag01_the_token_that_completes_a_tag_is_kept_whole() -> None:
    """A token that ends the tag and starts the next line is the policy's, whole, with its own log-prob; words stand after it."""
    (joined,) = encoder().encode(">\n")
    written = [*encoder().encode("<verify>1</verify"), joined]

    class OneToken(ScriptEngine):
        def ids(self, text: str) -> list[int]:
            return super().ids(text) if text == "~" else [*written, *super().ids("never reached~")]

    engine = OneToken(lambda p: "~" if "<feedback>" in p else "ask")
    helpers = scripted({"verify": lambda r: "ok"})
    (t,) = _run(engine, helpers)
    end = t.prompt_length + len(written)
    assert t.token_ids[t.prompt_length : end].tolist() == written
    assert (t.source[t.prompt_length : end] == Source.POLICY).all() and t.source[end] == Source.CONTEXT
    assert t.behavior_logprobs[end - 1] == np.float32(engine.sent[0][2][-1])
    assert [c.query for c in t.consults] == ["1"]
    assert encoder().decode(t.token_ids[t.prompt_length :]).startswith("<verify>1</verify>\n\n<feedback>\nok")
    _check(t, engine, helpers)


def test_ag02_a_cleaned_reply_keeps_arrays_aligned_and_loses_its_logprobs() -> None:
    helpers = scripted({"verify": lambda r: ""})
    helpers.helpers["verify"] = IdHelper(lambda r: "<think>hidden</think>sound")
    engine = ScriptEngine(lambda p: "~" if "<feedback>" in p else "<verify>a</verify>")
    (t,) = _run(engine, helpers)
    words = t.source == Source.HELPER
    assert encoder().decode(t.token_ids[words]) == "sound"
    assert np.isnan(t.behavior_logprobs[words]).all()
    _check(t, engine, helpers)


def test_same_tokenizer_reply_keeps_ids_and_logprobs_also_when_cut() -> None:
    helper = IdHelper(lambda r: "a sound step")
    helpers = scripted({"verify": lambda r: ""}, feedback_tokens=5)
    helpers.helpers["verify"] = helper
    (t,) = _run(ScriptEngine(lambda p: "~" if "<feedback>" in p else "<verify>a</verify>"), helpers)
    words = t.source == Source.HELPER
    ids, logprobs = helper.given[0]
    assert tuple(t.token_ids[words]) == ids[:5]
    np.testing.assert_array_equal(t.behavior_logprobs[words], np.array(logprobs[:5], np.float32))
    assert "[cut]" in encoder().decode(t.token_ids)


def test_same_tokenizer_reply_loses_its_end_token_and_nothing_else() -> None:
    helper = IdHelper(lambda r: "a sound step")
    helpers = scripted({"verify": lambda r: ""})
    helpers.helpers["verify"] = helper
    (t,) = _run(ScriptEngine(lambda p: "~" if "<feedback>" in p else "<verify>a</verify>"), helpers)
    words = t.source == Source.HELPER
    ids, logprobs = helper.given[0]
    assert tuple(t.token_ids[words]) == ids[:-1] and ids[-1] == encoder().pad_id
    np.testing.assert_array_equal(t.behavior_logprobs[words], np.array(logprobs[:-1], np.float32))


def test_every_turn_of_every_row_draws_from_its_own_stream() -> None:
    def script(prompt: str) -> str:
        return "4~" if prompt.count("\n<feedback>\n") == 2 else "<verify>a</verify>"

    engine = ScriptEngine(script)
    helpers = scripted({"verify": lambda r: "ok"})
    starts = [DialogueStart(q, helpers.prompt_ids(q), k, 2) for k, q in enumerate(("a", "b"))]
    assert len(list(run_dialogues(engine, starts, helpers, Sampling(200)))) == 4
    assert len(engine.streams) == len(set(engine.streams)) == 4 * 3


def test_ag03_helper_words_are_never_the_policys() -> None:
    """Changing only what the helper says changes only helper tokens."""
    runs = []
    for words in ("sound", "doubtful: 2"):
        engine = ScriptEngine(lambda p: "so 4~" if "<feedback>" in p else "x<verify>a</verify>")
        (t,) = _run(engine, scripted({"verify": lambda r, words=words: words}))
        runs.append(t)
    own = [r.token_ids[r.source == Source.POLICY].tolist() for r in runs]
    context = [r.token_ids[r.source == Source.CONTEXT].tolist() for r in runs]
    assert own[0] == own[1] and context[0] == context[1]
    assert runs[0].text == runs[1].text == "x<verify>a</verify>so 4"


def test_ag04_ag05_think_blocks_of_earlier_turns_stay() -> None:
    """The kit's template drops earlier thoughts; a trajectory is one assistant turn and is never rendered again."""
    script = {0: "<think>a</think>x<verify>1</verify>", 1: "</think>y<verify>2</verify>", 2: "<think>b~"}
    engine = ScriptEngine(lambda p: script[p.count("\n<feedback>\n")])
    helpers = scripted({"verify": lambda r: "ok"})
    (t,) = _run(engine, helpers)
    assert t.text == script[0] + script[1] + "<think>b"
    _check(t, engine, helpers)


def test_ag06_ag07_every_question_gets_exactly_one_insertion() -> None:
    """Broken, empty, over the limit, failed or answered: the rollout goes on, and each is counted."""

    def helper(request: HelperRequest) -> str:
        if request.query == "boom":
            raise RuntimeError("broken")
        return "ok"

    script = ["x</verify>", "<verify>1</verify>", "<verify>boom</verify>", "<verify>3</verify>", "done~"]
    notes = ["[not understood", "\n<feedback>\n", "[helper unavail", "[limit reached"]
    engine = ScriptEngine(lambda p: script[sum(p.count(n) for n in notes)])
    (t,) = _run(engine, scripted({"verify": helper}, 300, chat=True))
    assert [c.outcome for c in t.consults] == ["invalid", "ok", "failed", "limit"]
    kinds = [s.source.name[0] for s in t.segments]
    assert "".join(kinds) == "PC" + "PCHC" + "PC" + "PC" + "P"
    assert t.stop_reason is StopReason.EOS
    assert t.failed == "helper verify: script: RuntimeError: broken"


def test_the_policy_is_told_twice_then_the_rollout_ends() -> None:
    (t,) = _run(ScriptEngine(lambda p: "x</verify>"), scripted({"verify": lambda r: "ok"}, 400, notes_limit=2))
    assert [c.outcome for c in t.consults] == ["invalid"] * 3
    assert t.stop_reason is StopReason.STOP and t.failed is None


def test_ag08_a_truncated_trajectory_has_one_truth_about_its_lengths() -> None:
    engine = ScriptEngine(lambda p: "and so on " if "<feedback>" in p else "<verify>a</verify>")
    helpers = scripted({"verify": lambda r: "ok"}, 100)
    (t,) = _run(engine, helpers)
    assert t.truncated and t.response_length == 100
    _check(t, engine, helpers)


def test_rows_with_less_room_are_cut_at_their_own_budget() -> None:
    """Two rows in one decoding round: the engine is given the larger room; the other row still ends at 120."""
    long = "b" * 40

    def script(prompt: str) -> str:
        if "<feedback>" in prompt:
            return "go on "
        return (long if "Q1" in prompt else "") + "<verify>a</verify>"

    helpers = scripted({"verify": lambda r: "ok"}, 140)
    starts = [DialogueStart(q, helpers.prompt_ids(q), 1) for q in ("Q1", "Q2")]
    engine = ScriptEngine(script)
    rows = [t for _, _, t in run_dialogues(engine, starts, helpers, Sampling(140))]
    assert [t.response_length for t in rows] == [140, 140] and all(t.truncated for t in rows)
    for t in rows:
        _check(t, engine, helpers)


def test_rounds_stay_within_the_engines_context() -> None:
    class Small(ScriptEngine):
        def generate(self, prompts, n, sampling, seeds):  # type: ignore[no-untyped-def]
            assert max(map(len, prompts)) + sampling.max_new_tokens <= limit
            return super().generate(prompts, n, sampling, seeds)

    def script(prompt: str) -> str:
        return (
            "on " if "<feedback>" in prompt else "b" * (30 * int(prompt[prompt.index("Q") + 1])) + "<verify>a</verify>"
        )

    helpers = scripted({"verify": lambda r: "ok"}, 200)
    starts = [DialogueStart(q, helpers.prompt_ids(q), 1) for q in ("Q0", "Q1", "Q2", "Q3")]
    limit = helpers.context = max(len(s.prompt_ids) for s in starts) + 200
    rows = list(run_dialogues(Small(script), starts, helpers, Sampling(200)))
    assert len(rows) == 4


def test_ag09_nothing_of_the_prompt_is_trained_not_even_an_assistants_words() -> None:
    few_shot = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "<verify>2</verify>2"},
        {"role": "user", "content": "2+2?"},
    ]
    text = encoder().tokenizer.apply_chat_template(few_shot, tokenize=False, add_generation_prompt=True)
    ids = encoder().encode(text)
    engine = ScriptEngine(lambda p: "4~")
    helpers = scripted({"verify": lambda r: "ok"})
    ((_, _, t),) = run_dialogues(engine, [DialogueStart("2+2?", ids, 0)], helpers, Sampling(helpers.budget.response))
    assert (t.source[: len(ids)] == Source.CONTEXT).all()
    assert t.source[len(ids) :].tolist() == [Source.POLICY, Source.POLICY] and not t.consults


def test_ag10_borders_token_by_token() -> None:
    helpers = scripted({"verify": lambda r: "ok"})
    (t,) = _run(ScriptEngine(lambda p: "4~" if "<feedback>" in p else "<verify>a</verify>"), helpers)
    want = [(i, Source.POLICY) for i in ScriptEngine(lambda _: "").ids("<verify>a</verify>")]
    want += [(i, Source.CONTEXT) for i in encoder().encode("\n<feedback>\n")]
    want += [(i, Source.HELPER) for i in encoder().encode("ok")]
    want += [(i, Source.CONTEXT) for i in encoder().encode("\n</feedback>\n")]
    want += [(i, Source.POLICY) for i in [*encoder().encode("4"), encoder().pad_id]]
    got = list(zip(t.token_ids[t.prompt_length :].tolist(), t.source[t.prompt_length :].tolist(), strict=True))
    assert got == want


def test_ag12_special_tokens_in_the_policys_words_shift_nothing() -> None:
    class Special(ScriptEngine):
        def ids(self, text: str) -> list[int]:
            return [encoder().tokenizer.convert_tokens_to_ids("<|user|>"), *super().ids(text)]

    engine = Special(lambda p: "~" if "<feedback>" in p else "hm <verify>a</verify>")
    helpers = scripted({"verify": lambda r: "do <|end|> <|assistant|> ok"}, feedback_tokens=40)
    (t,) = _run(engine, helpers)
    _check(t, engine, helpers)
    words = t.token_ids[t.source == Source.HELPER]
    assert encoder().decode(words) == "do (end) (assistant) ok"
    assert not set(words.tolist()) & set(encoder().tokenizer.all_special_ids)


def test_ag13_a_giant_reply_is_cut_marked_and_leaves_room() -> None:
    engine = ScriptEngine(lambda p: "4~" if "[cut]" in p else "<verify>a</verify>")
    helpers = scripted({"verify": lambda r: "very " * 5000}, 100, feedback_tokens=20)
    (t,) = _run(engine, helpers)
    assert int((t.source == Source.HELPER).sum()) == 20
    assert t.text.endswith("4") and t.stop_reason is StopReason.EOS


def test_a_question_after_the_final_answer_is_not_served() -> None:
    (t,) = _run(ScriptEngine(lambda p: "<answer>4</answer><verify>4</verify>"), scripted({"verify": lambda r: "ok"}))
    assert not t.consults and t.stop_reason is StopReason.STOP


def test_feedback_the_policy_writes_itself_stays_its_own() -> None:
    (t,) = _run(ScriptEngine(lambda p: "<feedback>sound</feedback>4~"), scripted({"verify": lambda r: "ok"}))
    assert (t.source[t.prompt_length :] == Source.POLICY).all() and not t.consults


def test_ro14_ro15_one_helper_error_in_sixteen_loses_one_trajectory() -> None:
    calls = itertools.count()

    def helper(request: HelperRequest) -> str:
        if next(calls) == 5:
            raise OSError("down")
        return "ok"

    engine = ScriptEngine(lambda p: "4~" if "<feedback>" in p or "[helper" in p else "<verify>a</verify>")
    rows = _run(engine, scripted({"verify": helper}), n=16)
    assert [t.failed is None for t in rows].count(False) == 1
    assert all(t.reward is None and t.text.endswith("4") for t in rows)


def test_trained_wrappers_have_probability_one() -> None:
    helpers = scripted({"verify": lambda r: "ok"}, train_wrappers=True)
    (t,) = _run(ScriptEngine(lambda p: "4~" if "<feedback>" in p else "<verify>a</verify>"), helpers)
    words = t.source == Source.HELPER
    assert encoder().decode(t.token_ids[words]) == "\n<feedback>\nok\n</feedback>\n"
    assert t.behavior_logprobs[words][0] == 0.0 and math.isnan(t.behavior_logprobs[t.consults[0].start])


def test_results_do_not_depend_on_how_rows_are_batched() -> None:
    def script(prompt: str) -> str:
        return "4~" if prompt.count("\n<feedback>\n") == 2 else "hello<verify>a</verify>"

    helpers = scripted({"verify": lambda r: f"seed {r.seed % 97}"})
    starts = [DialogueStart(q, helpers.prompt_ids(q), k, 2) for k, q in enumerate(("a", "b"))]
    together = {
        (i, j): t.token_ids.tolist() for i, j, t in run_dialogues(ScriptEngine(script), starts, helpers, Sampling(200))
    }
    for i, s in enumerate(starts):
        alone = run_dialogues(ScriptEngine(script), [s], helpers, Sampling(200))
        assert {(i, j): t.token_ids.tolist() for _, j, t in alone} == {k: v for k, v in together.items() if k[0] == i}


def test_characters_the_policy_cannot_write_are_left_out() -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from coterie.prompting import PromptEncoder

    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(["<eos>", "<unk>", *"ab[]{}vkr?!-\n"])}, "<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    plain = PromptEncoder(PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", unk_token="<unk>"))
    cfg = config({"knowledge": {"backend": "scripted", "call": "x:y"}}, form="short")
    helpers = HelperSet(cfg, plain, 60, {}, load_form("short"))
    assert plain.decode(helpers.body("knowledge", HelperReply("aébc<eos>a", "x")).token_ids) == "aba"


def test_log_probs_of_a_whole_text_are_used_where_they_say_something_about_its_tokens() -> None:
    """One token, or a certain text: known. A text of several: only its sum is, for a loss that asks for no more."""

    def logprobs(text: str, logprob: float, span_mu: bool = False) -> list[float]:
        cfg = config({"knowledge": {"backend": "scripted", "call": "x:y"}})
        helpers = HelperSet(cfg, encoder(), 200, {}, load_form("full"), span_mu=span_mu)
        return helpers.body("knowledge", HelperReply(text, "x", span_logprob=logprob)).logprobs

    assert logprobs("h", -1.5) == [-1.5]
    certain = logprobs("hello he llo", 0.0)
    assert len(certain) > 1 and set(certain) == {0.0}
    assert all(map(math.isnan, logprobs("hello he llo", -1.5)))
    assert logprobs("hello he llo", -1.5, span_mu=True) == [-1.5 / len(certain)] * len(certain)
    for changed in (" hello he llo", "hello <knowledge> he", "hello " * 40):
        assert all(map(math.isnan, logprobs(changed, 0.0, span_mu=True))), changed


def test_bare_replies_go_on_where_the_question_ended(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(
        '[short]\nopen = ""\nclose = ""\n[short.roles.knowledge]\nstart = ","\nend = "="\n', encoding="utf-8"
    )
    cfg = config({"knowledge": {"backend": "scripted", "call": "x:y"}}, form="short", prompts=str(tmp_path / "p.toml"))
    form = load_form("short", cfg.prompts)
    helpers = HelperSet(cfg, encoder(False), 60, {"knowledge": IdHelper(lambda r: r.query * 2)}, form)
    (t,) = _run(ScriptEngine(lambda p: ";4~" if "hh" in p else "x,h="), helpers)
    assert encoder().decode(t.token_ids[t.prompt_length :]) == "x,h=hh;4"
    assert [s.source for s in t.segments if s.text] == [Source.POLICY, Source.HELPER, Source.POLICY]
    assert helpers.body("knowledge", HelperReply("a, b = c", "x")).text == "a b  c"  # its tags are harmless still


def test_solo_rows_decode_while_the_first_questions_are_answered() -> None:
    """What is passed in comes out after the first turn and before the second, and changes nothing of the dialogues."""

    def script(text: str) -> str:
        return "4~" if "<feedback>" in text else "x<verify>1</verify>"

    def rows(meanwhile: list[tuple[int, int, Trajectory]]) -> list[tuple[int, int, Trajectory]]:
        engine = ScriptEngine(script)
        helpers = scripted({"verify": lambda r: "sound"})
        starts = [DialogueStart("Q0", helpers.prompt_ids("Q0"), 1, 2)]
        turns = iter(meanwhile)

        def other() -> Iterator[tuple[int, int, Trajectory]]:
            for row in turns:
                assert len(engine.sent) == 2, "not between the first turn and the second"
                yield row

        return list(run_dialogues(engine, starts, helpers, Sampling(200), meanwhile=other()))

    alone = rows([])
    solo = (7, 7, dataclasses.replace(alone[0][2], mode="solo"))
    mixed = rows([solo])
    assert mixed[0] is solo
    assert [(i, j, t.token_ids.tolist()) for i, j, t in mixed[1:]] == [
        (i, j, t.token_ids.tolist()) for i, j, t in alone
    ]


def test_ag11_the_tagged_prompt_is_one_full_rendering() -> None:
    """Not pieced together from messages rendered one by one, which loses what a template says about the whole."""
    helpers = scripted({"verify": lambda r: "sound"})
    messages = [{"role": "system", "content": helpers.block}, {"role": "user", "content": "2+2?"}]
    text = encoder().tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert helpers.prompt_ids("2+2?") == encoder().tokenizer(text, add_special_tokens=False)["input_ids"]
    (t,) = _run(ScriptEngine(lambda p: "<think>a</think>4~" if "<feedback>" in p else "<verify>1</verify>"), helpers)
    assert t.token_ids[: t.prompt_length].tolist() == helpers.prompt_ids("Q?")
    assert "<think>a</think>4" in encoder().decode(t.token_ids)  # reasoning stays in the ids that are trained


def test_short_form_with_a_plain_tokenizer() -> None:
    cfg = config({"knowledge": {"backend": "scripted", "call": "x:y"}}, form="short")
    helpers = HelperSet(cfg, encoder(False), 60, {"knowledge": IdHelper(lambda r: r.query + "=4")}, load_form("short"))
    assert helpers.prompt_ids("2+2?") == encoder(False).prompt_ids("2+2?")  # nothing is added
    (t,) = _run(ScriptEngine(lambda p: "4~" if "[" in p else "2+2=k{2+2}"), helpers)
    assert encoder().decode(t.token_ids[t.prompt_length :]) == "2+2=k{2+2}[2+2=4]4"
