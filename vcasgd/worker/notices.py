"""Watches for notices of eviction."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger(__name__)


class NoticeLike(Protocol):
    """A notice of eviction: its kind, ``terminate`` or ``rebalance``, and its time in Unix seconds
    if that is known."""

    @property
    def kind(self) -> str: ...

    @property
    def at(self) -> float | None: ...


class NoticePoll(Protocol):
    """Source of notices; see :mod:`vcasgd.fleet.notices`."""

    def poll(self) -> NoticeLike | None: ...


class NoticeWatch(threading.Thread):
    """Thread that polls a source every ``period`` seconds until the first notice to terminate.

    ``on_notice`` is called once for each new kind of notice.
    """

    def __init__(
        self, source: NoticePoll, period: float, on_notice: Callable[[NoticeLike], None]
    ) -> None:
        super().__init__(name="notices", daemon=True)
        self._source = source
        self._period = period
        self._on_notice = on_notice
        self._stopped = threading.Event()
        self._last_kind: str | None = None

    def run(self) -> None:
        while not self._stopped.is_set():
            try:
                if self._poll_once():
                    return
            except Exception:
                # A notice is only a hint; without one, leases cover the loss of the machine.
                log.exception("poll for a notice of eviction")
            self._stopped.wait(self._period)

    def stop(self) -> None:
        self._stopped.set()

    def _poll_once(self) -> bool:
        """Return True after a notice to terminate; no other follows it."""
        notice = self._source.poll()
        if notice is None or notice.kind == self._last_kind:
            return False
        self._last_kind = notice.kind
        self._on_notice(notice)
        return notice.kind == "terminate"
