"""``stack.json``: the state that the supervisor publishes and reads at its next start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from vcasgd import errors
from vcasgd.errors import StackError, VcasgdError
from vcasgd.fleet.providers.local.processes import Process
from vcasgd.private_file import write_private

NAME = "stack.json"


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
    #: True after a shutdown that saw the end of all machines, or else what it knew about them.
    machines_ended: bool = False
    known_pools: Mapping[str, Any] = field(default_factory=dict)
    known_machines: Mapping[str, str] = field(default_factory=dict)
    #: Reason of a failure: class name, message, remedy.
    error: tuple[str, str, str | None] | None = None

    @classmethod
    def read(cls, home: Path) -> StackState:
        """Read the state. Raises :class:`StackError` if there is none, or if it is damaged."""
        path = home / NAME
        try:
            return cls._from_dict(json.loads(path.read_text()))
        except FileNotFoundError as error:
            raise StackError(
                f"there is no stack in {home}", remedy="start one with: vcasgd up"
            ) from error
        except (ValueError, TypeError, KeyError) as error:
            raise StackError(f"{path} is damaged: {error}", remedy="remove it") from error

    @classmethod
    def read_or_new(cls, home: Path) -> StackState:
        """Read the state, or return an empty one if there is no file."""
        return cls.read(home) if (home / NAME).exists() else cls()

    def write(self, home: Path) -> None:
        write_private(home / NAME, json.dumps(asdict(self), indent=1))

    @property
    def is_ready(self) -> bool:
        """True if the stack is ready and its supervisor is alive."""
        process = self.supervisor.process
        return self.phase is StackPhase.READY and process is not None and process.alive()

    def with_error(self, error: VcasgdError) -> StackState:
        reason = (type(error).__name__, error.message, error.remedy)
        return replace(self, phase=StackPhase.FAILED, error=reason)

    def raise_error(self) -> None:
        """Raise the error that made the stack fail."""
        if self.error is not None:
            name, message, remedy = self.error
            raise getattr(errors, name, StackError)(message, remedy=remedy)

    @classmethod
    def _from_dict(cls, value: dict[str, Any]) -> StackState:
        """Parse a state, and ignore unknown fields of other versions."""
        parts = {name: PartState(**part) for name, part in value.pop("parts").items()}
        phase, error = StackPhase(value.pop("phase")), value.pop("error")
        supervisor = PartState(**value.pop("supervisor"))
        return cls(
            phase=phase,
            supervisor=supervisor,
            parts=parts,
            error=tuple(error) if error else None,
            **{item.name: value[item.name] for item in fields(cls) if item.name in value},
        )
