"""Files of a stack.

They are in one folder::

    stack.lock      held by the supervisor and its guardian
    stack.json      see :mod:`vcasgd.stack.state`
    token           the API's bearer token, generated once
    secrets.json    passwords of the Redis servers, of Ray and for workers, and the key of the
                    jobs' secrets, generated once
    ledger/         the ledger's append-only file
    tensors/        configuration of the tensors server; tensors-0/, … on several store nodes
    storage/        packages, checkpoints, models
    machines/      machines of the local provider
    logs/           one file for each part, and ``stack.log``
"""

from __future__ import annotations

import fcntl
import json
import secrets
import time
from pathlib import Path
from typing import IO

from vcasgd.errors import StackError
from vcasgd.logging import last_lines
from vcasgd.private_file import write_private

#: Size in bytes from which a log is rotated to ``<name>.log.1`` when its part starts.
LOG_BYTES = 4_000_000
#: Seconds to retry the lock; processes that only check it hold it for microseconds.
LOCK_SECONDS = 0.5


class StackHome:
    """Paths and secrets of one stack."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().resolve()
        self.lock = self.path / "stack.lock"
        self.token_file = self.path / "token"
        self.secrets_file = self.path / "secrets.json"
        self.storage = self.path / "storage"
        self.logs = self.path / "logs"

    def __repr__(self) -> str:
        return f"StackHome({str(self.path)!r})"

    def create(self) -> None:
        """Create the folders. Raises :class:`StackError` on failure."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.logs.mkdir(exist_ok=True)
            self.storage.mkdir(exist_ok=True)
        except OSError as error:
            raise StackError(
                f"can't use {self.path}: {error.strerror}",
                remedy="set VCASGD_HOME to a writable folder",
            ) from error

    def acquire(self) -> IO[bytes] | None:
        """Return the open lock file, or None if another process holds the lock.

        The lock is held while the file is open in any process.
        """
        file = self.lock.open("ab")
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    file.close()
                    return None
                time.sleep(LOCK_SECONDS / 20)
            else:
                return file

    def token(self) -> str | None:
        """Return the API's token, or None before the first start."""
        try:
            return self.token_file.read_text().strip() or None
        except FileNotFoundError:
            return None

    def ensure_token(self) -> str:
        """Return the API's token; the first call generates it."""
        token = self.token()
        if token is None:
            token = secrets.token_hex(24)
            write_private(self.token_file, token + "\n")
        return token

    def ensure_password(self, server: str) -> str:
        """Return the password of a server; the first call generates it."""
        passwords = self._passwords()
        if server not in passwords:
            passwords[server] = secrets.token_hex(24)
            write_private(self.secrets_file, json.dumps(passwords))
        return passwords[server]

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def open_log(self, name: str) -> IO[bytes]:
        """Open a log for appending, and rotate it first if it is large."""
        path = self.log(name)
        if path.exists() and path.stat().st_size > LOG_BYTES:
            path.replace(path.with_suffix(".log.1"))
        return path.open("ab")

    def log_tail(self, name: str, lines: int = 15) -> str:
        """Return the last lines of a part's log; empty if there is none."""
        return "\n".join(last_lines(self.log(name), lines))

    def without_secrets(self, text: str) -> str:
        """Return the text with ``***`` in place of the stack's secrets."""
        for secret in (self.token(), *self._passwords().values()):
            if secret:
                text = text.replace(secret, "***")
        return text

    def _passwords(self) -> dict[str, str]:
        try:
            value = json.loads(self.secrets_file.read_text())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise StackError(
                f"{self.secrets_file} is damaged: {error}",
                remedy="stop the stack, remove the file, and start again",
            ) from error
        return {str(name): str(password) for name, password in value.items()}
