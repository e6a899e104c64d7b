"""Each wall of the scoring cage by itself, in a process that has raised only that one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coterie.sandbox.filters import program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the walls are Linux's")

_TRY = """
import json, os, resource, signal, socket, sys
from coterie.sandbox import walls
def attempt(f):
    try:
        return repr(f())
    except BaseException as e:
        return type(e).__name__
out = {}
"""


def _run(script: str, *argv: str) -> tuple[int, dict[str, str]]:
    """Exit status and what the script put into ``out``."""
    source = _TRY + script + "\nprint(json.dumps(out))"
    done = subprocess.run([sys.executable, "-c", source, *argv], capture_output=True, text=True, timeout=60)
    return done.returncode, json.loads(done.stdout) if done.stdout.startswith("{") else {}


def test_landlock_closes_files_and_tcp_but_not_what_is_readable(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    for name in ("open/f", "secret"):
        (tmp_path / name).write_text("x")
    status, out = _run(
        """
root = sys.argv[1]
listener = socket.create_server(("127.0.0.1", 0))
walls.no_new_privileges()
out["state"] = repr(walls.landlock([root + "/open"]))
out["inside"] = attempt(lambda: open(root + "/open/f").read())
out["outside"] = attempt(lambda: open(root + "/secret").read())
out["list"] = attempt(lambda: os.listdir(root))
out["write"] = attempt(lambda: open(root + "/open/f", "w"))
out["new"] = attempt(lambda: open(root + "/open/g", "w"))
out["mkdir"] = attempt(lambda: os.mkdir(root + "/open/d"))
out["unlink"] = attempt(lambda: os.unlink(root + "/open/f"))
out["exec"] = attempt(lambda: os.execv("/bin/true", ["true"]))
out["tcp"] = attempt(lambda: socket.create_connection(listener.getsockname(), 2))
out["signal"] = attempt(lambda: os.kill(os.getppid(), 0))
""",
        str(tmp_path),
    )
    assert status == 0 and out.pop("state") == "(None, None)"
    assert out.pop("inside") == "'x'"
    assert set(out.values()) == {"PermissionError"}, out
    assert (tmp_path / "open/f").read_text() == "x" and sorted(os.listdir(tmp_path / "open")) == ["f"]


def test_namespaces_leave_no_network_and_no_other_process() -> None:
    status, out = _run(
        """
listener = socket.create_server(("127.0.0.1", 0))
parent = os.getpid()
out["state"] = repr(walls.namespaces())
read, write = os.pipe()
if not os.fork():
    mine = {"pid": os.getpid(), "parent": attempt(lambda: os.kill(parent, 0)),
            "tcp": attempt(lambda: socket.create_connection(listener.getsockname(), 2)),
            "udp": attempt(lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9)))}
    os.write(write, json.dumps(mine).encode())
    os._exit(0)
os.wait()
out |= json.loads(os.read(read, 4096))
"""
    )
    assert status == 0 and out["state"] == "{'network namespace': None, 'process namespace': None}"
    assert out["pid"] == 1 and out["parent"] == "ProcessLookupError" and {out["tcp"], out["udp"]} == {"OSError"}


FATAL = {
    "fork": "os.fork()",
    "thread": "__import__('_thread').start_new_thread(print, ())",
    "exec": "os.execv('/bin/true', ['true'])",
    "tcp": "socket.socket()",
    "unix": "socket.socketpair()",
    "kill": "os.kill(os.getppid(), signal.SIGTERM)",
    "kill group": "os.killpg(0, signal.SIGTERM)",
    "write": "open(sys.argv[1], 'w')",
    "append": "os.open(sys.argv[1], os.O_APPEND | os.O_WRONLY)",
    "create": "os.open(sys.argv[1], os.O_CREAT)",
    "mkdir": "os.mkdir(sys.argv[1])",
    "unlink": "os.unlink(sys.argv[2])",
    "rename": "os.rename(sys.argv[2], sys.argv[1])",
    "link": "os.symlink('/', sys.argv[1])",
    "chmod": "os.chmod(sys.argv[2], 0)",
}


@pytest.mark.parametrize("name", FATAL)
def test_the_filter_ends_a_process_at_the_attempt(name: str, tmp_path: Path) -> None:
    (tmp_path / "old").write_text("x")
    script = f"walls.no_new_privileges()\nassert walls.seccomp() is None\n{FATAL[name]}"
    status, _ = _run(script, str(tmp_path / "new"), str(tmp_path / "old"))
    assert status == -signal.SIGSYS
    assert os.listdir(tmp_path) == ["old"] and (tmp_path / "old").read_text() == "x"


def test_the_filter_refuses_what_libraries_may_try_and_lets_honest_work_pass() -> None:
    status, out = _run(
        """
