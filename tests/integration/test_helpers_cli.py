"""`coterie helpers test`, through the real command-line parser, against a real endpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from helpers_kit import encoder, save_model
from helpers_server import ModelReply, faulty, serving
from swarm_processes import free_port
from typer.testing import CliRunner

from coterie.errors import CoterieError, UserError
from coterie.helpers.cli import register

CONFIG = """
[model]
name = "{folder}"
[rollout]
max_new_tokens = 300
[loss]
external_loss = "aipo"
[helpers]
feedback_tokens = 8
tries = 1
[helpers.roles.verify]
backend = "openai"
url = "{url}"
model = "{model}"
same_tokenizer = true
[helpers.roles.knowledge]
backend = "local"
[helpers.roles.reasoning]
backend = "scripted"
table = {{ "*" = "add the tens" }}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def app() -> typer.Typer:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.callback()(lambda: None)
    register(app)
    return app


def write(tmp_path: Path, folder: Path, url: str, model: str = "m") -> str:
    file = tmp_path / "c.toml"
    file.write_text(CONFIG.format(folder=folder, url=url, model=model))
    return str(file)


def test_every_role_is_asked_and_every_token_explained(folder: Path, tmp_path: Path) -> None:
    with serving(ModelReply(folder)) as server:
        args = ["helpers", "test", write(tmp_path, folder, server.url), "--query", "1+1=2", "--json"]
        result = CliRunner().invoke(app(), args, catch_exceptions=False)
    roles = {r["role"]: r for r in json.loads(result.stdout)}
    assert [roles[r]["outcome"] for r in ("verify", "knowledge", "reasoning")] == ["ok"] * 3
    assert roles["reasoning"]["reply"] == "add the tens" and not roles["reasoning"]["offers_logprobs"]
    assert roles["verify"]["offers_logprobs"] and roles["knowledge"]["offers_logprobs"]
    for r in roles.values():
        tokens = r["tokens"]
        assert encoder().decode([t["id"] for t in tokens if t["source"] == "helper"]).strip() == r["reply"].strip()
        assert "1+1=2" in encoder().decode([t["id"] for t in tokens if t["source"] == "policy"])
        assert all(t["logprob"] is None for t in tokens if t["source"] != "helper")


def test_the_table_says_what_is_trained(folder: Path, tmp_path: Path) -> None:
    with serving(ModelReply(folder)) as server:
        config = write(tmp_path, folder, server.url)
        text = CliRunner().invoke(app(), ["helpers", "test", config], catch_exceptions=False).stdout
    assert "external_loss = aipo" in text and "policy loss" in text and "reasoning: ok" in text


def test_a_helper_that_fails_fails_the_command_and_says_why(folder: Path, tmp_path: Path) -> None:
    with serving(faulty) as server:
        config = write(tmp_path, folder, server.url, "404")
        result = CliRunner().invoke(app(), ["helpers", "test", config])
    assert isinstance(result.exception, CoterieError) and "no usable reply from verify" in str(result.exception)
    assert "HTTP 404" in result.stdout and "no such model" in " ".join(result.stdout.split())


def test_a_dead_endpoint_is_named_by_role_and_url(folder: Path, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}/v1"
    hidden = url.replace("http://", "http://user:secret@")
    result = CliRunner().invoke(app(), ["helpers", "test", write(tmp_path, folder, hidden)])
    line = str(result.exception)
    assert isinstance(result.exception, CoterieError) and f"verify: connection: {url}/chat/completions: " in line
    assert "\n" not in line and "secret" not in line + result.stdout


def test_a_role_that_cannot_be_asked_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    """The model does not exist: who looked for it first would say so."""
    file = tmp_path / "c.toml"
    file.write_text(
        '[model]\nname = "./no/such"\n[rollout]\nmax_new_tokens = 300\n[helpers.roles.verify]\nmodel = "m"\n'
    )
    result = CliRunner().invoke(app(), ["helpers", "test", str(file)])
    assert isinstance(result.exception, UserError) and "helpers.roles.verify.url" in str(result.exception)


def test_overrides_and_missing_roles(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("")
    result = CliRunner().invoke(app(), ["helpers", "test", str(file)])
    assert isinstance(result.exception, UserError) and "no [helpers.roles.*]" in str(result.exception)
    file.write_text(
        f'[model]\nname = "{folder}"\n[helpers.roles.verify]\nbackend = "scripted"\ntable = {{ "*" = "ok" }}\n'
    )
    result = CliRunner().invoke(app(), ["helpers", "test", str(file), "--rollout.max_new_tokens", "20"])
    assert isinstance(result.exception, UserError) and "no question could ever be served" in str(result.exception)
