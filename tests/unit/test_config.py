import subprocess
import sys
import tomllib

import pytest

from coterie.config import Config, config_from_dict, load_config
from coterie.errors import UserError


def test_layers_defaults_file_flags(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("steps = 7\n[optim]\nlr = 0.5\nwarmup_steps = 3\n")
    cfg = load_config(file, ["--optim.lr", "1e-4", "--model.name=smollm2"])
    assert (cfg.steps, cfg.optim.lr, cfg.optim.warmup_steps, cfg.model.name) == (7, 1e-4, 3, "smollm2")
    assert cfg.seed == Config().seed


@pytest.mark.parametrize("text", ["1e-6", "1.0e-6", "0.000001"])
def test_cl01_numbers_written_in_any_way_are_numbers(text):
    assert load_config(None, ["--optim.lr", text]).optim.lr == pytest.approx(1e-6)


def test_cl01_text_where_a_number_belongs_names_the_key():
    with pytest.raises(UserError, match=r"optim\.lr"):
        load_config(None, ["--optim.lr", "fast"])


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--optim.learnign_rate", "1"], ["learnign_rate", "[optim]"]),
        (["--optim.lrr", "1"], ["'lrr'", "[optim]", "did you mean 'lr'"]),
        (["--step", "1"], ["'step'", "top level", "did you mean 'steps'"]),
        (["--lr", "1"], ["'lr'", "top level"]),
        (["--tasks.chain_sum.wieght", "1"], ["'wieght'", "[tasks.chain_sum]", "did you mean 'weight'"]),
    ],
)
def test_cl02_unknown_key_names_section_and_suggests(flags, words):
    with pytest.raises(UserError) as e:
        load_config(None, flags)
    assert all(w in str(e.value) for w in words), str(e.value)
    assert e.value.exit_code == 2


def test_cl02_unknown_key_in_file(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("[rollout]\nnum_generations = 4\n")
    with pytest.raises(UserError, match="num_generations"):
        load_config(file)


def test_cl03_broken_toml_names_file_line_and_column(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("steps = 7\nseed = = 1\n")
    with pytest.raises(UserError, match=r"c\.toml.*line 2, column 8"):
        load_config(file)


def test_missing_file_and_stray_argument():
    with pytest.raises(UserError, match="no such file"):
        load_config("nowhere.toml")
    with pytest.raises(UserError, match="unexpected argument 'steps'"):
        load_config(None, ["steps", "3"])
    with pytest.raises(UserError, match="--steps needs a value"):
        load_config(None, ["--steps"])


@pytest.mark.parametrize(
    "flag", [["--optim.lr", "0"], ["--rollout.temperature", "0"], ["--steps", "-1"], ["--loss.kind", "x"]]
)
def test_impossible_values_are_refused(flag):
    with pytest.raises(UserError, match=flag[0][2:].replace(".", r"\.")):
        load_config(None, flag)


def test_resolved_config_reads_back_the_same():
    cfg = load_config(None, ["--tasks.gcd.params", "{max_value=9}", "--rollout.stop", '["</answer>"]'])
    assert config_from_dict(tomllib.loads(cfg.to_toml())) == cfg


def test_every_field_has_a_docstring():
    def walk(model, path=""):
        for name, info in model.model_fields.items():
            section = info.annotation
            if hasattr(section, "model_fields"):
                yield from walk(section, f"{path}{name}.")
            elif not info.description:
                yield path + name

    assert list(walk(Config)) == ["tasks"]


def test_light_import_config_and_cli_load_no_torch():
    code = "import sys, coterie.cli, coterie.types; print('torch' in sys.modules, 'transformers' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "False False\n"
    )
