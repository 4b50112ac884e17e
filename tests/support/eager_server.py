"""A parameter server that has many more updates of volunteers repeated than usual."""

from __future__ import annotations

from vcasgd.parameter_server.main import main
from vcasgd.verification import repetitions


def run() -> int:
    repetitions.ONE_IN = 3
    repetitions.RESULT_SECONDS = 5.0
    return main()
