"""The engine that samples with vLLM, in this process, on the policy's GPU. NOT RUN ON A GPU YET.

Written against vLLM's documented interface (``LLM.generate`` with token-id prompts, ``SamplingParams``, ``apply_model``,
``reset_prefix_cache``, ``sleep``, ``wake_up``; https://docs.vllm.ai/en/latest/api/) and tested with a stub that enforces
it (tests/vllm_stub.py).

What differs from :class:`coterie.engines.torch.TorchEngine`: rows come when all are done; a row depends on its seed, but
vLLM promises the same numbers only for the same batch; the weights are a second copy, in ``model.dtype``.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from coterie.config import EngineConfig
from coterie.engines.base import check_request
from coterie.engines.stopping import Stopping
from coterie.engines.weights import version
from coterie.errors import CoterieError, UserError
from coterie.models_io import locate
from coterie.types import Sample, Sampling

if TYPE_CHECKING:
    from coterie.policy import Policy

_SEEDS = 2**62  # vLLM seeds sample j with seed + j, and takes signed 64-bit numbers


class VllmEngine:
    """Samples from ``policy`` as its weights are when :meth:`generate` is called; they are copied into vLLM when they
    have changed.

    Args:
        policy: what is trained.
        name: ``model.name`` it was loaded from; vLLM builds its model from there.
        cfg: share of the GPU's memory, context, whether it sleeps between rollouts.

    Raises:
        UserError: vLLM is not installed, or does not take this model.
    """

    def __init__(self, policy: Policy, name: str, cfg: EngineConfig) -> None:
        vllm = _import()
        self.policy, self.cfg = policy, cfg
        self._params: Any = vllm.SamplingParams
        self._version: tuple[Any, ...] | None = None
        self._asleep = False
        settings: dict[str, Any] = {
            "model": locate(name),
            "dtype": "bfloat16" if policy.dtype == torch.bfloat16 else "float32",
            "gpu_memory_utilization": cfg.gpu_memory,
            "enforce_eager": cfg.eager,
            "enable_sleep_mode": cfg.sleep,
            "generation_config": "vllm",  # nothing from the checkpoint's generation_config.json
            "logprobs_mode": "processed_logprobs",  # of the distribution sampled from: temperature, top-k, top-p applied
            "seed": 0,
        }
        if cfg.context:
            settings["max_model_len"] = cfg.context
        try:
            self._llm: Any = vllm.LLM(**settings)
        except (ValueError, NotImplementedError) as e:
            reason = (str(e).strip() or type(e).__name__).splitlines()[0]
            raise UserError(f"engine.kind = vllm: {reason}; engine.kind = torch takes any model") from e

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int | Sequence[int],
        sampling: Sampling,
        seeds: Sequence[int],
    ) -> Iterator[tuple[int, int, Sample]]:
        """See :meth:`coterie.engines.base.Engine.generate`; rows come in order when all are done."""
        counts = check_request(prompts, n, sampling, seeds)
        self._wake()
        self._update_weights()
        asked = [i for i, count in enumerate(counts) if count]
        requests = [{"prompt_token_ids": [int(t) for t in prompts[i]]} for i in asked]
        settings = [self._settings(sampling, counts[i], seeds[i]) for i in asked]
        found = self._llm.generate(requests, settings, use_tqdm=False) if asked else []
        encoder = self.policy.encoder
        stopping = Stopping(encoder.eos_ids, sampling.stop, sampling.max_new_tokens, encoder.decode)
        return ((i, o.index, _sample(o, stopping)) for i, r in zip(asked, found, strict=True) for o in r.outputs)

    def release(self) -> None:
        """Hand the GPU's memory to the update: weights to the host, the key/value cache dropped."""
        if self.cfg.sleep and not self._asleep:
            self._llm.sleep(level=1)
            self._asleep = True

    def _wake(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    def _settings(self, sampling: Sampling, count: int, seed: int) -> Any:
        """Every setting by name, so that no default of vLLM's or the checkpoint's takes part."""
        return self._params(
            n=count,
            seed=seed % _SEEDS,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=0.0,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            max_tokens=sampling.max_new_tokens,
            min_tokens=0,
            logprobs=0,  # of the sampled token alone
            stop=list(sampling.stop),
            stop_token_ids=sorted(self.policy.encoder.eos_ids),
            ignore_eos=True,  # ends at stop_token_ids, which are the policy's end tokens and no others
            include_stop_str_in_output=True,
            detokenize=bool(sampling.stop),
            skip_special_tokens=False,  # stop strings may contain them
        )

    def _update_weights(self) -> None:
        current = version(self.policy.model)
        if current == self._version:
            return
        weights = full_weights(self.policy.model)
        self._llm.apply_model(lambda model: _load(model, weights))
        self._llm.reset_prefix_cache()  # keys and values of the old weights
        self._version = current


def _load(model: Any, weights: Iterable[tuple[str, Tensor]]) -> int:
    """Inside vLLM: its own loader takes Hugging Face names and fuses and casts what it stores otherwise."""
    return len(model.load_weights(weights) or ())


@torch.no_grad()
def full_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face names and tensors of ``model``, one after the other, adapters added: W + scale * B A."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    adapted = {name: m for name, m in base.named_modules() if isinstance(m, LoraLayer)}
    for name, p in base.named_parameters():
        owner, _, leaf = name.removesuffix(".weight").removesuffix(".bias").rpartition(".base_layer")
        layer = adapted.get(owner) if not leaf else None
        if layer is None:
            if ".lora_" not in name:
                yield name, p.detach()
        elif name.endswith(".weight"):
            deltas = [layer.get_delta_weight(a) for a in layer.active_adapters if a in layer.lora_A]
            yield f"{owner}.weight", p.detach() + sum(deltas)
        else:
            yield f"{owner}.bias", p.detach()


def _sample(output: Any, stopping: Stopping) -> Sample:
    """One row. Why it ended is decided here, by the rule of every engine; what vLLM sampled beyond the end is cut.

    Raises:
        CoterieError: vLLM gave up the row, or left out a log-prob.
    """
    ids = [int(t) for t in output.token_ids]
    suspects: Iterable[int] = range(1, len(ids) + 1)
    if not stopping.stop:
        suspects = [t for t in suspects if ids[t - 1] in stopping.eos_ids or t == stopping.max_new_tokens]
    for t in suspects:
        if (why := stopping.check(ids[:t])) is not None:
            try:
                logprobs = [entry[i].logprob for i, entry in zip(ids[:t], output.logprobs, strict=False)]
            except (KeyError, TypeError) as e:
                raise CoterieError("vllm: a sampled token came without its log-prob") from e
            if len(logprobs) == t:
                return Sample(np.array(ids[:t], np.int32), np.array(logprobs, np.float32), *why)
            raise CoterieError("vllm: a sampled token came without its log-prob")
    raise CoterieError(f"vllm: a row ended after {len(ids)} tokens for no stated reason ({output.finish_reason})")


def _import() -> Any:
    """vLLM, told to run its engine in this process, so that weights can be handed over without copying them out."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    try:
        return importlib.import_module("vllm")
    except ImportError as e:
        raise UserError(
            "engine.kind = vllm needs the extra: pip install -e '.[vllm]' (Linux with an NVIDIA GPU); "
            "engine.kind = torch works everywhere"
        ) from e
