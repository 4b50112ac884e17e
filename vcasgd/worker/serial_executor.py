"""A thread that makes calls one after the other, so that a slow server holds up nobody else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class SerialExecutor:
    """Unlike a pool of :mod:`concurrent.futures`, it never keeps the process from ending."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._make_calls, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Makes the call after all before it; the future has its result or its exception."""
        future: Future[T] = Future()

        def make() -> None:
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
                future.set_exception(error)

        self._calls.put(make)
        return future

    def close(self) -> None:
        """Ends the thread after what was submitted; does not wait for it."""
        self._calls.put(None)

    def _make_calls(self) -> None:
        while (make := self._calls.get()) is not None:
            make()
