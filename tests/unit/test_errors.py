"""The drawn tree matches the code, and errors cross process boundaries unchanged."""

from __future__ import annotations

import copy
import pickle
import re

import pytest

from vcasgd import errors
from vcasgd.errors import ApiError, InvalidUpdate, SpecError, UserCodeError, VcasgdError


def family(kind: type[VcasgdError]) -> list[type[VcasgdError]]:
    return [kind, *(child for sub in kind.__subclasses__() for child in family(sub))]


KINDS = [kind for kind in family(VcasgdError) if kind.__module__ == errors.__name__]


def drawn_tree() -> dict[str, str]:
    """Return each error in the drawing with its parent. A level is four columns wide."""
    assert errors.__doc__
    line = re.compile(r"^    ((?:[│├└─ ]{4})*)([A-Z]\w+)", re.MULTILINE)
    parents: list[str] = []
    tree = {}
    for indent, name in line.findall(errors.__doc__):
        depth = len(indent) // 4
        parents[depth:] = [name]
        tree[name] = parents[depth - 1] if depth else "Exception"
    return tree


def test_the_drawn_tree_matches_the_code() -> None:
    assert drawn_tree() == {kind.__name__: kind.__bases__[0].__name__ for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling(kind: type[VcasgdError]) -> None:
    error = kind("the disk is full", remedy="empty it", field="disk", size=3, traceback="line 1")

    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert (again.message, again.remedy) == ("the disk is full", "empty it")
        assert again.details == {"field": "disk", "size": 3, "traceback": "line 1"}
        assert str(again) == "the disk is full (empty it)"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_has_a_docstring(kind: type[VcasgdError]) -> None:
    assert kind.__doc__


def test_without_a_remedy_only_the_message_is_shown() -> None:
    assert str(SpecError("epochs: is required")) == "epochs: is required"


def test_details_have_names() -> None:
    assert SpecError("", field="epochs").field == "epochs"
    assert SpecError("").field is None
    assert UserCodeError("", traceback="line 1").traceback == "line 1"
    assert UserCodeError("").traceback == ""
    assert InvalidUpdate("", reason="length").reason == "length"
    assert InvalidUpdate("").reason == "invalid"
    assert ApiError("", status=404).status == 404
    assert ApiError("").status == 0
