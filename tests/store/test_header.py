"""Headers of updates: nothing that arrives is trusted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vcasgd.errors import InvalidUpdate
from vcasgd.limits import MAX_HEADER_BYTES
from vcasgd.store.tensors.header import Header

VALID: dict[str, Any] = {
    "format": 1, "update": "u1", "worker": "w", "subtask": 0, "start": 0, "stop": 1, "base": 0,
    "token": 1, "codec": "float32", "size": 4, "checksum": 0, "layout": "x",
}  # fmt: skip

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


def parsed(text: bytes) -> Header | None:
    try:
        return Header.parse(text)
    except InvalidUpdate as error:
        return None if error.reason == "header" else pytest.fail(f"reason {error.reason}")


def test_a_valid_one() -> None:
    header = Header.parse(json.dumps(VALID).encode())

    assert header.update == "u1"
    assert Header.parse(header.model_dump_json().encode()) == header


@given(st.binary(max_size=300))
@example(b"")
@example(b"null")
@example(b"[" * 100_000)
@example(b'{"a":' * 10_000)
@example(b"\xff\xfe")
@example(b'{"subtask": ' + b"9" * 5000 + b"}")
def test_garbage_is_invalid_and_nothing_else(text: bytes) -> None:
    assert parsed(text) is None


@given(st.sampled_from(sorted(VALID)), anything)
def test_a_wrong_field_never_gets_through(field: str, value: Any) -> None:
    header = parsed(json.dumps({**VALID, field: value}).encode())

    if header is not None:
        assert type(getattr(header, field)) is type(VALID[field])
        assert getattr(header, field) == value


def test_every_field_is_needed() -> None:
    for field in VALID.keys() - {"format"}:
        value = {key: each for key, each in VALID.items() if key != field}
        assert parsed(json.dumps(value).encode()) is None, field


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("format", [2]),
        # Others would name a key of something else
        ("update", ["", "a:b", "a}b", "a\n", "ü", "x" * 151]),
        ("worker", ["a b"]),
        ("subtask", [-1, 2**53, 1.0, "1", True]),
        ("stop", [None]),
        ("loss_sum", ["NaN", 1e300, -1e300]),
        (
            "logged",
            [
                [["a", 1e300, 1]],
                [["a", "1", 1]],
                [["a", 1.0, 0]],
                [["a", 1.0, 1.5]],
                [["a", 1.0, 10**10]],
                [["", 1.0, 1]],
                [["a\n", 1.0, 1]],
                [["a" * 65, 1.0, 1]],
                [["ü", 1.0, 1]],
                [["a", 1.0]],
                [["a", 1.0, 1, 1]],
                [["a", None, 1]],
                {"a": 1.0},
                [["a", 1.0, 1], ["a", 2.0, 1]],
                [[f"a{n}", 1.0, 1] for n in range(65)],
            ],
        ),
    ],
)
def test_out_of_bounds(field: str, values: list[Any]) -> None:
    for value in values:
        assert parsed(json.dumps({**VALID, field: value}).encode()) is None, value


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_loss_that_is_no_number(number: str) -> None:
    text = json.dumps({**VALID, "loss_sum": 0.5}).replace("0.5", number)

    assert parsed(text.encode()) is None


def test_a_long_one_is_not_even_parsed() -> None:
    text = json.dumps(VALID).encode() + b" " * MAX_HEADER_BYTES

    with pytest.raises(InvalidUpdate, match="too long"):
        Header.parse(text)
