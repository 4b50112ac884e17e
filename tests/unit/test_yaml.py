"""YAML loader: duplicate keys, error messages, and plain data only."""

from __future__ import annotations

from pathlib import Path

import pytest

from vcasgd.errors import SpecError
from vcasgd.spec.yaml import load_mapping, parse


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name: a\nepochs: 2\nname: b", "duplicate key name, first in line 1"),
        ("stop: {epochs: 1, epochs: 2}", "duplicate key epochs"),
        ("- {x: 1}\n- x: 1\n  'x': 2", "duplicate key x, first in line 2"),
    ],
)
def test_duplicate_key_is_rejected_with_its_line(text: str, problem: str) -> None:
    line = text.count("\n") + 1

    with pytest.raises(SpecError, match=rf"is not YAML: {problem}.*\(line {line}\)") as caught:
        parse(text)

    assert caught.value.details["line"] == line


def test_merged_keys_may_be_overridden() -> None:
    text = """
        deep: {base: &base {<<: &first {a: 1, b: 1}, b: 2}}
        more: {<<: *base, <<: *first, a: 3}
        again: *base
    """

    assert parse(text) == {
        "deep": {"base": {"a": 1, "b": 2}},
        "more": {"a": 3, "b": 1},
        "again": {"a": 1, "b": 2},
    }


def test_python_objects_are_not_constructed() -> None:
    with pytest.raises(SpecError, match="is not YAML"):
        parse("!!python/object/apply:os.getcwd []")


@pytest.mark.parametrize("text", ["a: [", "a: 2026-99-99", "[" * 3000, "\x00", "a: !!x 1"])
def test_invalid_text_is_a_spec_error(text: str) -> None:
    with pytest.raises(SpecError, match="is not YAML"):
        parse(text)


class TestLoadMapping:
    def test_text_and_file_give_the_same(self, tmp_path: Path) -> None:
        file = tmp_path / "prices.yaml"
        file.write_text("a: {b: 1}")

        assert (
            load_mapping(file, "prices") == load_mapping("a: {b: 1}", "prices") == {"a": {"b": 1}}
        )

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"a: 1\nb: [", r"is not YAML: .* \(line 2\)"),
            (b"\xff\xfe\x00", "is not YAML: "),
            (b"- 1", r"does not contain pools \(write some\)"),
            (b"", "does not contain pools"),
            (None, "can't be read: No such file"),
        ],
    )
    def test_error_names_the_file_and_the_field(
        self, tmp_path: Path, content: bytes | None, message: str
    ) -> None:
        file = tmp_path / "pools.yaml"
        if content is not None:
            file.write_bytes(content)

        with pytest.raises(SpecError, match=message) as caught:
            load_mapping(file, "pools", field="VCASGD_POOLS", remedy="write some")

        assert caught.value.message.startswith(f"{file}: ")
        assert caught.value.field == "VCASGD_POOLS"
