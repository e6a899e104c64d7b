"""From a batch to log-probs of its trained tokens: which layout, which forward pass, one output head for all.

Layouts, all of which give the same numbers:

- ``packed``: every prompt once, Llama-family layers of :mod:`coterie.trunk`, attention by rectangles of similar segments.
- ``tree``: every prompt once, any Hugging Face model that takes a 4-D mask. A prompt and its responses are one row under
  a dense mask, so attention costs the square of their sum.
- ``padded``: the plain forward pass over right-padded rows. Always right; the reference for the other two.

Each batch takes the one that needs the fewest floating-point operations, of those that the model was found to compute
rightly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from coterie.batching import Batch, Normalizers
from coterie.config import Recompute
from coterie.errors import UserError
from coterie.lmhead import token_logprobs
from coterie.models_io import head_dim
from coterie.packing import Packed, branches, pack
from coterie.rectangles import Grid
from coterie.trunk import FAMILY, packed_hidden


@dataclass(frozen=True, slots=True, eq=False)
class TokenStats:
    """Position ``t`` is about token ``t`` given all before it, at the row's temperature; 0 outside ``loss_mask``."""

    logprobs: Tensor  # [B, T] float32, differentiable
    entropy: Tensor  # [B, T] nats, of the distribution over token t
    sum_sq: Tensor  # [B, T] sum over the vocabulary of squared probabilities
    layout: str = "none"  # "packed" | "tree" | "padded" | "none" (nothing to compute)
    tokens: int = 0  # tokens that went through the layers, padding included
    values: Tensor | None = None  # [B, T] value of the state before token t, differentiable; None without a value head

    def detach(self) -> TokenStats:
        """The same numbers as constants."""
        values = None if self.values is None else self.values.detach()  # [B, T]
        return replace(self, logprobs=self.logprobs.detach(), values=values)


