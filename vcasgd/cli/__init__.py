"""Command-line interface: ``vcasgd``. A module has the commands of one subject."""

from __future__ import annotations

import sys

#: Exit status after Ctrl-C; a shell reports the same for SIGINT.
INTERRUPTED = 130


def main() -> None:
    """Run the command line."""
    try:
        # This takes a second, in which Ctrl-C would show a traceback.
        from vcasgd.cli.commands import app

        app(prog_name="vcasgd")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
