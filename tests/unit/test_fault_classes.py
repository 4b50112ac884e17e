"""Every error has one cause to blame, in the table of ``vcasgd/faults.py``."""

from __future__ import annotations

import pytest

from vcasgd import errors
from vcasgd.errors import VcasgdError
from vcasgd.faults import Cause, fault_of

FAULTS: dict[type[BaseException], Cause] = {
    errors.MachineDiffers: Cause.MACHINE,
    errors.SettingError: Cause.MACHINE,
    FileNotFoundError: Cause.MACHINE,
    errors.SpecError: Cause.JOB,
    errors.JobUnreadable: Cause.JOB,
    errors.UserCodeError: Cause.WORK,
    errors.TaskImportError: Cause.WORK,
    errors.NonFiniteLoss: Cause.WORK,
    errors.DataError: Cause.WORK,
    errors.SetupFailed: Cause.WORK,
    errors.PackageError: Cause.WORK,
    errors.CheckpointDamaged: Cause.WORK,
    errors.InvalidUpdate: Cause.WORK,
    MemoryError: Cause.WORK,
    RecursionError: Cause.WORK,
    ValueError: Cause.WORK,
    errors.StoreUnavailable: Cause.STORE,
    errors.StoreDenied: Cause.STORE,
    errors.StoreFull: Cause.STORE,
    errors.StoreUnsupported: Cause.STORE,
    errors.SnapshotMissing: Cause.STORE,
    errors.StorageUnavailable: Cause.STORE,
    errors.NotFound: Cause.STORE,
    errors.Fenced: Cause.SUPERSEDED,
}


@pytest.mark.parametrize(("kind", "fault"), FAULTS.items(), ids=lambda each: str(each))
def test_an_error_is_the_fault_of(kind: type[BaseException], fault: Cause) -> None:
    assert fault_of(kind("no")) is fault


def test_no_error_of_a_worker_is_missing_here() -> None:
    elsewhere = (errors.FleetError, errors.ClusterError, errors.StackError, errors.ApiError)
    roots = {errors.VcasgdError, errors.StoreError, errors.CheckpointError}
    kinds = {
        each
        for each in vars(errors).values()
        if isinstance(each, type)
        and issubclass(each, VcasgdError)
        and not issubclass(each, elsewhere)
    }

    assert kinds - roots <= FAULTS.keys()
