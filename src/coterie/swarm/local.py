"""Exchange between processes of one machine: one SQLite file in WAL mode, no server.

Every node opens its own connection in the process that uses it. Rows are bounded in number (``keep``) and in bytes by
the number times the size cap; the oldest go first. A node killed at any instant leaves either a whole row or none. Not
for network file systems (SQLite's locks do not work there): use ``network``.
"""

from __future__ import annotations

import os
import random
import sqlite3
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from coterie.errors import UserError
from coterie.swarm.exchange import Frame, Request, Status
from coterie.swarm.sharding import fair_sample

_SCHEMA = """
CREATE TABLE IF NOT EXISTS frames (id INTEGER PRIMARY KEY AUTOINCREMENT, node TEXT NOT NULL, frame BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS nodes (node TEXT PRIMARY KEY, pid INTEGER NOT NULL, beat REAL NOT NULL, info TEXT NOT NULL);
"""
ALIVE_S = 60.0


class LocalExchange:
    """Groups in a shared SQLite file.

    Args:
        path: the file; created if missing.
        node: own node id, to skip own rows.
        keep: newest rows kept.
    """

    def __init__(self, path: str | Path, node: str, *, keep: int = 4096, seed: int = 0) -> None:
        self._path, self._node, self._keep = Path(path), node, keep
        self._rng = random.Random(f"local/{node}/{seed}")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._db = _connect(self._path)
        self._cursor = self._newest()
        self._cause = ""
        self._backlog: deque[bytes] = deque(maxlen=256)  # kept while the file is locked or the disk full
        self._bytes = 0
        self._errors = 0
        self.beat("")

    def publish(self, frames: Sequence[bytes]) -> None:
        self._backlog.extend(frames)
        if not self._backlog:
            return
        rows = [(self._node, f) for f in self._backlog]
        try:
            with _transaction(self._db):
                self._db.executemany("INSERT INTO frames (node, frame) VALUES (?, ?)", rows)
                self._db.execute("DELETE FROM frames WHERE id <= (SELECT max(id) FROM frames) - ?", (self._keep,))
            self._backlog.clear()
            self._cause = ""
        except sqlite3.Error as e:
            self._fail(e)

    def collect(self, request: Request) -> list[Frame]:
        """New rows of others; a fair sample if they are more than ``4 * messages``, so cost hardly grows with N."""
        deadline = time.monotonic() + request.wait_s
        while True:
            out = self._read(request)
            if out or time.monotonic() >= deadline:
                return out
            time.sleep(0.01)

    def beat(self, info: str) -> None:
        row = (self._node, os.getpid(), time.time(), info)
        try:
            with _transaction(self._db):
                self._db.execute("INSERT OR REPLACE INTO nodes VALUES (?, ?, ?, ?)", row)
                self._db.execute("DELETE FROM nodes WHERE beat < ?", (time.time() - 24 * 3600,))
        except sqlite3.Error as e:
            self._fail(e)

    def pending(self) -> int:
        return len(self._backlog)

    def status(self) -> Status:
        try:
            n = self._db.execute("SELECT count(*) FROM nodes WHERE beat > ?", (time.time() - ALIVE_S,)).fetchone()[0]
        except sqlite3.Error as e:
            self._fail(e)
            n = None
        return Status("down" if self._cause else "up", self._cause, n)

    def metrics(self) -> dict[str, float]:
        return {"swarm/bytes_received": float(self._bytes), "swarm/exchange_errors": float(self._errors)}

    def close(self) -> None:
        try:
            with _transaction(self._db):
                self._db.execute("DELETE FROM nodes WHERE node = ?", (self._node,))
        except sqlite3.Error as e:  # status will show this node as not seen lately
            self._fail(e)
        self._db.close()

    def _read(self, request: Request) -> list[Frame]:
        try:
            newest = self._newest()
            low = max(self._cursor, newest - self._keep)
            new = self._db.execute(
                "SELECT node, id FROM frames WHERE id > ? AND id <= ? AND node != ? AND length(frame) <= ? ORDER BY id",
                (low, newest, self._node, request.byte_cap),
            ).fetchall()
            ids = [i for _, i in fair_sample(new, 4 * request.messages, self._rng)]
            rows = _fetch(self._db, ids)
            self._cause = ""
        except sqlite3.Error as e:
            self._fail(e)
            return []
        self._cursor = newest
        self._bytes += sum(len(frame) for _, frame in rows)
        return rows

    def _newest(self) -> int:
        row = self._db.execute("SELECT max(id) FROM frames").fetchone()
        return int(row[0] or 0)

    def _fail(self, error: sqlite3.Error) -> None:
        self._errors += 1
        self._cause = f"exchange file {self._path}: {error}"


def read_nodes(path: str | Path) -> list[tuple[str, int, float, str]]:
    """(node id, pid, seconds since its last sign of life, info) of every node of a local exchange. One that was killed stays
    for a day: see :data:`ALIVE_S`."""
    file = Path(path)
    if not file.is_file():
        raise UserError(
            f"swarm file {file}: no such file; a node of exchange = 'local' makes it when it starts (swarm.path)"
        )
    db = _connect(file)
    try:
        now = time.time()
        return [
            (n, p, now - b, i) for n, p, b, i in db.execute("SELECT node, pid, beat, info FROM nodes ORDER BY node")
        ]
    finally:
        db.close()


def _fetch(db: sqlite3.Connection, ids: Sequence[int]) -> list[Frame]:
    out: list[Frame] = []
    for start in range(0, len(ids), 500):  # SQLite's limit on variables
        part = ids[start : start + 500]
        marks = ",".join("?" * len(part))
        found = db.execute(f"SELECT node, frame FROM frames WHERE id IN ({marks}) ORDER BY id", part)
        out.extend((str(node), frame) for node, frame in found if isinstance(frame, bytes))
    return out


def _connect(path: Path) -> sqlite3.Connection:
    try:
        db = sqlite3.connect(path, timeout=2.0, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute("PRAGMA journal_size_limit=33554432")
        db.executescript(_SCHEMA)
    except sqlite3.Error as e:
        raise UserError(f"swarm file {path}: cannot be opened as an exchange: {e}") from e
    return db


class _transaction:
    """BEGIN IMMEDIATE ... COMMIT: a writer waits for its turn at the start, never half-way."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, *_: object) -> None:
        self._db.execute("ROLLBACK" if kind else "COMMIT")
