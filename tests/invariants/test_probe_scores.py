"""Scores of answers against autograd on the plain model in float64; sketches against whole scores; the command as typed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from batch_kit import double, trajectory
from engine_models import tiny_model
from typer.testing import CliRunner

from coterie.cli import app
from coterie.config import OptimConfig
from coterie.errors import UserError
from coterie.merging.probe import ProbeSettings, _Taker, gram_of
from coterie.merging.sketch import CountSketch, Whole
from coterie.policy import Policy
from coterie.types import Trajectory


class NoTokenizer:
    eos_token_id, pad_token_id, bos_token_id, chat_template = 1, 1, None, None
    all_special_ids = (1,)

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "<eos>": 1}


ANSWERS = [trajectory([5, 6], [7, 8, 9]), trajectory([5, 6], [7, 3]), trajectory([11, 4, 2], [9])]


def taker(sketch: int = 0, **settings: object) -> _Taker:
    policy = Policy(tiny_model("llama").eval(), NoTokenizer(), optim=OptimConfig())
    weights = policy.weights()
    return _Taker(policy, list(weights), CountSketch(sketch) if sketch else Whole(weights), ProbeSettings(**settings))


def plain(t: Trajectory, temperature: float, per_token: bool) -> torch.Tensor:
    model = double(tiny_model("llama").eval())
    logp = torch.log_softmax(model(input_ids=torch.tensor([t.token_ids.tolist()])).logits[0] / temperature, -1)
    steps = range(t.prompt_length, len(t.token_ids))
    total = sum(logp[s - 1][int(t.token_ids[s])] for s in steps) / (len(steps) if per_token else 1)
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, list(model.parameters()))])


@pytest.mark.parametrize(("temperature", "per_token"), [(0.0, False), (1.7, False), (0.0, True)])
def test_inner_products_of_scores_equal_plain_autograd(temperature: float, per_token: bool) -> None:
    take = taker(score_temperature=temperature, per_token=per_token)
    taken = [take(t) for t in ANSWERS]
    got = gram_of([t.image for t in taken], [t.square for t in taken])
    x = torch.stack([plain(t, temperature or 1.0, per_token) for t in ANSWERS])
    np.testing.assert_allclose(got, (x @ x.T).numpy(), rtol=2e-4, atol=1e-4)


def test_sketched_scores_keep_exact_sizes_and_nearly_their_angles() -> None:
    whole, sketched = taker(), taker(sketch=1 << 14)
    a, b = ([take(t) for t in ANSWERS] for take in (whole, sketched))
    want, got = (gram_of([t.image for t in x], [t.square for t in x]) for x in (a, b))
    np.testing.assert_allclose(np.diag(got), np.diag(want), rtol=1e-5)
    size = np.sqrt(np.outer(np.diag(want), np.diag(want)))
    assert np.abs((got - want) / size).max() < 5 / (1 << 14) ** 0.5


def test_settings_that_say_nothing_are_refused() -> None:
    for wrong in ({"problems": 3}, {"group_size": 1}, {"temperature": 0.0}, {"sketch": 1000}):
        with pytest.raises(UserError, match="probe:"):
            ProbeSettings(**wrong)


def test_probe_as_typed_reports_tasks_pairs_controls_and_a_sweep(tmp_path: Path) -> None:
    flags = [
        "--tasks",
        "gcd,count_bits",
        "--problems",
        "4",
        "--group-size",
        "3",
        "--sketch",
        "4096",
        "--temperatures",
        "0.7,1.0",
    ]
    done = CliRunner().invoke(app, ["probe", "tiny", *flags, "--out", str(tmp_path / "p")])
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "p" / "probe.json").read_text())
    assert [f["settings"]["temperature"] for f in report["temperatures"]] == [0.7, 1.0]
    cold, warm = report["temperatures"]
    assert warm["tasks"]["gcd"]["entropy"] > cold["tasks"]["gcd"]["entropy"]
    assert warm["tasks"]["gcd"]["M"] > 0 and warm["tasks"]["gcd"]["V"] < warm["tasks"]["gcd"]["S"]
    assert warm["pairs"][0]["tasks"] == ["gcd", "count_bits"] and warm["floor_of_the_sketch"] == pytest.approx(3 / 64)
    assert len(warm["map"]["points"]) == 8
    verdict = f"gcd and count_bits: {warm['pairs'][0]['verdict']['outcome']}; "
    assert f"verdict: {verdict}" in done.output and "missing: scores of each on the other's tasks" in done.output
    page = (tmp_path / "p" / "probe.html").read_text()
    assert "Disattenuated cosines" in page and "Scores of single answers" in page
    again = CliRunner().invoke(app, ["probe", "tiny", *flags, "--out", str(tmp_path / "p")])
    assert again.exit_code != 0 and "holds a probe already" in str(again.exception)
