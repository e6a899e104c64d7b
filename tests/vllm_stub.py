"""A stand-in for vLLM that enforces its documented interface: names, types and order of calls; anything else raises.

Behind it samples a Hugging Face model, built from the folder vLLM would read, whose weights change only through
``load_weights``. Signatures as in vLLM 0.11 and later: https://docs.vllm.ai/en/latest/api/vllm/
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

ENGINE_ARGS: dict[str, type | tuple[type, ...]] = {
    "dtype": str, "seed": int, "gpu_memory_utilization": float, "enforce_eager": bool, "enable_sleep_mode": bool,
    "generation_config": str, "logprobs_mode": str, "max_model_len": int, "tensor_parallel_size": int,
    "enable_prefix_caching": bool, "tokenizer": str, "trust_remote_code": bool,
}  # fmt: skip


@dataclass(kw_only=True)
class SamplingParams:
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name in ("n", "top_k", "max_tokens", "min_tokens"):
            if type(getattr(self, name)) is not int:
                raise TypeError(f"{name} must be an int")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            if not isinstance(getattr(self, name), (int, float)):
                raise TypeError(f"{name} must be a float")
        if self.n < 1 or self.max_tokens < 1 or self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < -1:
            raise ValueError("sampling parameter out of range")
        if self.seed is not None and not (type(self.seed) is int and -(2**63) <= self.seed + self.n < 2**63):
            raise ValueError("seed must be a signed 64-bit integer")
        if self.logprobs is not None and self.logprobs < -1:
            raise ValueError("logprobs must be non-negative or -1")
        if self.stop and (not all(type(s) is str and s for s in self.stop) or not self.detokenize):
            raise ValueError("stop strings are only supported with detokenize=True")
        if self.stop_token_ids and not all(type(t) is int for t in self.stop_token_ids):
            raise ValueError("stop_token_ids must contain only integers")


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True


class Model:
    """What ``apply_model`` hands to its function: weights go in under Hugging Face names."""

    def __init__(self, hf: Any) -> None:
        self.hf = hf

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        own, loaded = dict(self.hf.named_parameters()), set()
        for name, tensor in weights:
            if name not in own:
                raise KeyError(name)
            if own[name].shape != tensor.shape:
                raise ValueError(f"{name}: {tuple(tensor.shape)} for {tuple(own[name].shape)}")
            own[name].copy_(tensor)
            loaded.add(name)
        return loaded


class LLM:
    made: ClassVar[list[LLM]] = []
    extra_tokens = 0  # sampled beyond the end of a row, as an engine that looks at text now and then may do

    def __init__(self, model: str, **kwargs: Any) -> None:
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
            raise RuntimeError("apply_model needs a function that can be sent to another process")
        for name, value in kwargs.items():
            if name not in ENGINE_ARGS:
                raise TypeError(f"EngineArgs.__init__() got an unexpected keyword argument {name!r}")
            if type(value) is not ENGINE_ARGS[name]:
                raise TypeError(f"{name}: {value!r} is not {ENGINE_ARGS[name]}")
        if kwargs["logprobs_mode"] not in ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"):
            raise ValueError("logprobs_mode")
        if (
            kwargs["dtype"] not in ("auto", "bfloat16", "float16", "float32")
            or not 0 < kwargs["gpu_memory_utilization"] <= 1
        ):
            raise ValueError("dtype or gpu_memory_utilization")
        self.settings, self.calls = kwargs, [("init", model)]
        self.model = Model(AutoModelForCausalLM.from_pretrained(model).eval())
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.asleep = False
        LLM.made.append(self)

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        assert not self.asleep, "asleep"
        self.calls.append(("apply_model", None))
        return [func(self.model)]

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        self.calls.append(("reset_prefix_cache", None))
        return True

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        assert self.settings["enable_sleep_mode"] and level in (1, 2) and not self.asleep
        self.asleep = True
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.asleep = False
        self.calls.append(("wake_up", tags))

    def generate(
        self,
        prompts: Sequence[dict[str, Any]],
        sampling_params: Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: Any = None,
        priority: list[int] | None = None,
    ) -> list[RequestOutput]:
        assert not self.asleep, "asleep"
        if len(prompts) != len(sampling_params):
            raise ValueError("The lengths of prompts and params must be the same.")
        for prompt in prompts:
            ids = prompt.get("prompt_token_ids")
            if set(prompt) != {"prompt_token_ids"} or type(ids) is not list or not all(type(t) is int for t in ids):
                raise TypeError("a prompt given as tokens is {'prompt_token_ids': list of int}")
        self.calls.append(("generate", len(prompts)))
        pairs = zip(prompts, sampling_params, strict=True)
        return [self._request(str(i), p["prompt_token_ids"], s) for i, (p, s) in enumerate(pairs)]

    def _request(self, name: str, prompt: list[int], params: SamplingParams) -> RequestOutput:
        return RequestOutput(name, prompt, [self._row(prompt, params, j) for j in range(params.n)])

    @torch.no_grad()
    def _row(self, prompt: list[int], params: SamplingParams, index: int) -> CompletionOutput:
        generator = torch.Generator().manual_seed(params.seed + index)
        ids, logprobs, why, reason = [], [], None, None
        extra, cache, new = self.extra_tokens, DynamicCache(config=self.model.hf.config), prompt
        name = "cache" if "cache" in inspect.signature(self.model.hf.forward).parameters else "past_key_values"
        while extra >= 0 and len(ids) < params.max_tokens:
            logits = self.model.hf(torch.tensor([new]), use_cache=True, **{name: cache}).logits[0, -1].float()
            logp = (logits / params.temperature).log_softmax(-1)
            raw = logits.log_softmax(-1) if self.settings["logprobs_mode"] == "raw_logprobs" else logp
            token = int(torch.multinomial(logp.exp(), 1, generator=generator))
            ids.append(token)
            new = [token]
            entry = {token: Logprob(float(raw[token]), 1)}
            if params.logprobs:
                entry |= {int(t): Logprob(float(raw[t])) for t in raw.topk(params.logprobs).indices}
            logprobs.append(entry)
            if why is None:
                why, reason = self._ended(ids, params)
            if why is not None:
                extra -= 1
        text = self.tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens) if params.detokenize else ""
        shown = logprobs if params.logprobs is not None else None
        return CompletionOutput(index, text, tuple(ids), 0.0, shown, why or "length", reason)

    def _ended(self, ids: list[int], params: SamplingParams) -> tuple[str | None, int | str | None]:
        if ids[-1] in (params.stop_token_ids or []):
            return "stop", ids[-1]
        text = self.tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
        return next((("stop", s) for s in params.stop or [] if s in text), (None, None))
