"""Provider of machines that three commands of the user list, launch, and terminate.

The commands read and write JSON (``docs/how-to/any-cloud.md`` has the contract). The stack chooses
the machines' names, which say whose they are, so a cloud needs no tags, and a launch that is
repeated asks for machines that exist already.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError

from vcasgd.errors import (
    CloudDenied,
    CloudUnavailable,
    FleetError,
    InvalidRequest,
    NoCapacity,
    QuotaExceeded,
    Throttled,
)
from vcasgd.fleet.pools import ExecPoolSpec
from vcasgd.fleet.providers.base import (
    BOOT_ERROR_LENGTH,
    MACHINE_ID,
    LaunchOrder,
    fleet_error,
    one_line,
)
from vcasgd.fleet.providers.joining import (
    FROM_POOL,
    NOTICE_SECONDS,
    JoinedFleet,
    Listed,
    OrderedProvider,
    ordered_name,
    pool_of_ordered,
    run_command,
)
from vcasgd.schemas.fleet import Machine, MachineState
from vcasgd.spec.problems import first_mistake
from vcasgd.spec.values import StrictModel

#: Machines of one launch.
MAX_LAUNCHED = 100
#: Machines in a list, and bytes of an answer.
MAX_LISTED, MAX_BYTES = 10_000, 10_000_000
#: Variables that commands get from the controller, whose others may be secrets.
_PASSED = ("PATH", "HOME", "USER", "LANG", "TMPDIR", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
#: Hexadecimal digits in a name for the cluster, and for the launch.
CLUSTER_DIGITS, LAUNCH_DIGITS = 8, 10

_ERRORS: dict[str, type[FleetError]] = {
    "no_capacity": NoCapacity,
    "quota": QuotaExceeded,
    "denied": CloudDenied,
    "throttled": Throttled,
    "invalid": InvalidRequest,
    "unavailable": CloudUnavailable,
}
_REMEDIES: dict[type[FleetError], str] = {
    QuotaExceeded: "request a higher quota from the cloud, or set the pool's max_machines",
    CloudDenied: "check the credentials that template.env passes to the commands",
    InvalidRequest: "run the command by hand with the JSON of docs/how-to/any-cloud.md",
    CloudUnavailable: "run the command by hand with the JSON of docs/how-to/any-cloud.md",
}
_Text = Annotated[str, Field(max_length=255)]


class _AnswerRow(StrictModel):
    """A machine in the answer of ``list``. Times are Unix seconds, prices USD per hour."""

    name: _Text
    state: MachineState
    launched_at: float = Field(ge=0, le=1e12)
    id: _Text = ""
    host: _Text = ""
    zone: _Text = ""
    machine_type: _Text = ""
    price_per_hour: float | None = Field(default=None, ge=0, le=1e6)
    notice_at: float | None = Field(default=None, ge=0, le=1e12)
    problem: str | None = Field(default=None, max_length=2000)


#: Fields that a machine has with the same names.
_OF_MACHINE = {"state", "launched_at", "notice_at", "host", "zone", "machine_type"}


class _List(StrictModel):
    machines: list[_AnswerRow] = Field(max_length=MAX_LISTED)


class _Launched(StrictModel):
    """The answer of ``launch``: the names of the machines that exist now."""

    machines: list[_Text] = Field(max_length=MAX_LAUNCHED)


_Answer = TypeVar("_Answer", _List, _Launched)


class _Refusal(StrictModel):
    error: str
    message: str = ""


class ExecProvider(OrderedProvider[ExecPoolSpec]):
    """Provider for one pool. The machines join through the gateway."""

    name = "exec"
    max_terminated = 50

    def __init__(self, cluster: str, pools: Sequence[ExecPoolSpec], joined: JoinedFleet) -> None:
        super().__init__(cluster, pools, joined)
        (self._spec,) = pools

    def terminate(self, *machine_ids: str) -> None:
        """See the contract. Ignores machines of others."""
        alive = [
            row.model_dump(mode="json")
            for row in self._rows()
            if row.name in machine_ids and row.state is not MachineState.GONE
        ]
        if alive:
            self._call("terminate", {"machines": alive})

    def evict(self, machine_id: str, notice_seconds: float | None = None) -> None:
        """Tell the machine's agent to leave; the stack then terminates the machine."""
        seconds = NOTICE_SECONDS if notice_seconds is None else notice_seconds
        self._joined.end(machine_id, "evicted", seconds)

    def _launch_key(self, pool: str, token: str) -> str:
        return _digest(self._cluster, CLUSTER_DIGITS) + _digest(f"{pool} {token}", LAUNCH_DIGITS)

    def _rows(self) -> list[_AnswerRow]:
        """Return the machines of this cluster and pool."""
        prefix = f"join-{self._spec.name}-{_digest(self._cluster, CLUSTER_DIGITS)}"
        return [
            row
            for row in self._ask("list", {}, _List).machines
            if row.name.startswith(prefix) and pool_of_ordered(row.name) == self._spec.name
        ]

    def _listed(self) -> list[Listed]:
        return [
            Listed(
                Machine(
                    id=row.name,
                    pool=self._spec.name,
                    **row.model_dump(include=_OF_MACHINE),
                    **FROM_POOL,
                ),
                launch=row.name.rsplit("-", 2)[1],
                boot_error=one_line(row.problem or ""),
                price_per_hour=row.price_per_hour,
            )
            for row in self._rows()
        ]

    def _order(self, order: LaunchOrder[ExecPoolSpec], launch: str) -> list[str]:
        """Ask for machines with the names of this launch."""
        pool, argv = order.spec.name, order.boot.argv
        count = min(order.count, MAX_LAUNCHED)
        names = [ordered_name(pool, launch, index) for index in range(count)]
        machines = [
            {"name": name, "command": [name if word == MACHINE_ID else word for word in argv]}
            for name in names
        ]
        request = {
            "machines": machines,
            "env": {"VCASGD_TOKEN": self._token()},
            "zones": order.zones,
            "machine_types": order.machine_types,
            "spot": order.spot,
        }
        granted = self._ask("launch", request, _Launched).machines
        if strange := sorted(set(granted).difference(names)):
            raise self._error(CloudUnavailable, f"launch names {strange[0]!r}, unasked")
        if not granted:
            raise NoCapacity(f"{pool}: launch returned no machine")
        return sorted(set(granted), key=names.index)

    def _token(self) -> str:
        try:
            return Path(self._spec.template.token_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(
                f"{self._spec.name}: template.token_file can't be read: {error}",
                remedy="write the output of vcasgd token create --join --pool into it",
            ) from error

    def _ask(self, what: str, request: dict[str, Any], answer: type[_Answer]) -> _Answer:
        """Run a command, and parse what it prints."""
        text = self._call(what, request)
        try:
            return answer.model_validate_json(text)
        except ValidationError as error:
            why = first_mistake(error, "its output")
            problem = f"{what} printed what isn't in the contract: {why}"
            raise self._error(CloudUnavailable, problem) from error

    def _call(self, what: str, request: dict[str, Any]) -> str:
        """Run a command, and return what it prints."""
        spec, template = self._spec, self._spec.template
        argv, names = getattr(template, what), (*_PASSED, *template.env)
        given = {"cluster": self._cluster, "pool": spec.name, **request}
        env = {name: os.environ[name] for name in names if name in os.environ}
        try:
            done = run_command(argv, json.dumps(given), env, template.timeout.total_seconds())
        except (FileNotFoundError, PermissionError) as error:
            raise InvalidRequest(
                f"{spec.name}: template.{what}: {argv[0]} can't be run: {error.strerror}",
                remedy="write the command's path, and make it executable",
            ) from error
        except subprocess.TimeoutExpired as error:
            seconds = template.timeout.total_seconds()
            raise self._error(CloudUnavailable, f"{what} took over {seconds:g} s") from error
        except OSError as error:
            raise self._error(CloudUnavailable, f"{what}: {error}") from error
        if done.returncode:
            kind, text = _failure_of(done)
            for secret in request.get("env", {}).values():
                text = text.replace(secret, "***")
            raise self._error(kind, f"{what}: {text}")
        return done.stdout[:MAX_BYTES]

    def _error(self, kind: type[FleetError], message: str) -> FleetError:
        return fleet_error(kind, message, remedies=_REMEDIES, pool=self._spec.name)


def _failure_of(done: subprocess.CompletedProcess[str]) -> tuple[type[FleetError], str]:
    """Return the error of a command that failed: what it says in JSON, else its last words."""
    try:
        refusal = _Refusal.model_validate_json(done.stdout[:MAX_BYTES])
        kind, text = _ERRORS.get(refusal.error, CloudUnavailable), refusal.message
    except ValidationError:
        *_, last = (done.stderr or done.stdout).strip().split("\n")
        kind, text = CloudUnavailable, last[-BOOT_ERROR_LENGTH:]
    return kind, one_line(text) or f"it failed with exit status {done.returncode}"


def _digest(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]
