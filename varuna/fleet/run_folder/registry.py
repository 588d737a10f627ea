"""Members of the run: tokens that let machines join, and the secrets of those that did."""

import hashlib
import re
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

from varuna.core.errors import FleetError
from varuna.fleet.net.protocol import JobIdentity
from varuna.fleet.run_folder.database import open_database

TOKEN_LIFE_S = 24 * 3600.0
_VOID = -1  # uses that are left of a token that was revoked


class RefusedError(FleetError):
    """A machine or a person is not let in; the message says why, and nothing that helps an attacker."""


class Registry:
    """Tokens and machines. Only hashes are stored, so a reader of the file learns no secret. For any thread.

    Args:
        run_dir: of the run.
        clock: seconds since the epoch: tokens must expire also while no manager runs.
    """

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.time) -> None:
        self._database: sqlite3.Connection = open_database(run_dir)
        self._clock = clock
        self._lock = threading.Lock()  # one transaction at a time

    def mint(self, *, uses: int = 1, life_s: float = TOKEN_LIFE_S) -> str:
        """A new token, good for ``uses`` joins within ``life_s`` seconds."""
        token = secrets.token_urlsafe(24)
        now = self._clock()
        with self._lock, self._database:
            self._database.execute("DELETE FROM tokens WHERE expires < ?", (now - TOKEN_LIFE_S,))
            self._database.execute("INSERT INTO tokens VALUES (?, ?, ?, ?)", (hashed(token), uses, now + life_s, now))
        return token

    def knows(self, token: str) -> bool:
        """Return whether this run has ever given out such a token, which may be spent by now."""
        with self._lock:
            found = self._database.execute("SELECT 1 FROM tokens WHERE sha256 = ?", (hashed(token),)).fetchone()
        return found is not None

    def join(self, token: str, hostname: str, secret_sha256: str) -> str:
        """Spend one use of a token; returns what the machine is called from now on.

        Who asks again, since the answer was lost, gets the same one, and spends nothing.

        Raises:
            RefusedError: the token is unknown, spent or expired, or the secret is void.
        """
        with self._lock:
            return self._join(token, hostname, secret_sha256)

    def _join(self, token: str, hostname: str, secret_sha256: str) -> str:
        row = self._database.execute("SELECT uses, expires FROM tokens WHERE sha256 = ?", (hashed(token),)).fetchone()
        if row is None:
            raise RefusedError("this token is unknown. Create one with `varuna join-token`.")
        if row[1] < self._clock():
            raise RefusedError("this token has expired. Create another one with `varuna join-token`.")
        known = self._database.execute(
            "SELECT name, revoked FROM nodes WHERE secret_sha256 = ?", (secret_sha256,)
        ).fetchone()
        if known is not None:
            if known[1]:
                raise RefusedError(f"node {known[0]} was removed ({known[1]}): join again with a new token")
            return str(known[0])
        self._database.execute("BEGIN IMMEDIATE")
        spent = self._database.execute(
            "UPDATE tokens SET uses = uses - 1 WHERE sha256 = ? AND uses > 0", (hashed(token),)
        ).rowcount
        if not spent:
            self._database.execute("ROLLBACK")
            if row[0] == _VOID:
                raise RefusedError("this token was made void. Create another one with `varuna join-token`.")
            raise RefusedError("this token has been used. Create another one with `varuna join-token`.")
        number = self._database.execute("SELECT COUNT(*) FROM nodes").fetchone()[0]
        node = _name(hostname, number)
        self._database.execute(
            "INSERT INTO nodes (name, secret_sha256, hostname, joined) VALUES (?, ?, ?, ?)",
            (node, secret_sha256, hostname, self._clock()),
        )
        self._database.execute("COMMIT")
        return node

    def check(self, node: str, secret: str) -> None:
        """Let a machine in that joined before.

        Raises:
            RefusedError: it did not, or is not welcome any more.
        """
        with self._lock:
            row = self._database.execute("SELECT secret_sha256, revoked FROM nodes WHERE name = ?", (node,)).fetchone()
        if row is None or not secrets.compare_digest(row[0], hashed(secret)):
            raise RefusedError("node or secret is wrong: join again with a new token")
        if row[1]:
            raise RefusedError(f"node {node} was removed ({row[1]}): join again with a new token")

    def revoke(self, node: str, why: str) -> bool:
        """Make a machine's secret void; False if there is no such machine."""
        with self._lock, self._database:
            return self._database.execute("UPDATE nodes SET revoked = ? WHERE name = ?", (why, node)).rowcount > 0

    def void_tokens(self) -> int:
        """No token that was minted so far lets anybody in; returns how many would have."""
        with self._lock, self._database:
            good = "uses > 0 AND expires > ?"
            void = f"UPDATE tokens SET uses = {_VOID} WHERE {good}"
            return self._database.execute(void, (self._clock(),)).rowcount

    def agree(self, job: JobIdentity) -> str | None:
        """Keep what the first agent runs; for all others, return the first difference to that, if any."""
        with self._lock:
            row = self._database.execute("SELECT body FROM facts WHERE name = 'identity'").fetchone()
            if row is None:
                with self._database:
                    self._database.execute("INSERT INTO facts VALUES ('identity', ?)", (job.model_dump_json(),))
                return None
        agreed = JobIdentity.model_validate_json(row[0])
        if agreed.version != job.version:
            return f"this agent runs Varuna {job.version}, but the run uses {agreed.version}"
        if agreed.script_sha256 != job.script_sha256:
            return f"its script {job.script} differs from the run's {agreed.script}: use the same file on all machines"
        if agreed.args_sha256 != job.args_sha256:
            return "its script's arguments differ from the run's"
        return None

    def close(self) -> None:
        """Close the file."""
        self._database.close()


def hashed(text: str) -> str:
    """Return the hash under which a secret is stored: secrets are long and random, so a plain hash is enough."""
    return hashlib.sha256(text.encode()).hexdigest()


def _name(hostname: str, number: int) -> str:
    """``n3-gpu-box``: unique by the number, told apart by the rest."""
    label = node_label(hostname)
    return f"n{number}-{label}" if label else f"n{number}"


def node_label(hostname: str) -> str:
    """Return what a node's name takes from its host's."""
    return re.sub(r"[^a-z0-9-]+", "-", hostname.lower().split(".")[0]).strip("-")[:24].strip("-")
