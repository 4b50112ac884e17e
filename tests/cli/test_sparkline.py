"""Series as one line of text."""

from __future__ import annotations

from vcasgd.cli.sparkline import MOST_BARS, sparkline


def test_a_line_goes_from_the_lowest_to_the_highest() -> None:
    assert sparkline([]) == ""
    assert sparkline([0, 7]) == "▁█"
    assert sparkline(range(8)) == "▁▂▃▄▅▆▇█"
    assert sparkline([-1.0, 0.0, 1.0]) == "▁▅█"


def test_a_line_may_begin_elsewhere() -> None:
    assert sparkline([4, 8], lowest=0) == "▅█"
    assert sparkline([3, 3], lowest=0) == "██"


def test_what_does_not_change_is_flat() -> None:
    assert sparkline([2, 2, 2]) == "▁▁▁"
    assert sparkline([0, 0], lowest=0) == "▁▁"


def test_only_the_newest_are_shown() -> None:
    line = sparkline([*[100] * 50, *range(MOST_BARS)])

    assert (len(line), line[0], line[-1]) == (MOST_BARS, "▁", "█")
