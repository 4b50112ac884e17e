"""Threads without which their process is useless."""

from __future__ import annotations

import logging
import os
import threading
from abc import abstractmethod

log = logging.getLogger(__name__)

#: Exit status after the death of an essential thread (EX_SOFTWARE of sysexits.h).
THREAD_DIED = 70


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
