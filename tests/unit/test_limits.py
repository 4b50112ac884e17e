"""The table of limits in the documentation and the constants are the same limits."""

from __future__ import annotations

import re
from pathlib import Path

from vcasgd import limits

ROWS = [
    row.strip("|").split(" | ")
    for row in (Path(__file__).parents[2] / "docs/security.md")
    .read_text()
    .partition("\n## Limits\n")[2]
    .partition("\n## ")[0]
    .splitlines()
    if row.startswith("|")
][2:]
CONSTANTS = {name for name in vars(limits) if name.isupper()}


def test_each_limit_has_a_row_that_names_it_and_a_test() -> None:
    named = {name for row in ROWS for name in re.findall(r"`([A-Z_]+)`", row[1])}

    assert named == CONSTANTS
    # tests/unit/test_documented_tests.py checks that they exist.
    assert [row[0] for row in ROWS if "::test_" not in row[3]] == []
