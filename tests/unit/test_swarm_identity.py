"""Keys, names, locks and invites."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import swarm_kit as kit

from coterie.errors import UserError
from coterie.swarm.access import OVERHEAD, Access, read_invite, write_invite
from coterie.swarm.identity import (
    IdentityLock,
    export_identity,
    import_identity,
    new_identity,
    open_identity,
    peek_identity,
    short_name,
    verify_signature,
)
from coterie.swarm.wire import WireError


def test_a_key_is_made_on_first_use_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "run" / "identity.pem"
    first, second = open_identity(path), open_identity(path)
    assert first.node_id == second.node_id and len(first.node_id) == 64
    assert (first.session, second.session) == (1, 2)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert sorted(p.name for p in path.parent.iterdir()) == ["identity.pem", "identity.pem.session"]


def test_names_are_for_people_and_stable() -> None:
    me = new_identity(b"\x01" * 32)
    assert me.name == short_name(me.node_id) and me.name.count("-") == 2 and me.name.endswith(me.node_id[:4])
    assert "private" not in repr(me).lower() and repr(me).startswith(f"Identity({me.name}")


def test_signatures_hold_for_the_exact_bytes_only() -> None:
    me, other = kit.person(1), kit.person(2)
    signature = me.sign(b"text")
    assert verify_signature(me.public, signature, b"text")
    assert not verify_signature(me.public, signature, b"texT")
    assert not verify_signature(other.public, signature, b"text")
    assert not verify_signature(b"\xff" * 32, signature, b"text")


def test_sw05_export_and_import_carry_the_identity(tmp_path: Path) -> None:
    made = open_identity(tmp_path / "a.pem")
    export_identity(tmp_path / "a.pem", tmp_path / "backup.pem")
    assert stat.S_IMODE(os.stat(tmp_path / "backup.pem").st_mode) == 0o600
    assert import_identity(tmp_path / "backup.pem", tmp_path / "b.pem").node_id == made.node_id
    with pytest.raises(UserError, match="exists already"):
        import_identity(tmp_path / "backup.pem", tmp_path / "b.pem")
    with pytest.raises(UserError, match="exists already"):
        export_identity(tmp_path / "a.pem", tmp_path / "backup.pem")


def test_a_file_that_is_no_key_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("hello")
    with pytest.raises(UserError, match=r"x\.pem: not an unencrypted PEM"):
        open_identity(tmp_path / "x.pem")
    with pytest.raises(UserError, match="no such file"):
        peek_identity(tmp_path / "none.pem")


def test_sw05_a_copied_key_in_another_process_is_refused(tmp_path: Path) -> None:
    me = open_identity(tmp_path / "a.pem")
    export_identity(tmp_path / "a.pem", tmp_path / "copy.pem")
    lock = IdentityLock(me)
    code = (
        f"import sys; from coterie.swarm.identity import *\nIdentityLock(open_identity({str(tmp_path / 'copy.pem')!r}))"
    )
    try:
        refused = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert refused.returncode == 1
        assert f"identity {me.name} is already in use on this machine" in refused.stderr
    finally:
        lock.close()
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_invite_seals_and_a_stranger_is_told(tmp_path: Path) -> None:
    write_invite(tmp_path / "invite")
    with pytest.raises(UserError, match="exists already"):
        write_invite(tmp_path / "invite")
    secret = read_invite(tmp_path / "invite")
    ours, other = Access("s", invite=secret), Access("s", invite=b"\x01" * 32)
    sealed = ours.seal(b"frame" * 10)
    assert len(sealed) == 50 + OVERHEAD and b"frame" not in sealed
    assert ours.open(sealed, 100) == b"frame" * 10
    assert ours.seal(b"frame" * 10) != sealed  # a fresh nonce every time
    for reader, data in [
        (other, sealed),
        (ours, b"frame" * 10),
        (ours, sealed[:-1]),
        (Access("t", invite=secret), sealed),
    ]:
        with pytest.raises(WireError) as e:
            reader.open(data, 100)
        assert e.value.kind == "seal"
    with pytest.raises(WireError) as e:
        ours.open(sealed, 20)
    assert e.value.kind == "size"


@pytest.mark.parametrize("text", ["", "coterie-invite-abc", "coterie-invite-" + "é" * 43])
def test_a_broken_invite_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "invite").write_text(text)
    with pytest.raises(UserError, match="not an invite"):
        read_invite(tmp_path / "invite")
