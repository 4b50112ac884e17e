"""Makes text harmless to print: what a worker, a job, or a stack chose, and secret values.

Text of others is data. A terminal must not execute it, a log file must not show it as further
lines, and a page must not show it in another order than it was written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

#: What is shown in place of a character that isn't printed.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# ECMA-48: CSI sequences (colors, cursor), and strings for the terminal (titles, clipboard, links).
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
)
# Controls except tabs and newlines, those of the direction of text, and lone surrogates, which
# can't be encoded. Combining characters and joiners stay, because ordinary text has them.
_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069"
    r"\ud800-\udfff\ufff9-\ufffb]"
)


def printable(text: str) -> str:
    """Return text without escape sequences, and with other control characters replaced.

    Tabs and newlines stay. Idempotent.
    """
    if not _UNPRINTABLE.search(text):
        return text
    # A carriage return before a newline is the end of a line on other systems.
    plain = _SEQUENCE.sub("", text.replace("\r\n", "\n"))
    return _UNPRINTABLE.sub(REPLACEMENT, plain)


#: What is shown instead.
MASK = "***"
#: Characters of the shortest value that is replaced. Shorter ones would change ordinary text.
SHORTEST = 6

_values: tuple[str, ...] = ()


def hide(values: Iterable[str]) -> None:
    """Replace values, and each line of values with several lines, in all further output."""
    global _values
    parts = {part.strip() for value in values for part in (value, *value.splitlines())}
    known = {part for part in parts if len(part) >= SHORTEST}.union(_values)
    # A value may contain another one.
    _values = tuple(sorted(known, key=lambda value: (-len(value), value)))


def masked(text: str) -> str:
    """Return a text without hidden values."""
    for value in _values:
        text = text.replace(value, MASK)
    return text
