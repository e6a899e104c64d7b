"""The cap on helpers' share of the gradient: met exactly, by scaling helpers' tokens alone, however the batch is cut."""

from pathlib import Path

import pytest

from coterie.config import config_from_dict
from coterie.losses import share_scale
from coterie.run import build

TAGS = '[short.roles.reasoning]\nstart = ","\nend = "+"\n'  # what `tiny` writes in answers to count_bits


def step(folder: Path, cap: float, token_budget: int = 16384, **loss: object) -> dict[str, float]:
    (folder / "tags.toml").write_text(TAGS)
    cfg = config_from_dict(
        {
            "threads": 1,
            "tasks": {"count_bits": {"params": {"min_n": 1, "max_n": 255}}},
            "rollout": {"problems": 3, "group_size": 6, "max_new_tokens": 48},
            "loss": {"external_loss": "ce", "ce_coef": 3.0, "ext_grad_share_cap": cap, **loss},
            "optim": {"token_budget": token_budget},
            "helpers": {
                "form": "short",
                "prompts": str(folder / "tags.toml"),
                "feedback_tokens": 6,
                "query_tokens": 8,
                "roles": {"reasoning": {"backend": "scripted", "table": {"*": "1"}}},
            },
        }
    )
    with build(cfg) as trainer:
        return trainer.train_step()[0]


def test_scaling_by_hand() -> None:
    """Norms 6 and 2: a share of 0.75. A third of the sum is left to helpers if theirs is scaled to 1, a sixth."""
    assert share_scale(0.75, 1 / 3) == pytest.approx(1 / 6)
    assert share_scale(0.2, 0.3) == 1.0 and share_scale(1.0, 0.3) == 0.0


def test_the_cap_is_met_whatever_the_cut(tmp_path: Path) -> None:
    free, capped, cut = step(tmp_path, 0.0), step(tmp_path, 0.2), step(tmp_path, 0.2, token_budget=64)
    assert free["loss/helper/gradient_share"] > 0.3 and "loss/helper_scale" not in free
    for m in (capped, cut):
        assert m["loss/helper/gradient_share"] == pytest.approx(0.2, abs=1e-4)
        assert m["loss/helper_scale"] == pytest.approx(share_scale(free["loss/helper/gradient_share"], 0.2), rel=1e-3)
    assert cut["policy/grad_norm"] == pytest.approx(capped["policy/grad_norm"], rel=1e-3)


def test_below_the_cap_nothing_changes(tmp_path: Path) -> None:
    free, capped = step(tmp_path, 0.0, ce_coef=1e-3), step(tmp_path, 0.9, ce_coef=1e-3)
    assert capped["loss/helper_scale"] == 1.0 and capped["policy/grad_norm"] == free["policy/grad_norm"]
