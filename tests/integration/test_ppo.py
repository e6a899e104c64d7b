"""PPO as a run: it goes on bit for bit after a stop, and every key it logs is documented."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from coterie.config import load_config
from coterie.run import train
from coterie.rundir import read_jsonl

FLAGS = [
    "--advantage.kind",
    "gae",
    "--threads",
    "1",
    "--rollout.problems",
    "3",
    "--rollout.group_size",
    "4",
    "--rollout.max_new_tokens",
    "32",
    "--eval.every",
    "0",
    "--eval.problems",
    "2",
    "--eval.samples",
    "1",
    "--optim.updates",
    "2",
    "--optim.token_budget",
    "200",
    "--checkpoint.every",
    "1",
    "--tasks.count_bits.params={min_n=1,max_n=1023}",
]


def run(folder: Path, steps: int) -> dict[str, torch.Tensor]:
    train(load_config(None, [*FLAGS, "--run_dir", str(folder), "--steps", str(steps)]), quiet=True)
    last = folder / "checkpoints" / f"step_{steps:06d}"
    return load_file(last / "weights.safetensors") | {
        f"o.{n}": t for n, t in load_file(last / "optimizer.safetensors").items()
    }


def test_a_stopped_ppo_run_goes_on_bit_for_bit_value_head_included(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 4)
    run(tmp_path / "cut", 2)
    cut = run(tmp_path / "cut", 4)
    assert whole.keys() == cut.keys() and all(torch.equal(whole[n], cut[n]) for n in whole)
    assert float(whole["value_head.weight"].abs().sum()) > 0
    saved = load_file(tmp_path / "whole" / "model" / "model.safetensors")
    assert saved and not any("value_head" in n for n in saved)

    doc = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    logged = {k for r in read_jsonl(tmp_path / "whole" / "metrics.jsonl") for k in r if k.startswith("value/")}
    assert {"value/loss", "value/mean", "value/return", "value/clipped"} <= logged
    assert all(f"`{k}`" in doc for k in logged)
