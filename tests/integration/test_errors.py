"""What a user does wrong, through the real command: one line that says what to do, exit code 1 or 2, nothing lost."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from short_run import SHORT

from coterie.cli import main
from coterie.models import TINY
from coterie.rundir import read_jsonl

BASE = f"steps = 2{SHORT}"


def run(args: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["coterie", *args])
    with pytest.raises(SystemExit) as e:
        main()
    return int(e.value.code or 0), capsys.readouterr().err


# what is wrong with a helper: role, its settings, words of the refusal
HELPERS = {
    "of an unknown role": ("oracle", 'backend="scripted",table={"*"="x"}', "no such role in form 'full'"),
    "without a function": ("verify", 'backend="scripted",call="os.path:nothing"', "os.path has no function nothing"),
    "without a file": ("verify", 'backend="scripted",call="nowhere.py:f"', "no such file"),
    "with broken code": ("verify", 'backend="scripted",call="broken.py:f"', "cannot import broken.py (SyntaxError"),
    "without a url": ("verify", 'model="m"', "helpers.roles.verify.url"),
    "without a host": ("verify", 'model="m",url="http://"', "helpers.roles.verify.url"),
    "with a broken port": ("verify", 'model="m",url="http://localhost:80x/v1"', "helpers.roles.verify.url"),
    "without a model": ("verify", 'url="http://localhost/v1"', "helpers.roles.verify.model"),
    "without a key": ("verify", 'url="http://localhost/v1",model="m",key_env="NO_SUCH_KEY"', "NO_SUCH_KEY"),
    "without a folder": ("verify", 'backend="local",model="./no/such"', "helpers.roles.verify.model: model ./no/such"),
}


def _helper(role: str, settings: str, words: str) -> tuple[list[str], int, str]:
    return ["--rollout.max_new_tokens", "512", f"--helpers.roles.{role}={{{settings}}}"], 2, words


CASES = {
    "unknown key": (["--optim.learning_rate", "1"], 2, "unknown key 'learning_rate' in [optim]"),
    "unknown task": (
        ["--tasks.chain_summ.weight", "1"],
        2,
        "unknown reasoning-gym task 'chain_summ'; did you mean 'chain_sum'",
    ),
    "unknown parameter": (["--tasks.gcd.params", "{max_vale=3}"], 2, "did you mean 'max_value'"),
    "bad parameter": (["--tasks.gcd.params", "{min_value=9,max_value=3}"], 2, "gcd"),
    "missing folder": (["--model.name", "./no/such/model"], 2, "no such folder"),
    "not a model": (["--model.name", "."], 2, "no config.json"),
    "group of one ob04": (["--rollout.group_size", "1"], 2, "gives no baseline"),
    "no such device": (["--model.device", "cuda:7"], 2, "cuda:7"),
    "lora target": (["--model.lora_rank", "4", "--model.lora_targets", "no_such_layer"], 2, "no_such_layer"),
    "lora on a block": (
        ["--model.lora_rank", "4", "--model.lora_targets", "self_attn"],
        2,
        "not the name of a linear layer",
    ),
    "lora on nothing": (["--model.lora_rank", "4", "--model.lora_targets", ""], 2, "not the name of a linear layer"),
    "device without memory": (["--model.device", "meta"], 2, "cannot train"),
    "infinite number": (["--optim.lr", "inf"], 2, "optim.lr"),
    "infinite temperature": (["--rollout.temperature", "inf"], 2, "rollout.temperature"),
    "dataset missing": (["--tasks.mine.kind", "jsonl", "--tasks.mine.path", "nowhere.jsonl"], 2, "nowhere.jsonl"),
    "no relay": (["--swarm.exchange", "network"], 2, "needs swarm.connect"),
    "relay without a port": (["--swarm.exchange=network", "--swarm.connect", '["host"]'], 2, "an endpoint looks like"),
    "a name for an id": (["--swarm.exchange=local", "--swarm.allow", '["amber-otter"]'], 2, "is not a node id"),
    "no worked answers": (["--method", "sft", "--sft.answers", "nowhere.py:f"], 2, "sft.answers: 'nowhere.py:f'"),
    **{f"helper {name}": _helper(*case) for name, case in HELPERS.items()},
    "tracking extra": (["--tracking.wandb", "true"], 2, "pip install -e '.[wandb]'"),
}


@pytest.mark.parametrize("name", CASES)
def test_one_line_and_exit_code(name, tmp_path, capsys, monkeypatch):
    flags, code, words = CASES[name]
    config = tmp_path / "c.toml"
    config.write_text(BASE)
    (tmp_path / "broken.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    got, err = run(["train", "c.toml", "--run_dir", "run", *flags], capsys, monkeypatch)
    assert got == code
    assert words in err and "Traceback" not in err and err.strip().count("\n") == 0, err


def test_missing_hub_model_offline(tmp_path, capsys, monkeypatch):
    (tmp_path / "c.toml").write_text(BASE)
    monkeypatch.chdir(tmp_path)
    code, err = run(["train", "c.toml", "--model.name", "someone/no-such-model"], capsys, monkeypatch)
    assert code == 2 and "someone/no-such-model" in err and "Traceback" not in err


def test_broken_dataset_line_names_file_and_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "c.toml").write_text(BASE)
    lines = ['{"prompt": "1+1=", "answer": "2"}', '{"prompt": "2+2=", "answer": ']
    (tmp_path / "d.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    code, err = run(["train", "c.toml", "--tasks.mine={kind='jsonl',path='d.jsonl'}"], capsys, monkeypatch)
    assert code == 2 and "d.jsonl" in err and "2" in err and "Traceback" not in err


def test_ro05_too_long_prompts_are_dropped_and_counted_never_cut(tmp_path, capsys, monkeypatch):
    """Sums of twenty numbers do not fit, numbers to count bits in do."""
    config = BASE.replace("problems = 2", "problems = 8\nmax_prompt_tokens = 30", 1)
    (tmp_path / "c.toml").write_text(config + "[tasks.chain_sum]\nparams = { min_terms = 20, max_terms = 20 }\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["coterie", "train", "c.toml", "--run_dir", "run"])
    with pytest.raises(SystemExit) as done:
        main()
    assert not done.value.code
    steps = [r for r in read_jsonl(tmp_path / "run" / "metrics.jsonl") if r["step"]]
    assert all(0 < r["own/prompts_too_long"] < 8 for r in steps)
    assert all(r["own/prompts_too_long"] + r["own/groups"] == 8 and "own/reward/chain_sum" not in r for r in steps)


def test_a_run_in_which_no_prompt_fits_stops_and_names_the_setting(tmp_path, capsys, monkeypatch):
    (tmp_path / "c.toml").write_text(BASE)
    monkeypatch.chdir(tmp_path)
    code, err = run(["train", "c.toml", "--rollout.max_prompt_tokens", "2"], capsys, monkeypatch)
    assert code == 2 and "every prompt is longer than rollout.max_prompt_tokens = 2" in err
    assert "the shortest has" in err and "Traceback" not in err


def test_a_held_out_prompt_beyond_the_context_gets_advice_that_helps(tmp_path, capsys, monkeypatch):
    """Lowering max_prompt_tokens would not: held-out problems are never dropped."""
    (tmp_path / "c.toml").write_text(BASE)
    monkeypatch.chdir(tmp_path)
    command = ["train", "c.toml", "--tasks.chain_sum.params", "{min_terms=400,max_terms=400}"]
    code, err = run(command, capsys, monkeypatch)
    assert code == 2 and "exceed the model's context" in err and "choose task parameters" in err
    assert "held-out problems are never dropped" in err


DRY = ["unknown task", "unknown parameter", "bad parameter", "dataset missing", "too few", "no worked answers"]
DRY += ["missing folder", "not a model", "no relay", "relay without a port", "a name for an id"]


@pytest.mark.parametrize("name", [*DRY, *(f"helper {h}" for h in HELPERS)])
def test_dry_run_refuses_what_the_run_would_refuse(name, tmp_path, capsys, monkeypatch):
    few = ["--tasks.count_bits.params", "{min_n=1,max_n=3}", "--eval.problems", "50"], 2, "held-out problems found"
    flags, code, words = CASES.get(name, few)
    (tmp_path / "c.toml").write_text(BASE)
    (tmp_path / "broken.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    got, err = run(["train", "c.toml", "--dry-run", *flags], capsys, monkeypatch)
    assert got == code and words in err and "Traceback" not in err and err.strip().count("\n") == 0
    assert not Path("runs").exists()


def test_no_disk_is_one_line_and_earlier_work_is_kept(tmp_path):
    """A file-size limit stands in for a full disk: the first write beyond it fails in the same place."""
    (tmp_path / "c.toml").write_text(BASE)
    command = [sys.executable, "-m", "coterie", "train", "c.toml", "--run_dir", "run"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=600).returncode == 0

    def limit() -> None:
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    more = [*command, "--steps", "4"]
    done = subprocess.run(more, cwd=tmp_path, capture_output=True, text=True, timeout=600, preexec_fn=limit, env=env)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "cannot write checkpoint" in done.stderr and "Traceback" not in done.stderr
    assert subprocess.run(more, cwd=tmp_path, capture_output=True, timeout=600).returncode == 0
    assert [r["step"] for r in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2, 3, 4]


def test_a_run_directory_of_something_else_is_left_alone(tmp_path, capsys, monkeypatch):
    (tmp_path / "c.toml").write_text(BASE)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("precious")
    monkeypatch.chdir(tmp_path)
    code, err = run(["train", "c.toml", "--run_dir", "run"], capsys, monkeypatch)
    assert code == 2 and "not a coterie run" in err
    assert [p.name for p in Path("run").iterdir() if p.name != ".lock"] == ["thesis.tex"]


@pytest.mark.parametrize("damage", ["layer missing", "cut short", "other vocabulary"])
def test_damaged_models_are_refused_by_name(damage, tmp_path, capsys, monkeypatch):
    """A layer that is not in the checkpoint would be trained from random values."""
    model = tmp_path / "m"
    shutil.copytree(TINY, model)
    config = json.loads((model / "config.json").read_text())
    if damage == "layer missing":
        config["num_hidden_layers"] += 1
        config.pop("layer_types", None)
    elif damage == "other vocabulary":
        config["vocab_size"] += 5
    else:
        (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:500])
    (model / "config.json").write_text(json.dumps(config))
    (tmp_path / "c.toml").write_text(BASE)
    monkeypatch.chdir(tmp_path)
    code, err = run(["train", "c.toml", "--run_dir", "run", "--model.name", str(model)], capsys, monkeypatch)
    assert code == 2 and "Traceback" not in err and f"model {model}" in err


@pytest.mark.parametrize(
    "line", ['{"prompt": "\\ud800 hi", "answer": "1"}', '{"prompt": "a", "answer": ' + "9" * 5000 + "}"]
)
def test_odd_dataset_lines_name_file_and_line(line, tmp_path, capsys, monkeypatch):
    (tmp_path / "c.toml").write_text(BASE)
    (tmp_path / "d.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' + line + "\n")
    monkeypatch.chdir(tmp_path)
    code, err = run(["train", "c.toml", "--tasks.mine={kind='jsonl',path='d.jsonl'}"], capsys, monkeypatch)
    assert code == 2 and "d.jsonl" in err and "2" in err and "Traceback" not in err


def test_checkpoints_that_cannot_be_read_stop_the_run_and_nothing_is_thrown_away(tmp_path, capsys, monkeypatch):
    (tmp_path / "c.toml").write_text(BASE)
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "coterie", "train", "c.toml", "--run_dir", "run"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=600).returncode == 0
    for step in (1, 2):
        (tmp_path / "run" / "checkpoints" / f"step_{step:06d}" / "weights.safetensors").write_bytes(b"x")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    code, err = run(["train", "c.toml", "--run_dir", "run", "--steps", "3"], capsys, monkeypatch)
    assert code == 1 and "no checkpoint there can be read" in err
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_report_into_a_missing_folder_is_one_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0, "eval/accuracy": 0.5}\n')
    monkeypatch.chdir(tmp_path)
    code, err = run(["report", "run", "--out", "no/where/x.html"], capsys, monkeypatch)
    assert code == 1 and "cannot write" in err and "Traceback" not in err


def test_answers_that_fill_the_whole_context_are_refused_before_the_model_is_loaded(tmp_path, capsys, monkeypatch):
    (tmp_path / "c.toml").write_text(BASE)
    monkeypatch.chdir(tmp_path)
    code, err = run(["train", "c.toml", "--dry-run", "--rollout.max_new_tokens", "256"], capsys, monkeypatch)
    assert (
        code == 2
        and "max_new_tokens = 256 leaves no room for a prompt in the context of model tiny (256 tokens)" in err
    )
