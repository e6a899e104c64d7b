"""Who may take part: ``open`` (any signed group), ``allow`` (named nodes), ``invite`` (holders of a shared secret).

With an invite every frame is sealed (ChaCha20-Poly1305, random 96-bit nonce) under a key derived from the invite
and the swarm's name by HKDF-SHA256. Relays and outsiders then can neither read nor forge; a member still
signs as itself, so members cannot pose as each other. One secret for all: to expel a member, make a new invite.
"""

from __future__ import annotations

import base64
import os
import secrets
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from coterie.errors import UserError
from coterie.swarm.wire import WireError

_SEALED = b"ctrX\x01"
OVERHEAD = len(_SEALED) + 12 + 16


class Access:
    """Seals and opens frames, and says which authors are welcome.

    Args:
        allow: node ids (hex) that are welcome; empty: everybody.
        invite: the shared secret (32 bytes); None: frames travel in clear.
    """

    def __init__(self, swarm: str, *, allow: frozenset[str] = frozenset(), invite: bytes | None = None) -> None:
        self.allow = allow
        self._box = None if invite is None else ChaCha20Poly1305(_derive(invite, swarm))

    def seal(self, frame: bytes) -> bytes:
        if self._box is None:
            return frame
        nonce = os.urandom(12)
        return _SEALED + nonce + self._box.encrypt(nonce, frame, _SEALED)

    def open(self, data: bytes, cap: int) -> bytes:
        """The frame inside. Raises WireError: too large, not sealed, or sealed under another invite."""
        if len(data) > cap + OVERHEAD:
            raise WireError("size", f"{len(data)} bytes, at most {cap} are accepted")
        if self._box is None:
            return data
        if len(data) < OVERHEAD or data[: len(_SEALED)] != _SEALED:
            raise WireError("seal", "not sealed with this swarm's invite")
        nonce = data[len(_SEALED) : len(_SEALED) + 12]
        try:
            return self._box.decrypt(nonce, data[len(_SEALED) + 12 :], _SEALED)
        except InvalidTag as e:
            raise WireError("seal", "sealed with another invite, or damaged") from e

    def welcome(self, author: str) -> bool:
        return not self.allow or author in self.allow


def new_invite() -> str:
    """A fresh shared secret as text, to be handed to members by a private channel."""
    return "coterie-invite-" + base64.urlsafe_b64encode(secrets.token_bytes(32)).decode().rstrip("=")


def read_invite(path: str | Path) -> bytes:
    """The secret in an invite file. Raises UserError."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"invite {file}: no such file; make one with: coterie swarm invite {file}")
    text = file.read_text(encoding="utf-8").strip().removeprefix("coterie-invite-")
    try:
        secret = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError as e:
        raise UserError(f"invite {file}: not an invite: {e}") from e
    if len(secret) != 32:
        raise UserError(f"invite {file}: not an invite (32 bytes expected, {len(secret)} found)")
    return secret


def write_invite(path: str | Path) -> None:
    """Make a new invite file, readable by its owner only. Refuses to overwrite."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as e:
        raise UserError(f"invite {path}: exists already") from e
    with os.fdopen(fd, "w") as f:
        f.write(new_invite() + "\n")


def _derive(invite: bytes, swarm: str) -> bytes:
    return HKDF(SHA256(), 32, salt=None, info=b"coterie/invite/v1\0" + swarm.encode()).derive(invite)
