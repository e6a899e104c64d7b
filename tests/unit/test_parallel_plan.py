"""What a parallel config stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.config import Config, config_from_dict, load_config
from coterie.errors import UserError
from coterie.models import DOMAINS, tiny_tasks
from coterie.parallel.plan import adapt_job, baseline_jobs, check_parallel, expert_jobs, model_of, tag

SHIPPED = Path(__file__).parents[2] / "configs" / "parallel.toml"


def config(**parallel: object) -> Config:
    experts = {"a": ["gcd"], "b": ["products", "count_bits"]}
    return config_from_dict(
        {
            "tasks": {"gcd": {}, "products": {}, "count_bits": {}},
            "steps": 10,
            "seed": 5,
            "parallel": {"experts": experts} | parallel,
        }
    )


def test_each_expert_has_its_tasks_seed_and_folder_and_nothing_of_the_rest() -> None:
    a, b = (j.runs[0] for j in expert_jobs(config(baselines=["mixed"], log_updates=64)))
    assert list(a.tasks) == ["gcd"] and list(b.tasks) == ["products", "count_bits"]
    assert (a.seed, b.seed) == (5, 6) and a.run_dir == "runs/run/experts/a" and a.steps == 10
    assert a.parallel.log_updates == 64 and not a.parallel.experts


def test_baselines_have_the_steps_of_all_experts_together() -> None:
    mixed, stages = baseline_jobs(config(baselines=["mixed", "multi_stage"]))
    assert mixed.runs[0].steps == 20 and set(mixed.runs[0].tasks) == {"gcd", "products", "count_bits"}
    assert [r.steps for r in stages.runs] == [10, 10]
    assert stages.runs[0].model.name == "tiny" and stages.runs[1].model.name == str(model_of(stages.runs[0]))


@pytest.mark.parametrize(
    ("asked", "steps"), [({"adapt_share": 0.05}, 1), ({"adapt_share": 0.3}, 6), ({"adapt_steps": 3}, 3)]
)
def test_adaptation_steps(asked: dict[str, float], steps: int) -> None:
    job = adapt_job(config(**asked), Path("merged/here"))
    assert job is not None and job.runs[0].steps == steps and job.runs[0].model.name == "merged/here"
    assert adapt_job(config(), Path("x")) is None


def test_a_tag_names_everything_a_merge_depends_on() -> None:
    assert tag(config().parallel, 0.6) == "sum_0.6"
    assert tag(config(method="ties", density=0.1).parallel, 1) == "ties_1_d0.1"
    assert tag(config(method="svd", rank=2).parallel, 1) == "svd_1_r2"


def test_what_cannot_be_carried_out_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"parallel.experts.c: no section \[tasks.nothing\]"):
        config(experts={"c": ["nothing"], "d": ["gcd"]})
    with pytest.raises(UserError, match="letters, digits"):
        config(experts={"../c": ["gcd"]})
    with pytest.raises(UserError, match="power of two"):
        config(log_updates=1000)
    with pytest.raises(UserError, match="probe must be 0 or at least 4"):
        config(probe=3)
    check_parallel(config(probe=4))
    with pytest.raises(UserError, match="fewer than two experts have a task of their own"):
        check_parallel(config(probe=4, experts={"a": ["gcd"], "b": ["gcd", "products"]}))
    with pytest.raises(UserError, match="at least two experts"):
        check_parallel(config(experts={"a": ["gcd"]}))


def test_the_shipped_config_trains_the_four_domains_of_tiny_with_their_parameters() -> None:
    cfg = load_config(SHIPPED)
    assert cfg.parallel.experts == DOMAINS
    assert cfg.tasks == tiny_tasks()
    check_parallel(cfg)
