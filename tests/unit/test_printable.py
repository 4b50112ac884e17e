"""Text that workers chose: it controls no terminal, forges no log line, and hides nothing."""

from __future__ import annotations

import io

import pytest
from rich.table import Table

from vcasgd.cli.output import PlainConsole
from vcasgd.printable import REPLACEMENT, printable

CLIPBOARD = "\x1b]52;c;Y3VybCBldmlsIHwgc2g=\x07"
TITLE = "\x1b]0;root@prod\x1b\\"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("épée 日本 👩‍🔬 naïve\tx\ny", "épée 日本 👩‍🔬 naïve\tx\ny"),
        ("\x1b[31mred\x1b[0m", "red"),
        (f"a{CLIPBOARD}b{TITLE}c", "abc"),
        ("\x9b2Jx\x9d0;t\x9cy", "xy"),
        ("\x1bPq#0\x1b\\x", "x"),
        ("\x1bc", f"{REPLACEMENT}c"),
        ("unfinished \x1b]52;c;", f"unfinished {REPLACEMENT}]52;c;"),
        ("over\rwritten\x08\x7f", f"over{REPLACEMENT}written{REPLACEMENT}{REPLACEMENT}"),
        ("line\r\nend", "line\nend"),
        ("user\u202etxt.exe", f"user{REPLACEMENT}txt.exe"),
        ("\ud800", REPLACEMENT),
        ("a\u2028b", f"a{REPLACEMENT}b"),
    ],
)
def test_only_printable_text_remains(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown
    shown.encode()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_console_prints_cells_and_lines_as_data(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    output = io.StringIO()
    console = PlainConsole(file=output, width=200)
    table = Table("DOING")
    table.add_row(f"[/b] [link=file:///]x :bomb: {CLIPBOARD}")

    console.print(table)
    console.print(f"[red]{TITLE}\x1b[2Jdone")

    printed = output.getvalue()
    assert "[/b] [link=file:///]x :bomb:" in printed
    assert "[red]done" in printed
    for sequence in ("\x1b]", "\x1b[2J", "\x07"):
        assert sequence not in printed