class Forward:
    """Computes :class:`TokenStats` with one model. At first use it checks, on a few tokens, which layouts and which
    output head reproduce the model's own logits, and never uses one that does not."""

    def __init__(self, model: Any, value_head: nn.Linear | None = None) -> None:
        self.model = model  # the causal LM, adapters in place
        self.value_head = value_head
        self._layouts: tuple[str, ...] = ()
        self._weights = 0  # of the layers: two operations for each, and each token
        self._width = 0  # of queries, all layers together: four operations for each, and each pair of query and key
        self._plain_head = True

    def __call__(self, batch: Batch, *, checkpoint: Recompute = "none") -> TokenStats:
        if not self._layouts:
            self.verify(batch.device)
        if not bool(batch.loss_mask.any()):
            zero = torch.zeros(batch.input_ids.shape, device=batch.device)  # [B, T]
            return TokenStats(zero, zero, zero, values=None if self.value_head is None else zero)
        packed = pack(batch)
        layout = self.layout(batch, packed)
        return self._stats(batch, packed, layout, checkpoint)

    def layout(self, batch: Batch, packed: Packed) -> str:
        """The cheapest verified layout (by floating-point operations) for this batch."""
        longest = int(batch.lengths.max())
        if longest > _window(self.model.config) or self._layouts == ("padded",):
            return "padded"
        work = {"packed": (packed.tokens, packed.cells)}  # tokens through the layers, pairs of query and key
        for layout, (rows, length) in {"tree": _tree_shape(packed), "padded": batch.input_ids.shape}.items():
            work[layout] = rows * length, rows * length * length

        def cost(layout: str) -> int:
            tokens, cells = work[layout]
            return 2 * self._weights * tokens + 4 * self._width * cells

        return min(self._layouts, key=cost)

    def _stats(self, batch: Batch, packed: Packed, layout: str, checkpoint: Recompute) -> TokenStats:
        row, t = packed.row, packed.column
        targets, temperature = batch.input_ids[row, t], batch.temperature[row]  # [M]
        if layout == "packed":
            hidden = packed_hidden(self.model.base_model, packed, checkpoint)[packed.predictor]  # [M, D]
            tokens = packed.tokens
        else:
            with _checkpointing(self.model, checkpoint != "none"):
                if layout == "tree":
                    hidden = _tree_hidden(self.model, packed)[packed.predictor]  # [M, D]
                    tokens = len(_tree_grid(packed)[1].index)
                else:
                    hidden = _padded(self.model, batch, self._plain_head)[row, t - 1]  # [M, D], or logits [M, V]
                    tokens = batch.input_ids.numel()
        if self._plain_head:
            head = self.model.get_output_embeddings()
            stats = token_logprobs(hidden, head.weight, head.bias, targets, temperature)
        else:
            stats = _from_logits(hidden, targets, temperature)

        def spread(values: Tensor) -> Tensor:
            return values.new_zeros(batch.input_ids.shape).index_put((row, t), values)  # [B, T]

        logprobs, entropy, sum_sq = map(spread, stats)
        values = None if self.value_head is None else spread(self._values(hidden))  # [B, T]
        return TokenStats(logprobs, entropy, sum_sq, layout, tokens, values)

    def _values(self, hidden: Tensor) -> Tensor:
        """[M] the value head on the hidden states that predict each token, always in float32."""
        assert self.value_head is not None
        if not self._plain_head:
            raise UserError(
                "advantage.kind = gae: this model makes its logits in a way of its own, so its last hidden states cannot "
                "be had for a value head; use mean_std, mean, rloo or batch"
            )
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = self.value_head(hidden.float()).squeeze(-1)  # [M]
        return values

    @torch.no_grad()
    def verify(self, device: torch.device) -> None:
        """Find the layouts and the output head that reproduce the model's own logits."""
        batch = _probe_batch(int(self.model.config.vocab_size), device)
        packed = pack(batch)
        row, t = packed.row, packed.column
        with torch.autocast(device.type, enabled=False):
            logits = _padded(self.model, batch, hidden=False)[row, t - 1]  # [M, V]
            want = _from_logits(logits, batch.input_ids[row, t], batch.temperature[row])[0]  # [M]

            def agrees(layout: str) -> bool:
                got = self._stats(batch, packed, layout, "none").logprobs[row, t]  # [M]
                return torch.allclose(got, want, rtol=1e-3, atol=1e-3)

            self._plain_head = self.model.get_output_embeddings() is not None and agrees("padded")
            found = []
            if self._plain_head and type(self.model.base_model).__name__ in FAMILY and agrees("packed"):
                found = ["packed"]
            elif self._plain_head and getattr(self.model, "_supports_sdpa", False) and agrees("tree"):
                found = ["tree"]
        self._layouts = (*found, "padded")
        if found:
            self._measure()

    def _measure(self) -> None:
        """What a token and a pair of query and key cost; only models with another layout than padded need to have these."""
        config, inner = self.model.config, self.model.base_model
        self._weights = sum(p.numel() for p in inner.parameters()) - self.model.get_input_embeddings().weight.numel()
        self._width = config.num_hidden_layers * config.num_attention_heads * head_dim(config)


def _padded(model: Any, batch: Batch, hidden: bool = True) -> Tensor:
    """[B, T, D] last hidden states (or [B, T, V] logits) of the plain forward pass over right-padded rows."""
    T = batch.input_ids.shape[1]
    positions = torch.arange(T, device=batch.device).expand_as(batch.input_ids)  # [B, T]
    mask = (positions < batch.lengths[:, None]).long()  # [B, T]
    inputs = {"input_ids": batch.input_ids, "attention_mask": mask, "position_ids": positions, "use_cache": False}
    out: Tensor = model.base_model(**inputs).last_hidden_state if hidden else model(**inputs).logits
    return out


def _tree_shape(packed: Packed) -> tuple[int, int]:
    """Rows and row length of :func:`_tree_grid`."""
    sizes = packed.prompts.clone()  # [G]
    sizes.index_add_(0, packed.prompt_of, packed.responses)
    return len(sizes), int(sizes.max())


def _tree_grid(packed: Packed) -> tuple[Tensor, Grid]:
    """Tokens ordered prompt by prompt [N], and each prompt with its responses as one row of a grid."""
    tree, _ = branches(packed)
    return torch.argsort(tree, stable=True), Grid.of(torch.bincount(tree))


