"""The sampler and the learner must be the same policy at every step (OB-12), also after the optimiser has moved it."""

from coterie.config import load_config
from coterie.run import Run
from coterie.rundir import read_jsonl


def test_ob12_sampler_follows_every_optimiser_step(tmp_path):
    cfg = load_config(
        None,
        f"--run_dir {tmp_path / 'run'} --steps 3 --threads 1 --optim.lr 1e-3 --rollout.problems 4 --eval.problems 2 "
        "--tasks.count_bits.params={min_n=1,max_n=1023}".split(),
    )
    with Run(cfg, quiet=True) as run:
        while not run.done:
            run.advance()
        gaps = [r["loss/own/behavior_gap"] for r in read_jsonl(run.dir.path / "metrics.jsonl")]
    assert len(gaps) == 3 and max(gaps) < 1e-4
