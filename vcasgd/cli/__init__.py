"""Command-line interface: ``vcasgd``. A module has the commands of one subject."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command line."""
    try:
        # This takes a second, in which Ctrl-C would show a traceback.
        from vcasgd.cli.commands import app

        app(prog_name="vcasgd")
    except KeyboardInterrupt:
        # As a shell reports the end by this signal.
        sys.exit(128 + signal.SIGINT)
