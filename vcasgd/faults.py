"""Whose fault an error is, and what follows from that: one classification for all processes.

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
           StorageUnavailable
superseded Fenced                     drop the work: another process has it
========== ========================== ============================================================

An error that stops one machine is its own fault once another machine has done the same: then
:class:`~vcasgd.errors.MachineDiffers` replaces the :class:`~vcasgd.errors.SpecError`
(``worker/setup.py``).
"""

from __future__ import annotations

from enum import StrEnum

from vcasgd.errors import (
    Fenced,
    JobUnreadable,
    MachineDiffers,
    NotFound,
    SettingError,
    SpecError,
    StorageUnavailable,
    StoreError,
)


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
    Fenced: Cause.SUPERSEDED,
}


def fault_of(error: BaseException) -> Cause:
    """Return what is to blame for an error, by the closest of its classes."""
    return next((_FAULTS[each] for each in type(error).__mro__ if each in _FAULTS), Cause.WORK)