def _tree_hidden(model: Any, packed: Packed) -> Tensor:
    """[N, D] last hidden states of the model's own forward pass under a tree mask."""
    order, grid = _tree_grid(packed)
    pick = order[grid.index]  # [G * L] packed token of each cell
    _, branch = branches(packed)
    label = torch.full_like(grid.index, -2)  # [G * L]; padding sees padding, and nothing else sees it
    label[grid.cells] = branch[order]
    label = label.view(grid.shape)  # [G, L]
    L = grid.shape[1]
    causal = torch.ones(L, L, dtype=torch.bool, device=label.device).tril()
    seen = causal & ((label[:, :, None] == label[:, None]) | ((label == -1)[:, None] & (label != -2)[:, :, None]))
    dtype = (
        torch.get_autocast_dtype(label.device.type) if torch.is_autocast_enabled(label.device.type) else torch.float32
    )
    mask = torch.zeros(seen.shape, dtype=dtype, device=label.device).masked_fill_(~seen, torch.finfo(dtype).min)
    out = model.base_model(
        input_ids=packed.ids[pick].view(grid.shape),
        position_ids=packed.positions[pick].view(grid.shape),
        attention_mask=mask[:, None],  # [G, 1, L, L]
        use_cache=False,
    ).last_hidden_state  # [G, L, D]
    back = torch.empty_like(order)
    back[order] = grid.cells
    hidden: Tensor = out.flatten(0, 1)[back]
    return hidden


def _from_logits(logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same as :func:`coterie.lmhead.token_logprobs`, from logits [M, V] that a model made its own way."""
    logp = torch.log_softmax(logits.float() / temperature[:, None], -1)  # [M, V]
    p = logp.detach().exp()
    entropy = -torch.linalg.vecdot(p, logp.detach())
    return logp.gather(1, targets[:, None]).squeeze(1), entropy, torch.linalg.vecdot(p, p)


class _checkpointing:
    """Activation checkpointing of a Hugging Face model for one forward pass; generation never sees it on.

    The library honours it on modules in train mode only, so just those that carry the switch are put there; everything
    inside them (dropout) stays in eval mode, also when the backward pass computes it again.
    """

    def __init__(self, model: Any, on: bool) -> None:
        self.model, self.on = model, on and torch.is_grad_enabled()

    def __enter__(self) -> None:
        if self.on:
            self._switch("enable")({"use_reentrant": False})
            for module in self.model.modules():
                module.training = bool(getattr(module, "gradient_checkpointing", False))

    def __exit__(self, *_: object) -> None:
        if self.on:
            self.model.eval()
            self._switch("disable")()

    def _switch(self, verb: str) -> Any:
        """Transformers 5 renamed these methods on the way; 6 drops the older name."""
        name = f"activation_checkpointing_{verb}"
        return getattr(self.model, name if hasattr(self.model, name) else f"gradient_checkpointing_{verb}")


def _window(config: Any) -> float:
    """Longest row that attention sees in full: sliding and chunked attention do not fit a tree."""
    sizes = [getattr(config, "attention_chunk_size", None)]
    if getattr(config, "use_sliding_window", True):
        sizes.append(getattr(config, "sliding_window", None))
    return min((s for s in sizes if s), default=float("inf"))


def _probe_batch(vocabulary: int, device: torch.device) -> Batch:
    """Two responses to one prompt of three tokens, one to another."""
    ids = torch.tensor([[3, 1, 4, 1, 5, 9], [3, 1, 4, 2, 6, 0], [2, 7, 1, 8, 0, 0]], device=device) % vocabulary
    B, T = ids.shape
    lengths = torch.tensor([6, 5, 4], device=device)
    prompt = torch.tensor([3, 3, 2], device=device)
    at = torch.arange(T, device=device)
    mask = (at >= prompt[:, None]) & (at < lengths[:, None])
    flag = torch.zeros(B, dtype=torch.bool, device=device)
    one = torch.ones(B, device=device)
    return Batch(
        input_ids=ids,
        source=mask.to(torch.int8),
        behavior_logprobs=torch.zeros(B, T, device=device),
        loss_mask=mask,
        advantages=None,
        lengths=lengths,
        prompt_lengths=prompt,
        own=flag,
        truncated=flag,
        helped=flag,
        temperature=one,
        weights=one,
        group_index=torch.zeros(B, dtype=torch.int64, device=device),
        normalizers=Normalizers(),
    )
