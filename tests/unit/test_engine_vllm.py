"""The vLLM engine against a stub that enforces vLLM's interface. It has not been run with vLLM on a GPU."""

from __future__ import annotations

import sys

import pytest
import torch
import vllm_stub
from transformers import AutoModelForCausalLM

from coterie.config import EngineConfig, ModelConfig, load_config
from coterie.engines.vllm import VllmEngine, full_weights
from coterie.errors import CoterieError, UserError
from coterie.policy import Policy
from coterie.run import build
from coterie.types import Sampling, StopReason


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[vllm_stub.LLM]:
    monkeypatch.setitem(sys.modules, "vllm", vllm_stub)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setattr(vllm_stub.LLM, "made", [])
    return vllm_stub.LLM


def engine(rank: int = 0, **settings: object) -> VllmEngine:
    return VllmEngine(
        Policy.load(ModelConfig(name="tiny", lora_rank=rank)), "tiny", EngineConfig(kind="vllm", **settings)
    )


def sums(e: VllmEngine) -> list[list[int]]:
    return [e.policy.encoder.prompt_ids(p) for p in ("3 + 4 =", "12 + 30 - 5 =")]


def rows(e: VllmEngine, **sampling: object) -> dict[tuple[int, int], object]:
    settings = Sampling(**({"max_new_tokens": 24} | sampling))
    return {(i, j): s for i, j, s in e.generate(sums(e), [2, 3], settings, [2**64 - 1, 7])}


def test_rows_log_probs_and_reasons(llm: type[vllm_stub.LLM]) -> None:
    e = engine()
    found = rows(e, temperature=0.7)
    assert sorted(found) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    eos = e.policy.encoder.eos_ids
    for (i, _), s in found.items():
        ids = torch.tensor([*sums(e)[i], *s.token_ids.tolist()])
        logits = e.policy.model(ids[None]).logits[0, len(sums(e)[i]) - 1 : -1]
        want = (logits / 0.7).log_softmax(-1).gather(1, ids[len(sums(e)[i]) :, None])[:, 0]
        assert torch.allclose(torch.tensor(s.logprobs), want, atol=1e-4)
        assert (s.stop_reason is StopReason.EOS) == (int(s.token_ids[-1]) in eos)
    again = rows(e, temperature=0.7)
    assert all((found[k].token_ids == again[k].token_ids).all() for k in found)  # by seed


def test_no_default_of_the_checkpoint_or_of_vllm_takes_part_ro03(llm: type[vllm_stub.LLM]) -> None:
    e = engine(gpu_memory=0.3, context=256, eager=True)
    settings = llm.made[0].settings
    assert settings["generation_config"] == "vllm" and settings["logprobs_mode"] == "processed_logprobs"
    assert settings["gpu_memory_utilization"] == 0.3 and settings["max_model_len"] == 256 and settings["enforce_eager"]
    assert settings["dtype"] == "float32"
    params = e._settings(Sampling(9, temperature=0.5, top_p=0.9, top_k=4, stop=("x",)), 3, 2**64 - 1)
    assert (params.n, params.max_tokens, params.temperature, params.top_p, params.top_k) == (3, 9, 0.5, 0.9, 4)
    assert params.repetition_penalty == 1.0 and params.stop == ["x"] and 0 <= params.seed < 2**62


