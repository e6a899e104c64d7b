"""Several processes train one policy: weights, gradients and moments in shards (PyTorch's FSDP2), one loop in step.

    torchrun --nproc-per-node 2 -m coterie train my.toml

Every process runs the same loop. What they share out is the work: each samples its part of the prompts and computes its
micro-batches; what they learn is the same, because a batch's normalisers are those of the whole batch and gradients are
summed. Process 0 alone scores, writes and speaks, and its verdicts are told to all, so that processes never disagree about
what comes next (a process that waits for another one for ever is the usual fault of such trainers).

Tested with two processes on a CPU (gloo): the same update as one process. Not run on GPUs yet.
"""

from __future__ import annotations

import copy
import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from coterie.batching import Batch, micro_batches
from coterie.config import Config, Recompute
from coterie.engines.base import check_request
from coterie.engines.torch import TorchEngine
from coterie.errors import CoterieError, UserError
from coterie.forward import TokenStats
from coterie.loss_metrics import LossOutput
from coterie.policy import Policy, StepResult
from coterie.policy import _check as check_entries
from coterie.rundir import RunDir
from coterie.tasks.scoring import Score, Scorer
from coterie.trainer import Trainer
from coterie.trunk import FAMILY, layer_forward
from coterie.types import Problem, Sample, Sampling

T = TypeVar("T")
TIMEOUT_S = 600.0  # after which a process that waits for another one says so and ends


def world() -> int:
    """How many processes train this policy; 1 unless started by torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def leads() -> bool:
    """Whether this process scores, writes and speaks."""
    return rank() == 0


def check(cfg: Config) -> None:
    """Refuse what several processes cannot train together yet.

    Raises:
        UserError: names the setting.
    """
    refused = {
        "method = sft": cfg.method == "sft",
        "advantage.kind = gae": cfg.advantage.kind == "gae",
        "swarm.exchange": cfg.swarm.exchange != "none",
        "helpers.roles": bool(cfg.helpers.roles),
        "engine.kind = vllm": cfg.engine.kind != "torch",
        "parallel.log_updates": cfg.parallel.log_updates > 0,
    }
    if found := [name for name, on in refused.items() if on]:
        raise UserError(f"{world()} processes for one policy do not go with {found[0]} yet; start without torchrun")


def join(timeout_s: float = TIMEOUT_S) -> None:
    """Enter the group that torchrun's environment describes; does nothing if this process has."""
    if dist.is_initialized():
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def told(make: Callable[[], T]) -> T:
    """What process 0 makes, in every process; what it raises is raised everywhere."""
    said: list[Any] = [None]
    if leads():
        try:
            said = [(make(), None)]
        except Exception as e:  # the others wait for word, whatever it is
            said = [(None, e)]
    _collective(lambda: dist.broadcast_object_list(said, src=0))
    value, error = said[0]
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]


def gathered(mine: T) -> list[T]:
    """Every process's ``mine``, in order of rank, in every process."""
    out: list[Any] = [None] * dist.get_world_size()
    _collective(lambda: dist.all_gather_object(out, mine))
    return out


def same(mine: object, what: str) -> None:
    """Raises CoterieError unless ``mine`` is equal in every process."""
    found = gathered(mine)
    if any(f != found[0] for f in found):
        raise CoterieError(f"processes do not see the same: {what} is {found}; the run directory must be shared by all")


def _collective(run: Callable[[], object]) -> None:
    try:
        run()
    except RuntimeError as e:
        raise CoterieError(
            f"process {rank()} of {dist.get_world_size()}: another process did not answer ({str(e).splitlines()[0][:200]}); "
            "its own output says why"
        ) from e


