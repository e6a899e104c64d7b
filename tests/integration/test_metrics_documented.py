"""Every key that a run logs stands in docs/metrics.md."""

import re
from pathlib import Path

from coterie.config import load_config
from coterie.rundir import read_jsonl
from coterie.simulate import simulate

DOC = Path(__file__).parents[2] / "docs" / "metrics.md"


def documented() -> list[re.Pattern[str]]:
    """The keys in the first column of the tables; ``<x>`` stands for one or more path parts."""
    first = [line.split("|")[1] for line in DOC.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    keys = [k for cell in first for k in re.findall(r"`([^`]+)`", cell)]
    return [re.compile(re.sub(r"<\w+>", r"[\\w/]+", k)) for k in keys]


def test_the_doc_is_read() -> None:
    assert len(documented()) > 60
    assert not any(p.fullmatch("own/no_such_key") for p in documented())


def test_cl07_every_logged_key_is_documented(tmp_path: Path) -> None:
    flags = (
        f"--run_dir {tmp_path / 'swarm'} --steps 2 --threads 1 --rollout.problems 3 --eval.problems 2 --loss.kl_coef 0.01 "
        "--swarm.peer_groups 2 --tasks.count_bits.params={min_n=1,max_n=1023} "
        "--tasks.gcd.params={min_numbers=2,max_numbers=2,min_value=2,max_value=99} --helpers.form short "
        "--helpers.roles.reasoning.backend scripted --helpers.roles.reasoning.table={'*'='9'} --helpers.feedback_tokens 4 "
        "--helpers.query_tokens 8 --eval.modes ['tagged','helped'] --eval.ks [2]"
    )
    simulate(load_config(None, flags.split()), 2)
    patterns = documented()
    logged = {k for p in tmp_path.rglob("metrics.jsonl") for r in read_jsonl(p) for k in r if k != "step"}
    assert {
        "own/reward",
        "own/reward/gcd",
        "eval/gcd/low",
        "swarm/state",
        "policy/kl_to_start",
        "eval_helped/gap",
    } <= logged
    assert sorted(k for k in logged if not any(p.fullmatch(k) for p in patterns)) == []
