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


ASK = ["--helpers.roles.verify={backend='scripted',table={'*'='x'},limit=2}", "--rollout.max_new_tokens", "300"]
AIPO = ["--loss.external_loss", "aipo"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            [*ASK, *AIPO, "--loss.c_min", "0.6", "--loss.c_max", "0.5"],
            r"loss\.c_min = 0\.6 is above loss\.c_max = 0\.5",
        ),
        ([*ASK, "--helpers.total_limit", "1"], r"verify\.limit = 2 is above helpers\.total_limit = 1"),
        (
            [*ASK, "--helpers.feedback_tokens", "225"],
            r"a reply takes up to helpers\.feedback_tokens = 225 tokens and 75",
        ),
        (["--swarm.exchange", "local", "--swarm.pool", "3"], r"swarm\.peer_groups = 4 is above swarm\.pool = 3"),
        (["--swarm.send_problems", "true", "--swarm.share", "nothing"], r"send_problems sends nothing"),
        (
            ["--swarm.exchange", "local", "--rollout.group_size", "65"],
            r"max_trajectories = 64 is below rollout.group_size",
        ),
        (["--swarm.tls_certificate", "c.pem"], r"tls_certificate and swarm\.tls_key belong together"),
        (["--engine.kind", "vllm", "--engine.context", "64"], r"engine\.context = 64 leaves no room for a prompt"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_in_one_line(flags, words):
    with pytest.raises(UserError, match=words) as e:
        load_config(None, flags)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "flags",
    [
        [*ASK, *AIPO, "--loss.c_min", "0.5", "--loss.c_max", "0.5"],
        ["--loss.c_max", "0.1"],  # below the default c_min, which only helpers' tokens under aipo use
        ["--swarm.pool", "3"],  # no swarm
        ["--swarm.exchange", "local", "--rollout.group_size", "65", "--swarm.share", "nothing"],
        ["--swarm.exchange", "local", "--swarm.peer_groups", "2", "--swarm.per_peer", "4"],
        [*ASK, "--helpers.total_limit", "2", "--helpers.feedback_tokens", "224"],
        ["--helpers.feedback_tokens", "500", "--helpers.total_limit", "1"],  # nobody to ask
        ["--swarm.pool", "4", "--swarm.per_peer", "4", "--swarm.per_task", "4"],
        ["--swarm.peer_groups", "0", "--swarm.per_task", "4"],
        ["--rollout.group_size", "65"],
        ["--engine.kind", "vllm", "--engine.context", "65"],
    ],
)
def test_settings_at_the_edge_of_a_contradiction_are_taken(flags):
    load_config(None, flags)


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