class ShardedPolicy(Policy):
    """A policy whose weights, gradients and moments lie in shards, layer by layer, over all processes."""

    def __init__(self, model: Any, tokenizer: Any, **kwargs: Any) -> None:
        super().__init__(model, tokenizer, **kwargs)
        self._forward.verify(self.device)  # on whole weights
        self.full = FullCopy(self)
        self._computed = ("none", 0)  # layout and tokens of the last forward pass
        self._shard()
        self._trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        o = self.optim
        self._optimizer = torch.optim.AdamW(
            list(self._trained.values()), lr=o.lr, betas=(o.beta1, o.beta2), weight_decay=o.weight_decay, fused=True
        )

    def _shard(self) -> None:
        lm = self.causal_lm
        names = set(getattr(lm, "_no_split_modules", None) or ())
        layers = [m for m in lm.modules() if type(m).__name__ in names]
        if not layers:
            raise UserError(
                f"{type(lm).__name__} does not name its layers, so it cannot be sharded; start without torchrun"
            )
        packed = type(lm.base_model).__name__ in FAMILY
        for layer in layers:
            fully_shard(layer)
            if packed:
                layer.packed = MethodType(layer_forward, layer)
                register_fsdp_forward_method(layer, "packed")
        fully_shard(lm)
        lm.token_stats = MethodType(self._token_stats, lm)
        register_fsdp_forward_method(lm, "token_stats")
        for module in lm.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # sum, not mean: a batch's normalisers are those of the whole
                module.set_force_sum_reduction_for_comms(True)  # gloo knows no other

    def _token_stats(self, lm: Any, batch: Batch, checkpoint: Recompute) -> tuple[Tensor, Tensor, Tensor]:
        stats = self._forward(batch, checkpoint=checkpoint)
        self._computed = (stats.layout, stats.tokens)
        return stats.logprobs, stats.entropy, stats.sum_sq  # FSDP looks for tensors in what comes out

    def logprobs(self, batch: Batch) -> TokenStats:
        with self.autocast():
            checkpoint = self.optim.activation_checkpointing
            logprobs, entropy, sum_sq = self.causal_lm.token_stats(batch.to(self.device), checkpoint)  # [B, T]
        return TokenStats(logprobs, entropy, sum_sq, *self._computed)

    @torch.no_grad()
    def reference_logprobs(self, batch: Batch) -> Tensor:
        with self.autocast(), self._reference_forward() as forward:
            batch = batch.to(self.device)
            if forward is not self._forward:
                return forward(batch).logprobs
            logprobs: Tensor = self.causal_lm.token_stats(batch, False)[0]  # [B, T]
            return logprobs

    def backward(self, loss: Tensor) -> None:
        """Always runs, so that no process waits for one that skips; a non-finite loss gives a non-finite gradient norm,
        by which all of them skip the step."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, lr: float) -> StepResult:
        grads = [p.grad for p in self._trained.values() if p.grad is not None]
        total: Any = nn.utils.get_total_norm(grads) if grads else torch.zeros(())
        norm = whole(total)
        skipped = None if grads else "nothing to train on"
        if skipped is None and not bool(torch.isfinite(norm)):
            skipped = f"non-finite gradient ({norm.item()})"
        if skipped is None:
            nn.utils.clip_grads_with_norm_(self._trained.values(), self.optim.grad_clip, total)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.full.stale = True
        return StepResult(float(norm), skipped)

    def weights(self) -> dict[str, Tensor]:
        return {n: whole(p.detach()) for n, p in self._trained.items()}

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        check_entries("weights", {n: tuple(p.shape) for n, p in self._trained.items()}, weights)
        with torch.no_grad():
            for name, p in self._trained.items():
                p.copy_(like(weights[name], p))
        self.full.stale = True

    def optimizer_state(self) -> dict[str, Tensor]:
        state = self._optimizer.state
        found = {f"{k}.{n}": v for n, p in self._trained.items() if p in state for k, v in state[p].items()}
        return {key: whole(value) for key, value in found.items()}

    def load_optimizer_state(self, state: dict[str, Tensor]) -> None:
        kinds = ("exp_avg", "exp_avg_sq", "step")
        names = [n for n in self._trained if f"step.{n}" in state]
        want = {f"{k}.{n}": () if k == "step" else tuple(self._trained[n].shape) for n in names for k in kinds}
        check_entries("optimiser state", want, state)
        self._optimizer.state.clear()
        for n in names:
            p = self._trained[n]
            moments = {k: like(state[f"{k}.{n}"].float(), p) for k in ("exp_avg", "exp_avg_sq")}
            self._optimizer.state[p] = moments | {"step": state[f"step.{n}"].to(p.device, torch.float32, copy=True)}

    def save_pretrained(self, folder: str | Path, *, merged: bool = True) -> None:
        self.full.refresh()
        if leads():
            model = self.full.model
            (copy.deepcopy(model).merge_and_unload() if self.lora and merged else model).save_pretrained(str(folder))
            self.tokenizer.save_pretrained(str(folder))


class FullCopy:
    """Whole weights in every process, for sampling and saving; made new from the shards when they have changed."""

    def __init__(self, policy: ShardedPolicy) -> None:
        self.model = copy.deepcopy(policy.model).requires_grad_(False)
        self.dtype, self.encoder, self.device = policy.dtype, policy.encoder, policy.device
        self.stale = False
        self._policy = policy

    @torch.no_grad()
    def refresh(self) -> None:
        """All processes at once."""
        if not self.stale:
            return
        own = dict(self.model.named_parameters())
        for name, p in self._policy._trained.items():
            own[name].copy_(whole(p.detach()))
        self.stale = False


def whole(t: Tensor) -> Tensor:
    """A sharded tensor put together (all processes at once); any other as it is."""
    return t.full_tensor() if isinstance(t, DTensor) else t


def like(t: Tensor, p: Tensor) -> Tensor:
    """The whole tensor ``t``, which every process has, in shards as ``p`` is."""
    assert isinstance(p, DTensor)
    return distribute_tensor(t.to(p.device), p.device_mesh, p.placements, src_data_rank=None)


class SharedEngine:
    """Each process samples every so manyth prompt; all get all rows, in the same order."""

    def __init__(self, policy: ShardedPolicy, token_budget: int) -> None:
        self._full = policy.full
        self._inner = TorchEngine(policy.full, token_budget)

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int | Sequence[int], sampling: Sampling, seeds: Sequence[int]
    ) -> Iterator[tuple[int, int, Sample]]:
        """See :meth:`coterie.engines.base.Engine.generate`. Called by all processes with the same arguments."""
        counts = check_request(prompts, n, sampling, seeds)
        self._full.refresh()
        mine = list(range(rank(), len(prompts), dist.get_world_size()))
        rows = self._inner.generate(
            [prompts[i] for i in mine], [counts[i] for i in mine], sampling, [seeds[i] for i in mine]
        )
        parts = gathered([(mine[k], j, sample) for k, j, sample in rows])
        yield from sorted((row for part in parts for row in part), key=lambda row: row[:2])

    def release(self) -> None:
        self._inner.release()


@dataclass
class _Told:
    """A score that process 0 knows, or will."""

    future: Future[Score] | None

    def result(self) -> Score:
        return told(self._known)

    def _known(self) -> Score:
        assert self.future is not None
        return self.future.result()


class SharedScorer(Scorer):
    """Process 0 scores and tells; the others ask for results in the same order."""

    def submit(self, problem: Problem, text: str, *, untrusted: bool = False) -> Any:
        return _Told(super().submit(problem, text, untrusted=untrusted) if leads() else None)


class SharedTrainer(Trainer):
    """The loop, with the micro-batches of an update dealt out."""

    def _parts(self, batch: Batch) -> tuple[list[Batch], int]:
        """Micro-batches of this process and how many of them count. Those with fewer than others compute one again, times
        zero: every process takes part in the same number of exchanges (huggingface/open-r1 issue 478)."""
        parts = micro_batches(batch, self.cfg.optim.token_budget)
        mine = parts[rank() :: dist.get_world_size()]
        most = -(-len(parts) // dist.get_world_size())
        return mine + parts[:1] * (most - len(mine)), len(mine)

    def _all(self, outputs: list[LossOutput]) -> list[LossOutput]:
        plain = [LossOutput(o.loss.detach().cpu(), {k: v.cpu() for k, v in o.sums.items()}) for o in outputs]
        return [o for part in gathered(plain) for o in part]

    def _all_computed(self, computed: list[tuple[str, int]]) -> list[tuple[str, int]]:
        return [c for part in gathered(computed) for c in part]


class FollowerDir(RunDir):
    """The run directory in processes that only read from it."""

    def __init__(self, cfg: Config) -> None:
        self.path = Path(cfg.run_dir)
        self.checkpoints = self.path / "checkpoints"

    def rewind(self, step: int) -> None:
        pass

    def append(self, name: str, records: list[dict[str, Any]]) -> None:
        pass

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass
