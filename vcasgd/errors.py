"""Errors that vcasgd raises deliberately, and whose fault each is.

All errors can be pickled without loss, so they cross process boundaries unchanged. All processes
react to an error by its :class:`Cause`:

========== ========================== ============================================================
fault      errors                     reaction
========== ========================== ============================================================
machine    MachineDiffers,            the controller quarantines the machine by name, and the job
           SettingError, OSError      continues with the others; fails once more machines are at
                                      fault than not (``controller/jobs/failures.py``)
work       UserCodeError and any      a worker returns its lease, so that another one tries; the
           other error                job fails after three attempts. A parameter server tries an
                                      update again, then refuses it (``parameter_server/shard.py``)
job        SpecError, JobUnreadable   the job fails at once: no other machine can do better
store      StoreError, NotFound,      wait and try again; counts against nobody
           StorageUnavailable,
           RankLost
superseded Fenced                     drop the work: another process has it
========== ========================== ============================================================

An error that stops one machine is its own fault once another machine has done the same: then
:class:`~vcasgd.errors.MachineDiffers` replaces the :class:`~vcasgd.errors.SpecError`
(``worker/setup.py``).
"""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import Any, ClassVar


class VcasgdError(Exception):
    """Root of the tree.

    ``message`` describes the problem. ``remedy``, if any, says what to do about it. Other keyword
    arguments are stored in ``details``.
    """

    def __init__(self, message: str, *, remedy: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.details = details

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), self.message, remedy=self.remedy, **self.details), ()


class SpecError(VcasgdError):
    """A job file, a setting, or a request is invalid; ``field`` names it (``update.alpha``)."""

    @property
    def field(self) -> str | None:
        value = self.details.get("field")
        return None if value is None else str(value)


class SettingError(SpecError):
    """A setting of this process is missing or invalid, whatever its job file says."""


class MachineDiffers(VcasgdError):
    """The data, the model, or the installation of this machine differ from those of the others."""


class PackageError(VcasgdError):
    """The working directory can't be packaged, is too large, or arrived damaged."""


class UserCodeError(VcasgdError):
    """The user's code raised an exception; ``traceback`` is the text to show to the user."""

    @property
    def traceback(self) -> str:
        return str(self.details.get("traceback", ""))


class TaskImportError(UserCodeError):
    """The task can't be imported or constructed."""


class LoopEnded(VcasgdError):
    """A loop of the user's code decided to end the training."""


class NonFiniteLoss(UserCodeError):
    """The loss was NaN or infinite."""


class DataError(UserCodeError):
    """The index or a shard of a sharded data set is missing, damaged, or has another format."""


class RankLost(VcasgdError):
    """A process of a worker with several was lost, and its interval with it."""


class SetupFailed(UserCodeError):
    """The job's packages can't be installed, or a setup command failed; shows the last output."""


class StoreError(VcasgdError):
    """A Redis server failed or rejected a command."""


class StoreUnavailable(StoreError):
    """No connection, or no answer in time; a retry may help."""


class StoreUnsupported(StoreError):
    """The server is too old, or configured so that data could be lost."""


class StoreDenied(StoreError):
    """Wrong password, or no permission for a command or key."""


class StoreFull(StoreError):
    """The server is at its memory limit."""


class JobUnreadable(StoreError):
    """The stored data of a job is not valid, for example because a worker wrote it."""


class Fenced(StoreError):
    """A process with a newer token has taken over; the caller must stop."""


class SnapshotMissing(StoreError):
    """The job has no snapshot in the tensors server: not yet, or the server restarted empty."""


class InvalidUpdate(VcasgdError):
    """An update failed a check; ``reason`` is the short name under which it is counted."""

    @property
    def reason(self) -> str:
        return str(self.details.get("reason", "invalid"))


class CheckpointDamaged(VcasgdError):
    """A digest of a checkpoint does not match, or a part of it is missing."""


class StorageUnavailable(VcasgdError):
    """Object storage can't be reached, or is full."""


class FleetError(VcasgdError):
    """A provider could not complete a request. ``code``: the cloud's; None if unknown."""

    #: True if the same call may succeed later without any change.
    retryable: ClassVar[bool] = False

    @property
    def code(self) -> str | None:
        value = self.details.get("code")
        return None if value is None else str(value)


class NoCapacity(FleetError):
    """The pool has no machine available; another zone, type, or time may. Retryable."""

    retryable = True


class QuotaExceeded(FleetError):
    """The account's quota for this kind of machine is used up. Not retryable.

    It lasts until a machine ends or a person requests a larger quota.
    """


class CloudDenied(FleetError):
    """Credentials or a permission are missing or wrong. Not retryable."""


class Throttled(FleetError):
    """Too many calls in a short time. Retryable at a lower rate."""

    retryable = True


class InvalidRequest(FleetError):
    """The cloud always rejects the request: the pool's settings are wrong. Not retryable."""


class CloudUnavailable(FleetError):
    """The cloud does not answer, or reports an internal error. Retryable with the same token.

    The request may have been completed.
    """

    retryable = True


class ClusterError(VcasgdError):
    """Ray can't be reached or rejected a request."""


class StackError(VcasgdError):
    """The embedded stack could not start or stop."""


class PortInUse(StackError):
    """Another process listens on a configured port."""


class ApiError(VcasgdError):
    """The API rejected a request; ``status`` is the HTTP status, 0 without a response."""

    default_status = 0

    @property
    def status(self) -> int:
        return int(self.details.get("status", self.default_status))


class Overloaded(ApiError):
    """The API has too many requests or streams in progress; a retry may help."""

    default_status = 503


class Unauthorized(ApiError):
    """The token is missing, wrong, revoked, or expired."""

    default_status = 401


class Forbidden(ApiError):
    """The token's scope or limit is not sufficient, or another site sent the request."""

    default_status = 403


class NotFound(ApiError):
    """No such job, worker, checkpoint, or package."""

    default_status = 404


class Conflict(ApiError):
    """Not possible in the current state."""

    default_status = 409


class VersionDiffers(Conflict):
    """The stack has another version of vcasgd, ``version``, than this machine."""

    @property
    def version(self) -> str:
        return str(self.details.get("version", ""))


class Cause(StrEnum):
    """The cause that is to blame for an error."""

    MACHINE = "machine"
    WORK = "work"
    JOB = "job"
    STORE = "store"
    SUPERSEDED = "superseded"


_FAULTS: dict[type[BaseException], Cause] = {
    MachineDiffers: Cause.MACHINE,
    SettingError: Cause.MACHINE,
    OSError: Cause.MACHINE,
    SpecError: Cause.JOB,
    JobUnreadable: Cause.JOB,
    StoreError: Cause.STORE,
    StorageUnavailable: Cause.STORE,
    NotFound: Cause.STORE,
    RankLost: Cause.STORE,
    Fenced: Cause.SUPERSEDED,
}


def fault_of(error: BaseException) -> Cause:
    """Return what is to blame for an error, by the closest of its classes."""
    return next((_FAULTS[each] for each in type(error).__mro__ if each in _FAULTS), Cause.WORK)