def test_what_is_sampled_beyond_the_end_is_cut(llm: type[vllm_stub.LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rows(engine())
    monkeypatch.setattr(llm, "extra_tokens", 3)
    cut = rows(engine())
    assert all((whole[k].token_ids == cut[k].token_ids).all() for k in whole)
    assert all(len(s.logprobs) == len(s.token_ids) for s in cut.values())


def test_the_token_that_completes_a_stop_string_is_kept(llm: type[vllm_stub.LLM]) -> None:
    e = engine()
    stopped = [s for s in rows(e, stop=("<answer>",)).values() if s.stop_reason is StopReason.STOP]
    assert stopped
    for s in stopped:
        assert s.stop_string == "<answer>" and e.policy.encoder.decode(s.token_ids).endswith("<answer>")
    short = rows(e, max_new_tokens=2)
    assert {s.stop_reason for s in short.values()} <= {StopReason.LENGTH, StopReason.EOS}
    assert any(s.stop_reason is StopReason.LENGTH and len(s.token_ids) == 2 for s in short.values())


def test_weights_go_over_when_they_have_changed_and_the_prefix_cache_is_dropped(llm: type[vllm_stub.LLM]) -> None:
    e = engine()
    rows(e)
    rows(e)
    names = [name for name, _ in llm.made[0].calls]
    assert names == ["init", "apply_model", "reset_prefix_cache", "generate", "generate"]
    with torch.no_grad():
        e.policy.model.model.norm.weight.mul_(1.5)
    rows(e)
    assert [name for name, _ in llm.made[0].calls][5:] == ["apply_model", "reset_prefix_cache", "generate"]


def test_it_sleeps_during_the_update_and_wakes_before_weights_go_over(llm: type[vllm_stub.LLM]) -> None:
    e = engine()
    rows(e)
    e.release()
    e.release()
    rows(e)
    names = [name for name, _ in llm.made[0].calls]
    assert names.count("sleep") == 1 and names[-2:] == ["wake_up", "generate"]
    awake = engine(sleep=False)
    awake.release()
    assert ("sleep", 1) not in llm.made[1].calls


def test_adapters_are_added_under_the_names_of_the_base_model() -> None:
    policy = Policy.load(ModelConfig(name="tiny", lora_rank=4))
    with torch.no_grad():
        for name, p in policy.weights().items():
            if "lora_B" in name:
                p.normal_(generator=torch.Generator().manual_seed(0))
    got = dict(full_weights(policy.model))
    merged = policy.model.merge_and_unload()
    want = dict(merged.named_parameters())
    assert got.keys() == want.keys() == dict(AutoModelForCausalLM.from_config(merged.config).named_parameters()).keys()
    assert all(torch.allclose(got[k], want[k], atol=1e-5) for k in want)


@pytest.mark.parametrize(("rank", "lr"), [(0, 2e-4), (4, 2e-3)])
def test_ob12_the_sampler_follows_the_learner(rank: int, lr: float, llm: type[vllm_stub.LLM]) -> None:
    flags = "--threads 1 --engine.kind vllm --rollout.problems 3 --rollout.group_size 4 --rollout.max_new_tokens 32 "
    flags += f"--optim.lr {lr} --model.lora_rank {rank} --tasks.count_bits.params={{min_n=1,max_n=31}}"
    with build(load_config(None, flags.split())) as trainer:
        gaps = [trainer.train_step()[0].get("loss/own/behavior_gap") for _ in range(2)]
    assert all(g is not None and g < 1e-4 for g in gaps), gaps
    assert [name for name, _ in llm.made[0].calls].count("apply_model") == 2


def test_missing_vllm_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # an import of it fails as if it were not installed
    with pytest.raises(UserError, match=r"pip install -e '.\[vllm\]'.*engine.kind = torch works everywhere"):
        engine()


def test_a_model_vllm_refuses_is_one_clear_line(llm: type[vllm_stub.LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, model: str, **_: object) -> None:
        raise ValueError("Model architectures ['Odd'] are not supported\nlong story")

    monkeypatch.setattr(llm, "__init__", refuse)
    with pytest.raises(UserError, match=r"engine.kind = vllm: Model architectures \['Odd'\] are not supported; "):
        engine()


def test_a_row_given_up_or_without_log_probs_is_an_error(
    llm: type[vllm_stub.LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    e, row = engine(), vllm_stub.LLM._row

    def given_up(self, *args):
        out = row(self, *args)
        return vllm_stub.CompletionOutput(out.index, "", out.token_ids[:1], None, out.logprobs[:1], "abort")

    monkeypatch.setattr(llm, "_row", given_up)
    with pytest.raises(CoterieError, match="abort"):
        rows(e)
    monkeypatch.setattr(llm, "_row", lambda s, *a: vllm_stub.CompletionOutput(0, "", row(s, *a).token_ids, None, None))
    with pytest.raises(CoterieError, match="without its log-prob"):
        rows(e)
