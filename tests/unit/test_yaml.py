"""YAML loader: duplicate keys, error messages, and plain data only."""

from __future__ import annotations

from pathlib import Path

import pytest

from vcasgd.errors import SpecError
from vcasgd.limits import MAX_DEPTH, MAX_DIGITS, MAX_VALUES
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

    with pytest.raises(SpecError, match=rf"is refused: {problem}.*\(line {line}\)") as caught:
        parse(text)

    assert caught.value.details["line"] == line


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("-1.5E+3", -1500.0), ("1e3", 1000.0), (".5e1", 5.0), ("2.e2", 200.0)],
)
def test_a_number_with_an_exponent_is_a_number(text: str, value: float) -> None:
    assert parse(f"args: {{lr: {text}}}") == {"args": {"lr": value}}


@pytest.mark.parametrize("text", ["e3", "1e", "1e3x", "v1e3", "'1e3'"])
def test_text_with_an_e_stays_text(text: str) -> None:
    assert parse(text) == text.strip("'")


BOMB = "m0: &m0 {a: 1}\n" + "".join(
    f"m{number}: &m{number} {{<<: [*m{number - 1}, *m{number - 1}]}}\n" for number in range(1, 40)
)
#: Each line has ten times as many values as its predecessor.
LISTS = "a0: &a0 [1]\n" + "".join(
    f"a{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 10)}]\n" for number in range(1, 30)
)


@pytest.mark.parametrize(
    ("text", "problem", "line"),
    [
        (BOMB, "anchors and aliases", 1),
        (LISTS, "anchors and aliases", 1),
        ("a: 1\nb: *x", "anchors and aliases", 2),
        ("a: 1\n<<: {b: 1}", "merge keys", 2),
        ("a:\n - !!binary aGk=", "the tag", 2),
        ("!!python/object/apply:os.getcwd []", "the tag", 1),
        ("a:\n " + "[" * (MAX_DEPTH + 1), "levels", 2),
        ("[" * 3000, "levels", 1),
        ("a: 1\nb: [" + "0," * MAX_VALUES + "]", "values", 2),
        ("epochs: 0x" + "f" * 6000, "a number", 1),
        ("epochs: " + "9" * (MAX_DIGITS + 1), "a number", 1),
        ("epochs: " + "1:" * MAX_DIGITS + "1", "a number", 1),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_costs_more_than_its_length_is_refused(text: str, problem: str, line: int) -> None:
    with pytest.raises(SpecError, match=rf"is refused: .*{problem}.*\(line {line}\)") as caught:
        parse(text)

    assert caught.value.details["line"] == line
    assert caught.value.remedy


def test_data_up_to_the_limits_is_read() -> None:
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    digits = "9" * MAX_DIGITS
    many = ["0"] * (MAX_VALUES - MAX_DEPTH - 10)
    text = f"deep: {deep}\nnumber: {digits}\ntext: '{digits}0'\nmany: [{','.join(many)}]"

    value = parse(text)

    assert value["number"] == int(digits)
    assert value["text"] == f"{digits}0"
    assert len(value["many"]) == len(many)


def test_a_long_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    file = tmp_path / "pools.yaml"
    with file.open("wb") as open_file:
        open_file.truncate(1 << 40)  # more than any memory

    with pytest.raises(SpecError, match="is longer than 1000 kB"):
        load_mapping(file, "pools")


@pytest.mark.parametrize("text", ["a: [", "a: 2026-99-99", "\x00"])
def test_invalid_text_is_a_spec_error(text: str) -> None:
    with pytest.raises(SpecError, match="is not YAML"):
        parse(text)


class TestLoadMapping:
    def test_text_and_file_give_the_same(self, tmp_path: Path) -> None:
        file = tmp_path / "prices.yaml"
        file.write_text("a: {b: 1}")

        for source in (file, "a: {b: 1}"):
            assert load_mapping(source, "prices") == {"a": {"b": 1}}

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
