"""One process of a group that trains one policy; run by test_distributed.py, with torchrun's environment variables.

python distributed_worker.py FOLDER CASES.json     per case two updates; process 0 writes FOLDER/NAME (weights, metrics)
python distributed_worker.py stall                 process 1 comes late
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from coterie import distributed, trainer
from coterie.config import load_config
from coterie.losses import policy_loss
from coterie.run import build

BROKEN = "not finite in process 1"  # the case in which one process alone has a loss that is not finite


def update(out: Path, flags: list[str], broken: bool) -> None:
    trainer.policy_loss = not_finite if broken else policy_loss
    with build(load_config(None, flags)) as t:
        log = [t.train_step()[0] for _ in range(2)]
        weights, moments = t.policy.weights(), t.policy.optimizer_state()
        if distributed.leads():
            save_file({k: v.contiguous().clone() for k, v in {**weights, **moments}.items()}, out)
            out.with_suffix(".json").write_text(json.dumps(log))


def not_finite(*args: object, **kwargs: object) -> object:
    result = policy_loss(*args, **kwargs)
    if distributed.rank() == 1:
        object.__setattr__(result, "loss", result.loss * torch.inf)
    return result


def stall() -> None:
    distributed.join(timeout_s=3)
    if distributed.rank() == 1:
        time.sleep(12)
        return
    distributed.gathered(1)


def main() -> None:
    if sys.argv[1] == "stall":
        return stall()
    folder, cases = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    if distributed.world() > 1:
        distributed.join(timeout_s=120)
    for name, flags in cases.items():
        update(folder / name, flags, name == BROKEN)
    distributed.leave()


if __name__ == "__main__":
    main()
