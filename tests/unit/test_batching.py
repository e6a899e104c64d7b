"""Groups to tensors: masks, normalisers, cuts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from batch_kit import C, H, P, advantages_for, group, random_groups, trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.batching import Batch, Normalizers, collate, micro_batches
from coterie.types import StopReason


def test_collate_places_every_field() -> None:
    own = group("a", trajectory([2, 3], [4, 5, 6, 1], [P, C, H, P]), trajectory([2, 3], [4], mode="helped"))
    peer = group("b", trajectory([7], [8, 9], stop_reason=StopReason.LENGTH, temperature=0.5), author="you")
    b = collate([own, peer], [[1.0, -2.0], [0.5]], "me", weights=[1.0, 0.25], max_new_tokens=16)
    assert b.input_ids.tolist() == [[2, 3, 4, 5, 6, 1], [2, 3, 4, 0, 0, 0], [7, 8, 9, 0, 0, 0]]
    assert b.loss_mask.int().tolist() == [[0, 0, 1, 0, 1, 1], [0, 0, 1, 0, 0, 0], [0, 1, 1, 0, 0, 0]]
    assert b.advantages is not None
    assert b.advantages.tolist() == [[0, 0, 1, 0, 1, 1], [0, 0, -2, 0, 0, 0], [0, 0.5, 0.5, 0, 0, 0]]
    assert b.behavior_logprobs[1].isnan().tolist() == [False, False, False, True, True, True]
    assert b.lengths.tolist() == [6, 3, 3] and b.prompt_lengths.tolist() == [2, 2, 1]
    assert b.own.tolist() == [True, True, False] and b.truncated.tolist() == [False, False, True]
    assert b.helped.tolist() == [False, True, False] and b.group_index.tolist() == [0, 0, 1]
    assert b.temperature.tolist() == [1.0, 1.0, 0.5] and b.weights.tolist() == [1.0, 1.0, 0.25]
    assert b.normalizers == Normalizers(
        own_policy=3, own_helper=1, peer_policy=2, peer_helper=0, own_rows=2, peer_rows=1, max_new_tokens=16
    )
    assert (b.normalizers.policy, b.normalizers.helper, b.normalizers.rows) == (5, 1, 3)


def test_ob02_unassigned_and_failed_trajectories_get_no_row() -> None:
    g = group("a", trajectory([2], [3]), trajectory([2], [4]), trajectory([2], [5], failed="timeout"))
    b = collate([g], [[1.0, None, 2.0]], "me")
    assert b.input_ids.tolist() == [[2, 3]] and b.normalizers.policy == 1


def test_truncated_rows_can_be_left_out() -> None:
    g = group("a", trajectory([2], [3], stop_reason=StopReason.LENGTH), trajectory([2], [4, 5]))
    b = collate([g], [[1.0, -1.0]], "me", mask_truncated=True)
    assert b.input_ids.tolist() == [[2, 4, 5]] and b.normalizers == Normalizers(own_policy=2, own_rows=1)


def test_advantages_per_token_and_none_for_supervised() -> None:
    g = group("a", trajectory([2, 3], [4, 5]))
    b = collate([g], [[[9.0, 9.0, 0.5, -0.5]]], "me")
    assert b.advantages is not None and b.advantages.tolist() == [[0.0, 0.0, 0.5, -0.5]]
    assert collate([g], None, "me").advantages is None


def test_ob01_rows_with_zero_advantage_stay_unless_asked_away() -> None:
    g = group("a", trajectory([2], [3]), trajectory([2], [4, 5]))
    assert len(collate([g], [[0.0, 0.0]], "me")) == 2
    lean = collate([g], [[0.0, 0.0]], "me", drop_zero_advantages=True)
    assert len(lean) == 0 and lean.normalizers.policy == 3 and micro_batches(lean, 10) == []


def test_repeated_group_and_misshapen_advantages_are_refused() -> None:
    g = group("a", trajectory([2], [3]), trajectory([2], [4]))
    with pytest.raises(ValueError, match="same id"):
        collate([g, g], [[1.0, 1.0]] * 2, "me")
    with pytest.raises(ValueError, match="one entry per trajectory"):
        collate([g], [[1.0]], "me")
    with pytest.raises(ValueError, match="one entry per trajectory"):
        collate([g], [], "me")


def test_shapes_and_types_are_asserted() -> None:
    b = collate([group("a", trajectory([2], [3]))], [[1.0]], "me")
    with pytest.raises(ValueError, match="lengths has shape"):
        dataclasses.replace(b, lengths=torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="loss_mask is"):
        dataclasses.replace(b, loss_mask=b.input_ids)


def rows_of(parts: list[Batch]) -> list[list[int]]:
    return [p.input_ids[i, : int(n)].tolist() for p in parts for i, n in enumerate(p.lengths)]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), budget=st.integers(1, 200), groups=st.integers(1, 5), size=st.integers(1, 6))
def test_micro_batches_keep_every_row_in_order_within_budget(seed: int, budget: int, groups: int, size: int) -> None:
    made = random_groups(seed, groups, size)
    b = collate(made, advantages_for(made), "me")
    parts = micro_batches(b, budget)
    assert rows_of(parts) == rows_of([b])
    for p in parts:
        assert p.normalizers == b.normalizers and p.input_ids.shape[1] == int(p.lengths.max())
        prompts = {(int(g), tuple(i[: int(n)].tolist())): int(n) for g, i, n in _prompts(p)}
        tokens = sum(prompts.values()) + int((p.lengths - p.prompt_lengths).sum())
        assert tokens <= budget or len(p) == 1


def _prompts(p: Batch) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    return list(zip(p.group_index, p.input_ids, p.prompt_lengths, strict=True))


def test_groups_stay_whole_where_they_fit() -> None:
    made = [group(f"g{i}", *(trajectory([2] * 4, [3] * 3) for _ in range(2))) for i in range(4)]  # 10 tokens each
    b = collate(made, advantages_for(made), "me")
    assert [p.group_index.tolist() for p in micro_batches(b, 25)] == [[0, 0, 1, 1], [2, 2, 3, 3]]
    assert [p.group_index.tolist() for p in micro_batches(b, 9)] == [[i] for i in (0, 0, 1, 1, 2, 2, 3, 3)]


def test_padding_is_never_read() -> None:
    made = random_groups(7)
    b = collate(made, advantages_for(made), "me")
    assert np.array_equal(b.input_ids[0, : int(b.lengths[0])].numpy(), made[0].trajectories[0].token_ids)
    assert int(b.loss_mask.sum()) == sum(t.response_length for g in made for t in g.trajectories)
