import json

import pytest

from coterie.config import load_config
from coterie.errors import CoterieError, UserError
from coterie.rundir import RunDir, dumps, read_jsonl


def cfg(tmp_path, *flags):
    return load_config(None, ["--run_dir", str(tmp_path / "run"), "--steps", "3", *flags])


def test_finished_run_is_never_overwritten_but_can_be_extended(tmp_path):
    run = RunDir(cfg(tmp_path))
    run.finish()
    run.close()
    with pytest.raises(UserError, match="this run is finished"):
        RunDir(cfg(tmp_path))
    RunDir(cfg(tmp_path, "--steps", "9")).close()
    assert not (tmp_path / "run" / "DONE").exists()


def test_a_start_that_failed_before_anything_was_written_does_not_bind_the_folder(tmp_path):
    RunDir(cfg(tmp_path, "--model.device", "cuda")).close()
    run = RunDir(cfg(tmp_path, "--model.device", "cpu"))
    run.append("metrics.jsonl", [{"step": 0}])
    run.close()
    with pytest.raises(UserError, match=r"another config \(differs in model\)"):
        RunDir(cfg(tmp_path, "--model.device", "cuda"))


def test_a_run_that_has_spent_its_tokens_says_so_and_which_setting_to_raise(tmp_path):
    run = RunDir(cfg(tmp_path, "--tokens", "5000"))
    run.append("metrics.jsonl", [{"step": s} for s in range(3)])
    run.finish()
    run.close()
    for flags in ([], ["--steps", "9"], ["--tokens", "4000"]):
        with pytest.raises(UserError, match=r"its 5,000 tokens were spent after step 2 of 3.*raise --tokens"):
            RunDir(cfg(tmp_path, "--tokens", "5000", *flags))
    RunDir(cfg(tmp_path, "--tokens", "6000")).close()
    assert not (tmp_path / "run" / "DONE").exists()


def test_steps_are_what_ended_a_run_that_has_made_them_all(tmp_path):
    run = RunDir(cfg(tmp_path, "--tokens", "5000"))
    run.append("metrics.jsonl", [{"step": s} for s in range(4)])
    run.finish()
    run.close()
    with pytest.raises(UserError, match=r"\(3 steps\).*raise --steps"):
        RunDir(cfg(tmp_path, "--tokens", "6000"))


def test_other_config_is_refused_and_named(tmp_path):
    run = RunDir(cfg(tmp_path))
    run.append("metrics.jsonl", [{"step": 0}])
    run.close()
    with pytest.raises(UserError, match="differs in optim"):
        RunDir(cfg(tmp_path, "--optim.lr", "0.5"))
    RunDir(cfg(tmp_path, "--threads", "1")).close()


def test_foreign_folder_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="not a coterie run"):
        RunDir(cfg(tmp_path))


def test_two_writers_are_refused(tmp_path):
    run = RunDir(cfg(tmp_path))
    with pytest.raises(UserError, match="another process"):
        RunDir(cfg(tmp_path))
    run.close()


def test_unwritable_place_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write there"):
        RunDir(load_config(None, ["--run_dir", str(tmp_path / "file" / "run")]))


def test_rewind_drops_steps_that_run_again(tmp_path):
    run = RunDir(cfg(tmp_path))
    run.append("metrics.jsonl", [{"step": s} for s in range(5)])
    with open(run.path / "metrics.jsonl", "a") as f:
        f.write('{"step": 5, "cut o')  # killed while writing
    run.rewind(3)
    assert [r["step"] for r in read_jsonl(run.path / "metrics.jsonl")] == [0, 1, 2]
    run.close()


def test_broken_line_in_the_middle_is_an_error_with_its_place(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2\n{"step": 3}\n')
    with pytest.raises(CoterieError, match=r"m\.jsonl:2"):
        list(read_jsonl(path))


def test_non_finite_metric_is_refused():
    with pytest.raises(ValueError):
        dumps({"x": float("nan")})
    assert json.loads(dumps({"x": 1.5})) == {"x": 1.5}


def test_a_log_cut_inside_a_character_is_read_up_to_the_cut(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes('{"step": 1}\n{"step": 2, "é'.encode()[:-1])
    assert list(read_jsonl(path)) == [{"step": 1}]


@pytest.mark.parametrize("line", ["5", '{"a": 1}', "[]"])
def test_foreign_records_are_named(line, tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(CoterieError, match=r"m\.jsonl:2.*no step"):
        list(read_jsonl(path))


def test_a_kill_while_the_config_was_written_does_not_block_the_run(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").write_text("")
    (tmp_path / "run" / ".config.toml.part").write_text("meth")
    RunDir(cfg(tmp_path)).close()
    assert (tmp_path / "run" / "config.toml").exists()
