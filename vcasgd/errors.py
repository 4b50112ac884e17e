"""Every error that vcasgd raises on purpose.

::

    VcasgdError
    ├── SpecError               a job file, a setting or a request is wrong; names the field
    ├── PackageError            the working directory can't be packed, is too large or damaged
    ├── UserCodeError           the user's task raised; carries the traceback as text
    │   ├── TaskImportError     the task can't be imported or constructed
    │   ├── NonFiniteLoss       the loss was NaN or infinite
    │   └── DataError           a sharded data set's index or one of its shards can't be used
    ├── StoreError
    │   ├── StoreUnavailable    no connection, or no answer in time; trying again may help
    │   ├── StoreUnsupported    the server is too old, or set up so that data would be lost
    │   ├── StoreDenied         wrong password or missing permission
    │   ├── StoreFull           the server is at its memory limit
    │   ├── JobUnreadable       what is stored of a job makes no sense
    │   ├── Fenced              somebody with a newer token has taken over
    │   └── SnapshotMissing     the job has no snapshot in the tensors server
    ├── InvalidUpdate           an update failed a check; carries the reason that is counted
    ├── CheckpointError
    │   ├── CheckpointDamaged   a digest does not match
    │   └── StorageUnavailable  object storage can't be reached, or is full
    ├── FleetError
    │   ├── NoCapacity          the pool has no machine to give at the moment
    │   ├── QuotaExceeded       the account may not have more machines of this kind
    │   ├── CloudDenied         credentials are missing or wrong, or a permission is
    │   ├── Throttled           too many calls in a short time
    │   ├── InvalidRequest      the cloud will never accept this: the pool's settings are wrong
    │   └── CloudUnavailable    the cloud does not answer, or says that it is at fault
    ├── ClusterError            Ray can't be reached or refused a request
    ├── StackError              the embedded stack could not start or stop
    │   └── PortInUse           another process listens on a port that we were told to use
    └── ApiError                the API refused a request
        ├── Unauthorized        token missing or wrong
        ├── Forbidden           a page of somebody else's asks in our user's name
        ├── NotFound            no such job, worker or checkpoint
        └── Conflict            not possible in the present state

All of them survive pickling whole, so they cross process borders as they are.
"""

from __future__ import annotations

from typing import Any, ClassVar


class VcasgdError(Exception):
    """Root of the tree.

    ``message`` says what is wrong; ``remedy``, if any, says what to do about it.
    Other keyword arguments are kept in ``details``, also when the error is pickled.
    """

    def __init__(self, message: str, *, remedy: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.details = details

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.remedy, self.details)


def _rebuild(
    kind: type[VcasgdError], message: str, remedy: str | None, details: dict[str, Any]
) -> VcasgdError:
    return kind(message, remedy=remedy, **details)


class SpecError(VcasgdError):
    """A job file, a setting or a request is wrong. ``field`` names where, e.g. ``update.alpha``."""

    @property
    def field(self) -> str | None:
        value = self.details.get("field")
        return None if value is None else str(value)


class PackageError(VcasgdError):
    """The working directory can't be packed, is too large, or arrived damaged."""


class UserCodeError(VcasgdError):
    """The user's task raised. ``traceback`` is the text to show to the user."""

    @property
    def traceback(self) -> str:
        return str(self.details.get("traceback", ""))


class TaskImportError(UserCodeError):
    """The task can't be imported or constructed."""


class NonFiniteLoss(UserCodeError):
    """The loss was NaN or infinite."""


class DataError(UserCodeError):
    """A sharded data set's index, or one of its shards, is missing, damaged or of another form."""


class StoreError(VcasgdError):
    """Something is wrong with a Redis server."""


class StoreUnavailable(StoreError):
    """No connection, or no answer in time; trying again may help."""


class StoreUnsupported(StoreError):
    """The server is too old, or set up so that data would be lost."""


class StoreDenied(StoreError):
    """Wrong password, or a command or key that this user may not touch."""


class StoreFull(StoreError):
    """The server is at its memory limit."""


class JobUnreadable(StoreError):
    """What is stored of a job makes no sense, for example because a worker wrote it."""


class Fenced(StoreError):
    """Somebody with a newer token has taken over; the caller must stop."""


class SnapshotMissing(StoreError):
    """The job has no snapshot in the tensors server: not yet, or the server came back empty."""


class InvalidUpdate(VcasgdError):
    """An update failed a check. ``reason`` is the short name under which it is counted."""

    @property
    def reason(self) -> str:
        return str(self.details.get("reason", "invalid"))


class CheckpointError(VcasgdError):
    """A checkpoint can't be written or read."""


class CheckpointDamaged(CheckpointError):
    """A digest does not match, or a part is missing."""


class StorageUnavailable(CheckpointError):
    """Object storage can't be reached, or is full."""


class FleetError(VcasgdError):
    """A provider could not do what it was asked.

    ``pool`` and ``zone`` say where, ``code`` how the cloud calls it; ``None`` where unknown.
    """

    #: whether the same call may succeed later although nobody has changed anything
    retryable: ClassVar[bool] = False

    @property
    def pool(self) -> str | None:
        return self._detail("pool")

    @property
    def zone(self) -> str | None:
        return self._detail("zone")

    @property
    def code(self) -> str | None:
        return self._detail("code")

    def _detail(self, name: str) -> str | None:
        value = self.details.get(name)
        return None if value is None else str(value)


class NoCapacity(FleetError):
    """The pool has no machine to give at the moment; another zone, type or hour may. Retryable."""

    retryable = True


class QuotaExceeded(FleetError):
    """The account may not have more machines of this kind, until one ends or a person asks the
    cloud for more. Not retryable."""


class CloudDenied(FleetError):
    """Credentials are missing or wrong, or a permission is. Not retryable."""


class Throttled(FleetError):
    """Too many calls in a short time. Retryable, more slowly."""

    retryable = True


class InvalidRequest(FleetError):
    """The cloud will never accept this: the pool's settings are wrong. Not retryable."""


class CloudUnavailable(FleetError):
    """The cloud does not answer, or says that it is at fault. What was asked for may have
    happened. Retryable, with the same token."""

    retryable = True


class ClusterError(VcasgdError):
    """Ray can't be reached or refused a request."""


class StackError(VcasgdError):
    """The embedded stack could not start or stop."""


class PortInUse(StackError):
    """Another process listens on a port that we were told to use."""


class ApiError(VcasgdError):
    """The API refused a request. ``status`` is the HTTP status, ``problem`` the whole document."""

    @property
    def status(self) -> int:
        return int(self.details.get("status", 0))


class Unauthorized(ApiError):
    """The token is missing or wrong."""


class Forbidden(ApiError):
    """The request carries a session, and not the signs that our own page made it."""


class NotFound(ApiError):
    """No such job, worker, checkpoint or package."""


class Conflict(ApiError):
    """Not possible in the present state."""