import ctypes
walls.no_new_privileges()
out["state"] = repr(walls.seccomp())
out["prctl"] = repr(walls.die_with_parent())
out["unshare"] = repr(ctypes.CDLL(None).unshare(0x10000000))
out["session"] = attempt(os.setsid)
out["limits"] = attempt(lambda: resource.setrlimit(resource.RLIMIT_AS, (1, 1)))
out["read"] = attempt(lambda: len(open("/etc/hostname").read()) >= 0)
out["work"] = attempt(lambda: sum(i * i for i in range(1000)))
"""
    )
    assert status == 0 and out["state"] == "None" and out["prctl"] == "'Operation not permitted'"
    assert (
        out["unshare"] == "-1"
        and out["session"] == "PermissionError"
        and out["limits"] in ("PermissionError", "ValueError")
    )
    assert out["read"] == "True" and out["work"] == "332833500"


def test_the_filter_exists_for_both_architectures() -> None:
    for machine in ("x86_64", "aarch64"):
        code = program(machine)
        assert code is not None and len(code) % 8 == 0 and len(code) > 400
    assert program("riscv64") is None


def test_limits_on_memory_output_and_processor_time(tmp_path: Path) -> None:
    limit = "assert walls.limits(walls.mapped_mb() + 64, {cpu}, output_bytes=1000) is None\n"
    status, out = _run(limit.format(cpu=60) + "out['big'] = attempt(lambda: bytearray(10**11))")
    assert (status, out) == (0, {"big": "MemoryError"})
    write = "signal.signal(signal.SIGXFSZ, signal.SIG_DFL)\nf = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)\n"
    write += "os.write(f, b'x' * 2000)\nos.write(f, b'x')"
    status, _ = _run(limit.format(cpu=60) + write, str(tmp_path / "f"))
    assert status == -signal.SIGXFSZ and (tmp_path / "f").stat().st_size <= 1000
    start = time.monotonic()
    status, _ = _run(limit.format(cpu=-2) + "while True: pass")
    assert status in (-signal.SIGXCPU, -signal.SIGKILL) and time.monotonic() - start < 30


def test_capabilities_are_gone_even_for_root() -> None:
    status, out = _run(
        "out['state'] = repr(walls.drop_capabilities())\n"
        "out['caps'] = [x.split()[1] for x in open('/proc/self/status') if x.startswith('CapEff')][0]"
    )
    assert (status, out) == (0, {"state": "None", "caps": "0" * 16})


_ORPHAN = """
import os, time, sys
from coterie.tasks import Scorer
s = Scorer()
s.cage_report()
print(os.popen(f"ps -o pid= --ppid {os.getpid()}").read().split()[0], flush=True)
time.sleep(60)
"""


def test_workers_die_with_the_trainer() -> None:
    trainer = subprocess.Popen([sys.executable, "-c", _ORPHAN], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    worker = int(trainer.stdout.readline())
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(worker)], capture_output=True, text=True
    ).stdout.split()
    assert children
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    deadline = time.monotonic() + 10
    alive = [worker, *map(int, children)]
    while alive and time.monotonic() < deadline:
        time.sleep(0.05)
        alive = [pid for pid in alive if _runs(pid)]
    assert alive == []


def _runs(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
