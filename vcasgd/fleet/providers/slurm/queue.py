"""Output of ``squeue``: what is asked for, and its strict parsing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vcasgd.errors import CloudUnavailable
from vcasgd.fleet.providers.base import MachineState
from vcasgd.fleet.providers.slurm.names import Label, MachineName

#: Fields, each with its width. The name, which may contain anything, is the last one.
_FIELDS = {
    "ArrayJobID": 12,
    "ArrayTaskID": 12,
    "State": 20,
    "Reason": 80,
    "NodeList": 80,
    "SubmitTime": 16,
    "StartTime": 16,
    "PreemptTime": 16,
    "Partition": 80,
    "Name": 200,
}
#: Arguments of squeue. Ended jobs, which Slurm forgets after some minutes, are listed, too.
QUEUE_ARGUMENTS = (
    "--me",
    "--array",
    "--noheader",
    "--states=all",
    "--Format=" + ",".join(f"{name}:{width}|" for name, width in _FIELDS.items()),
)
#: Environment of squeue: times as Unix seconds.
QUEUE_ENVIRONMENT = {"SLURM_TIME_FORMAT": "%s"}
#: Times that are not known, or have not come.
_NO_TIME = ("N/A", "NONE", "Unknown", "")

_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT")
_LEAVING = ("COMPLETING", "STOPPED", "SUSPENDED")
_ENDED = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "REVOKED", "TIMEOUT",
)  # fmt: skip
#: Beginnings of the reasons for which a job waits until a person changes something, or its owner's
#: other jobs end.
_STUCK = (
    "Account", "Assoc", "BadConstraints", "InvalidAccount", "InvalidQOS", "JobHeld", "MaxMem",
    "Partition", "QOS", "ReqNodeNotAvail", "ReservationDeleted", "launch_failed", "launch failed",
)  # fmt: skip


@dataclass(frozen=True)
class QueuedJob:
    """One of a pool's jobs. Times are Unix seconds."""

    machine: MachineName
    label: Label
    state: str
    """State in Slurm, in uppercase."""
    reason: str
    node: str
    partition: str
    submitted_at: float
    started_at: float | None
    preempted_at: float | None
    """When Slurm selected it for preemption."""

    @property
    def machine_state(self) -> MachineState:
        """The state as one of a machine. Unknown states are those of machines that may run."""
        if self.state in _ENDED:
            return MachineState.GONE
        if self.preempted_at is not None or self.state in _LEAVING:
            return MachineState.LEAVING
        return MachineState.BOOTING if self.state in _WAITING else MachineState.RUNNING

    @property
    def stuck(self) -> str | None:
        """Why the job won't start by itself; None if it may."""
        if self.state != "PENDING" or not self.reason.startswith(_STUCK):
            return None
        return f"Slurm doesn't start job {self.machine.job}: {self.reason}"


def parse_queue(text: str, cluster: str) -> list[QueuedJob]:
    """Parse the output of squeue, and return the jobs of a cluster.

    Raises :class:`~vcasgd.errors.CloudUnavailable` if a line isn't as requested: a list without
    some machines would mean that these are gone.
    """
    return list(_jobs(text.splitlines(), cluster))


def _jobs(lines: Iterable[str], cluster: str) -> Iterable[QueuedJob]:
    for line in filter(str.strip, lines):
        fields = [field.strip() for field in line.split("|", len(_FIELDS) - 1)]
        row = dict(zip(_FIELDS, fields, strict=False))
        # the last field ends with the separator, too
        label = Label.parse(row.get("Name", "").removesuffix("|").strip())
        if len(fields) < len(_FIELDS):
            raise _unreadable(line)
        if row.get("ArrayTaskID") == "N/A" and row.get("State", "") in _ENDED:
            # An array that was cancelled before any of its jobs began: one stands for all of them.
            row["ArrayTaskID"] = "0"
        if label is not None and label.cluster == cluster:
            yield _job(line, row, label)


def _job(line: str, row: dict[str, str], label: Label) -> QueuedJob:
    try:
        started_at = _time(row["StartTime"])
        submitted_at = _time(row["SubmitTime"])
        if submitted_at is None:
            raise _unreadable(line)
        return QueuedJob(
            machine=MachineName(label.pool, int(row["ArrayJobID"]), int(row["ArrayTaskID"])),
            label=label,
            state=row["State"].upper(),
            reason=row["Reason"],
            node=row["NodeList"],
            partition=row["Partition"],
            submitted_at=submitted_at,
            # that of a job that waits is an estimate
            started_at=None if row["State"].upper() in _WAITING else started_at,
            preempted_at=_time(row["PreemptTime"]),
        )
    except ValueError as error:
        raise _unreadable(line) from error


def _time(text: str) -> float | None:
    return None if text in _NO_TIME else float(int(text))


def _unreadable(line: str) -> CloudUnavailable:
    return CloudUnavailable(
        f"squeue prints what can't be read: {line[:100]!r}",
        remedy="check that squeue is Slurm's own, of version 20.11 or later",
    )
