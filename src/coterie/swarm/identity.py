"""Who a node is: an Ed25519 key pair, made on first use, kept in one file that can be exported and imported.

A node id is the public key in hex (64 characters). :func:`short_name` turns it into two words and four hex digits for
people; it is a convenience, never compared by code. Losing the key file loses the identity: export it.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from coterie.errors import UserError

_FIRST = """
amber ashen bold brave brisk calm clear coral crisp dapper dusky eager early fabled fair fleet frosty gentle
gilded glad golden hardy hazel humble ivory jolly keen kind lilac lively lucid lunar mellow merry misty modest
noble opal pale patient plain proud quick quiet rapid rosy ruby rustic sage silent silver sleek snowy solar
spry steady stout sunny swift tidy vivid warm witty young
""".split()  # noqa: SIM905
_SECOND = """
adder badger beaver bison bream carp cobra condor crane crow deer dingo dove eagle eland ermine falcon ferret
finch fox gecko gibbon goose grouse hare hawk heron hound ibex ibis jackal jay kestrel kite koala lark lemur
lion lynx magpie marten mole moose newt ocelot orca otter owl panda perch pika puffin quail raven robin seal
shrew stoat swan tapir tern viper wolf wren
""".split()  # noqa: SIM905


@dataclass(frozen=True)
class Identity:
    """A node's key pair. ``session`` counts the starts of this identity: peers order its messages by (session, seq)."""

    key: Ed25519PrivateKey
    session: int = 0

    @property
    def public(self) -> bytes:
        """The raw public key, 32 bytes."""
        return self.key.public_key().public_bytes_raw()

    @property
    def node_id(self) -> str:
        return self.public.hex()

    @property
    def name(self) -> str:
        return short_name(self.node_id)

    def sign(self, data: bytes) -> bytes:
        return self.key.sign(data)

    def __repr__(self) -> str:  # never the private key
        return f"Identity({self.name}, session={self.session})"


def short_name(node_id: str) -> str:
    """Two words and four hex digits, e.g. ``amber-otter-3f2a``: for people, not for comparison."""
    digest = hashlib.sha256(bytes.fromhex(node_id)).digest()
    return f"{_FIRST[digest[0] % len(_FIRST)]}-{_SECOND[digest[1] % len(_SECOND)]}-{node_id[:4]}"


def verify_signature(public: bytes, signature: bytes, data: bytes) -> bool:
    """Whether ``signature`` (64 bytes) over exactly ``data`` was made by the owner of ``public`` (32 bytes)."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def new_identity(seed: bytes | None = None) -> Identity:
    """A fresh identity in memory (from ``seed``, 32 bytes, if given: for simulations and test vectors)."""
    return Identity(Ed25519PrivateKey.from_private_bytes(seed) if seed else Ed25519PrivateKey.generate())


def open_identity(path: str | Path) -> Identity:
    """Load the key at ``path``, or create it (mode 0600, atomically), and count this start in ``<path>.session``.

    Raises:
        UserError: the file is not an Ed25519 private key.
    """
    file = Path(path)
    if not file.exists():
        _write_key(file, Ed25519PrivateKey.generate())
    key = _read_key(file)
    counter = file.with_name(file.name + ".session")
    session = int(counter.read_text()) + 1 if counter.exists() else 1
    _replace(counter, str(session).encode())
    return Identity(key, session)


def peek_identity(path: str | Path) -> Identity:
    """Load the key at ``path`` without counting a start. Raises UserError if there is none."""
    return Identity(_read_key(Path(path)))


def export_identity(path: str | Path, target: str | Path) -> None:
    """Copy the private key to ``target`` (0600). Refuses to overwrite."""
    _write_key(Path(target), _read_key(Path(path)))


def import_identity(source: str | Path, path: str | Path) -> Identity:
    """Install the key of ``source`` at ``path``. Refuses to overwrite another identity."""
    key = _read_key(Path(source))
    _write_key(Path(path), key)
    return Identity(key)


class IdentityLock:
    """Held while a node runs: a second node of the same identity on this machine is refused, wherever its key lies.

    An advisory lock on a file named after the node id in the temporary directory; the system drops it with the process.
    """

    def __init__(self, identity: Identity) -> None:
        folder = Path(tempfile.gettempdir()) / f"coterie-{os.getuid() if hasattr(os, 'getuid') else 'user'}"
        folder.mkdir(mode=0o700, exist_ok=True)
        self._fd: int | None = os.open(folder / f"{identity.node_id}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        if not _try_lock(self._fd):
            os.close(self._fd)
            raise duplicate_error(identity, "on this machine")

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def duplicate_error(identity: Identity, where: str) -> UserError:
    return UserError(
        f"identity {identity.name} is already in use {where}: every node needs its own; "
        f"stop the other node, or give this one another [swarm] identity file"
    )


def _try_lock(fd: int) -> bool:
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        try:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except OSError:
            return False
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _read_key(file: Path) -> Ed25519PrivateKey:
    if not file.is_file():
        raise UserError(f"identity {file}: no such file")
    try:
        key = load_pem_private_key(file.read_bytes(), password=None)
    except (ValueError, TypeError) as e:
        raise UserError(f"identity {file}: not an unencrypted PEM private key: {e}") from e
    if not isinstance(key, Ed25519PrivateKey):
        raise UserError(f"identity {file}: an Ed25519 key is needed, found {type(key).__name__}")
    return key


def _write_key(file: Path, key: Ed25519PrivateKey) -> None:
    """Whole or not at all, and never over an existing file: written beside it, then linked."""
    file.parent.mkdir(parents=True, exist_ok=True)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    part = _write_part(file, pem)
    try:
        os.link(part, file)
    except FileExistsError as e:
        raise UserError(f"identity {file}: exists already; move it away first") from e
    finally:
        os.unlink(part)


def _replace(file: Path, data: bytes) -> None:
    os.replace(_write_part(file, data), file)


def _write_part(file: Path, data: bytes) -> Path:
    fd, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")  # mkstemp creates with mode 0600
    with os.fdopen(fd, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    return Path(name)
