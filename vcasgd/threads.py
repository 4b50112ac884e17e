"""Threads without which their process is useless, and calls beside a loop."""

from __future__ import annotations

import logging
import os
import threading
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import copy_context
from typing import Any, Generic, ParamSpec, TypeVar

log = logging.getLogger(__name__)

#: Exit status after the death of an essential thread (EX_SOFTWARE of sysexits.h).
THREAD_DIED = 70

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class EssentialThread(threading.Thread):
    """Thread whose unexpected error ends the process, so that its supervisor starts it again.

    Otherwise the other threads would keep up appearances, such as a leadership.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)

    @abstractmethod
    def work(self) -> None:
        """Do the thread's work. It returns only if the process asked it to stop."""

    def run(self) -> None:
        """Work, and end the process after any error."""
        try:
            self.work()
        except BaseException:
            log.critical("the thread %s died; the process ends", self.name, exc_info=True)
            logging.shutdown()
            os._exit(THREAD_DIED)


class DaemonThreads(Executor):
    """At most ``max_calls`` at a time, none of which keeps the process from ending."""

    def __init__(self, max_calls: int, name: str) -> None:
        self._slots = threading.BoundedSemaphore(max_calls)
        self._name = name

    def submit(
        self, fn: Callable[Arguments, Any], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Any]:
        """See :meth:`concurrent.futures.Executor.submit`."""
        future: Future[Any] = Future()

        def run() -> None:
            with self._slots:
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:  # noqa: BLE001 - raised by Future.result()
                    future.set_exception(error)

        threading.Thread(target=run, name=self._name, daemon=True).start()
        return future


class Background(Generic[Result]):
    """A call beside a loop, which a slow or frozen other side must not delay.

    At most one is in progress, and the loop takes its result when it is there. Without an
    ``executor``, calls run at once.
    """

    def __init__(self, executor: Executor | None) -> None:
        self._executor = executor
        self._call: Future[Result] | None = None

    @property
    def busy(self) -> bool:
        """True from the start of a call until its result is taken."""
        return self._call is not None

    @property
    def running(self) -> bool:
        """True until there is a result to take."""
        return self._call is not None and not self._call.done()

    def start(self, call: Callable[[], Result]) -> None:
        """Start a call; the result of the previous one must be taken."""
        assert self._call is None, "the result before was not taken"
        if self._executor is not None:
            self._call = self._executor.submit(copy_context().run, call)
            return
        self._call = Future()
        try:
            self._call.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised by take()
            self._call.set_exception(error)

    def take(self) -> Result | None:
        """Return the result of the last call, once; None if there is none yet.

        Raises the call's error, once.
        """
        if self._call is None or not self._call.done():
            return None
        call, self._call = self._call, None
        return call.result()
