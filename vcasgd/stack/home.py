"""Files of a stack, and the state that its supervisor publishes.

They are in one folder::

    stack.lock      held by the supervisor and its guardian
    stack.json      :class:`StackState`, which the supervisor writes, and reads at its next start
    used-pools.json pools that may have machines, which the controller writes
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

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import IO

from pydantic import TypeAdapter, ValidationError

from vcasgd import errors
from vcasgd.errors import StackError, VcasgdError
from vcasgd.fleet.providers.local.processes import Process
from vcasgd.local_files import acquire, write_private
from vcasgd.logging import last_lines
from vcasgd.spec.problems import first_mistake

#: Size in bytes from which a log begins again, with a copy of the former one: ``<name>.log.1``.
LOG_BYTES = 4_000_000
#: Seconds to retry the lock; processes that only check it hold it for microseconds.
LOCK_SECONDS = 0.5
_STATE = "stack.json"


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
        if acquire(file, LOCK_SECONDS):
            return file
        file.close()
        return None

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
        return self.log(name).open("ab")

    def limit_log(self, name: str) -> None:
        """Begin a log again if it is large, also while processes append to it."""
        path = self.log(name)
        with suppress(OSError):
            if path.stat().st_size <= LOG_BYTES:
                return
            with suppress(OSError):  # A full disk, on which the end of the log makes room.
                shutil.copyfile(path, path.with_suffix(".log.1"))
            os.truncate(path, 0)

    def log_tail(self, name: str) -> str:
        """Return the last lines of a part's log; empty if there is none."""
        return "\n".join(last_lines(self.log(name), 15))

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


class StackPhase(StrEnum):
    """Phase of the whole stack. ``failed`` means it did not start and is stopped again."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True)
class PartState:
    """State of a part. ``pid`` is its main process, or 0 if there is none."""

    pid: int = 0
    #: Start time of the process in clock ticks; distinguishes it from a later one with its PID.
    ticks: int = 0
    #: Start time in Unix seconds.
    started_at: float = 0.0
    restarts: int = 0
    ready: bool = False

    @property
    def process(self) -> Process | None:
        return Process(self.pid, self.ticks) if self.pid else None

    @property
    def alive(self) -> bool:
        """True if the process runs."""
        return self.process is not None and self.process.alive()


@dataclass(frozen=True)
class StackState:
    """Last state that the supervisor wrote; the stack may have died since."""

    phase: StackPhase = StackPhase.STOPPED
    supervisor: PartState = PartState()
    api_url: str = ""
    ports: Mapping[str, int] = field(default_factory=dict)
    #: Folder for sockets and temporary files; removed with the stack.
    scratch: str = ""
    #: Number of store nodes.
    store_nodes: int = 1
    #: Number of replicas of each server.
    replicas: int = 0
    parts: Mapping[str, PartState] = field(default_factory=dict)
    #: What the shutdown does at present.
    doing: str = ""
    #: True after a shutdown that saw the end of all machines, or else their pools.
    machines_ended: bool = False
    known_machines: Mapping[str, str] = field(default_factory=dict)
    #: Reason of a failure: class name, message, remedy.
    error: tuple[str, str, str | None] | None = None

    @classmethod
    def read(cls, home: Path) -> StackState:
        """Read the state. Raises :class:`StackError` if there is none, or if it is damaged."""
        path = home / _STATE
        try:
            return _state_type().validate_json(path.read_bytes())
        except FileNotFoundError as error:
            raise StackError(
                f"there is no stack in {home}", remedy="start one with: vcasgd up"
            ) from error
        except ValidationError as error:
            why = first_mistake(error)
            raise StackError(f"{path} is damaged: {why}", remedy="remove it") from error

    @classmethod
    def read_or_new(cls, home: Path) -> StackState:
        """Read the state, or return an empty one if there is no file."""
        return cls.read(home) if (home / _STATE).exists() else cls()

    def write(self, home: Path) -> None:
        write_private(home / _STATE, json.dumps(asdict(self), indent=1))

    @property
    def is_ready(self) -> bool:
        """True if the stack is ready and its supervisor is alive."""
        return self.phase is StackPhase.READY and self.supervisor.alive

    def with_error(self, error: VcasgdError) -> StackState:
        reason = (type(error).__name__, error.message, error.remedy)
        return replace(self, phase=StackPhase.FAILED, error=reason)

    def remove_scratch(self) -> None:
        """Remove the folder with sockets and temporary files."""
        if self.scratch:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def raise_error(self) -> None:
        if self.error is not None:
            name, message, remedy = self.error
            raise getattr(errors, name, StackError)(message, remedy=remedy)


@cache
def _state_type() -> TypeAdapter[StackState]:
    # unknown fields, as of other versions, are ignored
    return TypeAdapter(StackState)
