"""Reads of processes that may end at any moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

import psutil

T = TypeVar("T")


def read_each(processes: Iterable[psutil.Process], read: Callable[[psutil.Process], T]) -> list[T]:
    """Return what `read` returns for each process, without those that have ended."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            found.append(read(process))
    return found
