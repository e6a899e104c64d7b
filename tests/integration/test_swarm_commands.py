"""The commands, as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import swarm_kit as kit
from swarm_processes import free_port, wait_for
from typer.testing import CliRunner

from coterie.cli import app
from coterie.config import TaskConfig, load_config
from coterie.errors import CoterieError, UserError
from coterie.run import build
from coterie.swarm.access import Access
from coterie.swarm.contribute import contribute
from coterie.swarm.exchange import Request
from coterie.swarm.launch import Child, watch
from coterie.swarm.local import ALIVE_S, LocalExchange
from coterie.swarm.memory import MemoryHub
from coterie.swarm.network import NetworkExchange
from coterie.tasks.taskset import build_tasks

CONFIG = str(Path(__file__).parents[2] / "configs" / "swarm.toml")


def call(*args: str) -> str:
    result = CliRunner().invoke(app, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_identity_is_made_shown_exported_and_imported(tmp_path: Path) -> None:
    key = str(tmp_path / "id.pem")
    made = json.loads(call("swarm", "identity", key, "--json"))
    assert call("swarm", "identity", key, "--export", str(tmp_path / "b.pem")).startswith(made["name"])
    again = call("swarm", "identity", str(tmp_path / "new.pem"), "--import", str(tmp_path / "b.pem"), "--json")
    assert json.loads(again)["node"] == made["node"]


def test_dry_runs_print_the_resolved_config() -> None:
    assert 'connect = [\n    "tcp/a:1",\n    "tcp/b:2",\n]' in call(
        "swarm", "join", CONFIG, "--connect", "tcp/a:1", "--connect", "tcp/b:2", "--dry-run"
    )
    assert "steps = 7" in call("swarm", "run", CONFIG, "--nodes", "2", "--steps", "7", "--dry-run")


@pytest.mark.parametrize("command", ["swarm run", "swarm join --connect tcp/a:1", "parallel"])
def test_dry_runs_refuse_what_the_run_would_refuse(command: str) -> None:
    config = CONFIG.replace("swarm.toml", "parallel.toml") if command == "parallel" else CONFIG
    with pytest.raises(UserError, match="unknown reasoning-gym task 'gdc'; did you mean 'gcd'"):
        call(*command.split(), config, "--dry-run", "--tasks.gdc.weight", "1")


def test_status_of_a_local_swarm(tmp_path: Path) -> None:
    a = LocalExchange(tmp_path / "s.sqlite", kit.person(1).node_id)
    info = {"step": 4, "state": "sharing", "tasks": {"gcd": 3}, "accuracy": 0.5}
    a.beat(json.dumps(info | {"troubles": ["amber-otter-3f2a: copy, idle"]}))
    LocalExchange(tmp_path / "s.sqlite", kit.person(2).node_id).beat("not JSON")
    rows = json.loads(call("swarm", "status", "--path", str(tmp_path / "s.sqlite"), "--json"))
    assert {r["name"]: (r.get("step"), r["state"]) for r in rows} == {
        kit.person(1).name: (4, "sharing"),
        kit.person(2).name: (None, "unknown"),
    }
    shown = call("swarm", "status", "--path", str(tmp_path / "s.sqlite"))
    assert shown.endswith("2 nodes\n") and "trouble with amber-otter-3f2a: copy, idle" in shown
    a.close()


def test_a_killed_node_is_not_shown_as_sharing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = LocalExchange(tmp_path / "s.sqlite", kit.person(1).node_id)
    a.beat(json.dumps({"step": 4, "state": "sharing"}))
    now = time.time()
    monkeypatch.setattr("coterie.swarm.local.time.time", lambda: now + ALIVE_S + 1)
    shown = call("swarm", "status", "--path", str(tmp_path / "s.sqlite"))
    assert "silent, last sharing" in shown and "61 s ago" in shown
    a.close()


def test_a_swarm_runs_from_the_command_line_into_a_pipe(tmp_path: Path) -> None:
    """Two real nodes: each trains, is named when it ends, and used what the other wrote."""
    args = ["swarm", "run", CONFIG, "--nodes", "2", "--run_dir", str(tmp_path), "--steps", "6", "--eval.every", "0"]
    small = ["--rollout.max_new_tokens", "32", "--swarm.wait_s", "5", "--eval.problems", "2", "--eval.samples", "1"]
    result = CliRunner().invoke(app, [*args, *small])
    assert result.exit_code == 0, result.output
    assert "node_0: finished" in result.stdout and "node_1: finished" in result.stdout
    rows = [
        json.loads(line) for i in (0, 1) for line in (tmp_path / f"node_{i}/metrics.jsonl").read_text().splitlines()
    ]
    assert sum(r.get("swarm/used_groups", 0) for r in rows) > 0


def test_a_node_is_seen_while_its_model_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no longer, once that has failed; its identity is free again."""
    flags = f"--tasks.gcd.weight 1 --swarm.exchange local --run_dir {tmp_path}/node --swarm.path {tmp_path}/s.sqlite"
    cfg = load_config(None, flags.split())
    shown: list[str] = []

    def load(*args: object, **kwargs: object) -> None:
        shown.append(call("swarm", "status", "--path", cfg.swarm.path))
        raise CoterieError("cannot be loaded")

    monkeypatch.setattr("coterie.run.Policy.load", load)
    Path(cfg.run_dir).mkdir()
    for _ in range(2):
        with pytest.raises(CoterieError, match="cannot be loaded"), build(cfg):
            pass
    assert all("1 node, 1 of them without a report yet (nodes report after" in s and "starting" in s for s in shown)
    empty = call("swarm", "status", "--path", cfg.swarm.path)
    assert empty == "0 nodes now (a node enters when it starts, and reports after its first step)\n" and len(shown) == 2


