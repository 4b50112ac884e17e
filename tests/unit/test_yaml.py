from __future__ import annotations

import pytest
import yaml

from vcasgd.spec import yaml as yamltext


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: a\nepochs: 2\nname: b", "name is there twice, first in line 1"),
        ("stop: {epochs: 1, epochs: 2}", "epochs is there twice"),
        ("- {x: 1}\n- x: 1\n  'x': 2", "x is there twice, first in line 2"),
    ],
)
def test_a_key_that_is_there_twice_is_an_error_with_its_line(text: str, said: str) -> None:
    with pytest.raises(yaml.YAMLError, match=said) as caught:
        yamltext.parse(text)

    assert caught.value.problem_mark.line == text.count("\n")


def test_what_a_merge_brings_may_be_said_again() -> None:
    text = """
        deep: {base: &base {<<: &first {a: 1, b: 1}, b: 2}}
        more: {<<: *base, <<: *first, a: 3}
        again: *base
    """

    assert yamltext.parse(text) == {
        "deep": {"base": {"a": 1, "b": 2}},
        "more": {"a": 3, "b": 1},
        "again": {"a": 1, "b": 2},
    }


def test_no_python_objects_are_made() -> None:
    with pytest.raises(yaml.YAMLError):
        yamltext.parse("!!python/object/apply:os.getcwd []")
