"""Errors cross process boundaries unchanged, and each has one cause to blame."""

from __future__ import annotations

import copy
import pickle

import pytest

from vcasgd import errors
from vcasgd.errors import Cause, SpecError, VcasgdError, fault_of


def family(kind: type[VcasgdError]) -> list[type[VcasgdError]]:
    return [kind, *(child for sub in kind.__subclasses__() for child in family(sub))]


KINDS = [kind for kind in family(VcasgdError) if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling(kind: type[VcasgdError]) -> None:
    error = kind("the disk is full", remedy="empty it", field="disk", size=3, traceback="line 1")

    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert (again.message, again.remedy) == ("the disk is full", "empty it")
        assert again.details == {"field": "disk", "size": 3, "traceback": "line 1"}
        assert str(again) == "the disk is full (empty it)"


def test_without_a_remedy_only_the_message_is_shown() -> None:
    assert str(SpecError("epochs: is required")) == "epochs: is required"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (FileNotFoundError("no"), Cause.MACHINE),
        (errors.MachineDiffers("no"), Cause.MACHINE),
        # a kind of SpecError
        (errors.SettingError("no"), Cause.MACHINE),
        (SpecError("no"), Cause.JOB),
        (errors.NonFiniteLoss("no"), Cause.WORK),
        (ValueError("no"), Cause.WORK),
        (errors.StoreFull("no"), Cause.STORE),
        (errors.SnapshotMissing("no"), Cause.STORE),
        # a kind of StoreError
        (errors.Fenced("no"), Cause.SUPERSEDED),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_closest_class_of_an_error_decides_whose_fault_it_is(
    error: Exception, cause: Cause
) -> None:
    assert fault_of(error) is cause