def test_status_shows_what_strangers_say_without_obeying_it(tmp_path: Path) -> None:
    a = LocalExchange(tmp_path / "s.sqlite", kit.person(1).node_id)
    a.beat(
        json.dumps(
            {
                "name": "friend",
                "state": "[/red]\x1b[2J",
                "tasks": ["x"],
                "step": [1],
                "cause": "\x1b]0;title\x07" + "y" * 999,
            }
        )
    )
    shown = call("swarm", "status", "--path", str(tmp_path / "s.sqlite"))
    assert "friend" not in shown and kit.person(1).name in shown  # nobody names itself
    assert "[/red]?[2J" in shown and not any(c in shown for c in "\x1b\x07") and len(shown) < 1000
    a.close()


def test_status_needs_to_know_where(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="either --connect RELAY or --path FILE"):
        call("swarm", "status")
    with pytest.raises(UserError, match="no such file"):
        call("swarm", "status", "--path", str(tmp_path / "none"))
    with pytest.raises(CoterieError, match="no relay answers"):
        call("swarm", "status", "--connect", f"tcp/127.0.0.1:{free_port()}")


def test_the_relay_command_serves_until_it_is_told_to_stop() -> None:
    port = free_port()
    command = [sys.executable, "-m", "coterie", "swarm", "relay", "--listen", f"tcp/127.0.0.1:{port}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == f"relay: listening on tcp/127.0.0.1:{port}\n"
    node = NetworkExchange("swarm", kit.person(1), (f"tcp/127.0.0.1:{port}",), wait_s=10)
    assert node.status().link == "up"
    node.close()
    process.terminate()
    assert process.wait(10) == 0
    process.communicate()


def test_an_inbox_becomes_groups_that_peers_score_themselves(tmp_path: Path) -> None:
    inbox = tmp_path / "inbox.jsonl"
    lines = [
        '{"problem": "add:3", "answers": ["7", "8"]}',
        "",
        '{"problem": "add:4", "answers": ["9"], "reward": 1}',
        '{"problem": "nowhere:4", "answers": ["9"]}',
        '{"problem": "add:5", "answers": []}',
        "not json",
        json.dumps({"problem": "add:6", "answers": ["x" * (1 << 20) + "x"]}),
        '{"problem": "add:6", "answers": ["13", "no"]}',
    ]
    inbox.write_text("\n".join(lines))
    hub = MemoryHub()
    b = kit.node(hub, 2)
    said: list[str] = []
    sent = contribute(inbox, hub.join(), kit.person(9), Access("swarm"), "swarm", kit.problem_of, say=said.append)
    assert sent == 2 and [line.split(":")[1] for line in said] == ["3", "4", "5", "6", "7"]
    got = {g.problem.id: g.rewards for g in b.collect(0)}
    assert got == {"add:3": [1.0, 0.0], "add:6": [1.0, 0.0]}
    assert b.peers()[0]["name"] == kit.person(9).name


def test_a_contributor_sends_no_held_out_problem(tmp_path: Path) -> None:
    """Receivers take those for a fault; here they are skipped with the reason."""
    tasks = build_tasks({"count_bits": TaskConfig(params={"min_n": 1, "max_n": 1023})})
    (held_out,) = tasks.eval_problems(1)["count_bits"]
    inbox = tmp_path / "inbox.jsonl"
    lines = [{"problem": p.id, "answers": ["1", "2"]} for p in (held_out, *tasks.draw("a", 0, 1))]
    inbox.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = tmp_path / "c.toml"
    config.write_text(
        f'[tasks.count_bits]\nparams = {{ min_n = 1, max_n = 1023 }}\n[swarm]\nexchange = "local"\n'
        f'path = "{tmp_path}/s.sqlite"\n'
    )
    said = call("swarm", "contribute", str(config), "--inbox", str(inbox))
    assert f"{inbox}:1: skipped: held_out: " in said and said.endswith("1 groups sent\n")


def test_a_swarm_node_may_be_joined_by_a_silent_contributor(tmp_path: Path) -> None:
    """Through the real local exchange: what the contributor sends is there for who collects later."""
    inbox = tmp_path / "inbox.jsonl"
    inbox.write_text('{"problem": "add:3", "answers": ["7", "8"]}\n')
    reader = LocalExchange(tmp_path / "s.sqlite", "reader")
    writer = LocalExchange(tmp_path / "s.sqlite", kit.person(9).node_id)
    contribute(inbox, writer, kit.person(9), Access("swarm"), "swarm", kit.problem_of)
    assert len(reader.collect(Request(4, 10_000))) == 1
    reader.close()
    writer.close()


def test_a_launcher_says_at_once_where_its_nodes_print(tmp_path: Path) -> None:
    args = ["swarm", "run", CONFIG, "--nodes", "1", "--run_dir", str(tmp_path), "--model.name", "./no/such"]
    result = CliRunner().invoke(app, args)
    assert isinstance(result.exception, CoterieError) and "node_0 failed: error: model ./no/such" in str(
        result.exception
    )
    assert result.stderr == f"nodes: 1 started; each prints to its log in {tmp_path}, node_0.log and so on\n"


def test_a_failed_node_is_named_with_its_last_words(tmp_path: Path) -> None:
    from rich.console import Console

    children = []
    for i, code in enumerate(
        ["pass", "print('error: no space left'); raise SystemExit(1)", "import os; os.kill(os.getpid(), 9)"]
    ):
        log = tmp_path / f"node_{i}.log"
        with open(log, "wb") as out:
            process = subprocess.Popen([sys.executable, "-c", code], stdout=out)
        children.append(Child(tmp_path / f"node_{i}", log, process))
    with pytest.raises(CoterieError, match="node_1 failed: error: no space left") as e:
        watch(children, 10, Console(quiet=True))
    assert "node_2 failed: killed by signal 9; the same command goes on" in str(e.value)


def test_an_interrupt_ends_the_nodes(tmp_path: Path) -> None:
    code = (
        "import signal, sys, subprocess, pathlib; from rich.console import Console; from coterie.swarm.launch import *\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it\n"
        f"p = pathlib.Path({str(tmp_path)!r}); log = p / 'log'; log.write_text('')\n"
        "c = Child(p, log, subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']))\n"
        "print(c.process.pid, flush=True); watch([c], 1, Console(quiet=True))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    time.sleep(0.3)
    process.send_signal(2)
    process.wait(10)
    process.communicate()
    wait_for(lambda: not Path(f"/proc/{child}").exists(), 5)
