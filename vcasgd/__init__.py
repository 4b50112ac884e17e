"""vcasgd: train PyTorch models on spot, preemptible, and volunteer machines.

The names in ``__all__`` are the public interface; everything else can change.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vcasgd.client import Client, load
    from vcasgd.session.session import Session
    from vcasgd.spec.job import JobSpec
    from vcasgd.task.logged import log
    from vcasgd.task.task import Task, base

__all__ = ["Client", "JobSpec", "Session", "Task", "__version__", "base", "load", "log"]

__version__ = "0.2.0"

_MODULES = {
    "Client": "vcasgd.client",
    "JobSpec": "vcasgd.spec.job",
    "Session": "vcasgd.session.session",
    "Task": "vcasgd.task.task",
    "base": "vcasgd.task.task",
    "load": "vcasgd.client",
    "log": "vcasgd.task.logged",
}


def __getattr__(name: str) -> Any:
    # lazy, because torch takes seconds to import and most processes don't need it
    if name in _MODULES:
        try:
            return getattr(importlib.import_module(_MODULES[name]), name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == "torch":
                error.msg = f"vcasgd.{name} needs torch: pip install 'vcasgd[worker]'"
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
