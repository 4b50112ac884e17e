"""``stack.json``: what the supervisor tells everybody else, and remembers for its next life."""

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
from vcasgd.stack.home import write_private

NAME = "stack.json"


class StackPhase(StrEnum):
    """Of the whole stack. ``failed``: it did not start; everything is stopped again."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True)
class PartState:
    """A part. ``pid`` is its own process, the one to kill; 0 while there is none."""

    pid: int = 0
    #: of the process, in the kernel's clock ticks: tells it from a later one with its number
    ticks: int = 0
    #: Unix seconds
    started_at: float = 0.0
    restarts: int = 0
    ready: bool = False

    @property
    def process(self) -> Process | None:
        return Process(self.pid, self.ticks) if self.pid else None


@dataclass(frozen=True)
class StackState:
    """The whole stack, as its supervisor wrote it last; it may be dead since."""

    phase: StackPhase = StackPhase.STOPPED
    supervisor: PartState = PartState()
    api_url: str = ""
    ports: Mapping[str, int] = field(default_factory=dict)
    #: folder of what only living processes need; it goes with them
    scratch: str = ""
    #: in how many parts each job's model lies
    store_nodes: int = 1
    #: of each server
    replicas: int = 0
    parts: Mapping[str, PartState] = field(default_factory=dict)
    #: why it failed: name of the class, message, remedy
    error: tuple[str, str, str | None] | None = None

    @classmethod
    def read(cls, home: Path) -> StackState:
        """Raises :class:`StackError` if there never was a stack, or the file is damaged."""
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
        """Like :meth:`read`; an empty one where there is none yet."""
        return cls.read(home) if (home / NAME).exists() else cls()

    def write(self, home: Path) -> None:
        write_private(home / NAME, json.dumps(asdict(self), indent=1))

    @property
    def is_ready(self) -> bool:
        """Ready, and not just the last word of a supervisor that was killed."""
        process = self.supervisor.process
        return self.phase is StackPhase.READY and process is not None and process.alive()

    def with_error(self, error: VcasgdError) -> StackState:
        reason = (type(error).__name__, error.message, error.remedy)
        return replace(self, phase=StackPhase.FAILED, error=reason)

    def raise_error(self) -> None:
        """Raises what made the stack fail, as it was raised there."""
        if self.error is not None:
            name, message, remedy = self.error
            raise getattr(errors, name, StackError)(message, remedy=remedy)

    @classmethod
    def _from_dict(cls, value: dict[str, Any]) -> StackState:
        """What another version wrote is read as far as it is known here."""
        parts = {name: PartState(**part) for name, part in value.pop("parts").items()}
        phase, error = StackPhase(value.pop("phase")), value.pop("error")
        supervisor = PartState(**value.pop("supervisor"))
        return cls(
            phase=phase,
            supervisor=supervisor,
            parts=parts,
            error=tuple(error) if error else None,
            **{each.name: value[each.name] for each in fields(cls) if each.name in value},
        )
