"""The webhook: posts the events of all jobs to a URL, each at least once and in order.

Its thread shares nothing with the loops, so a receiver that hangs delays only other events.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from vcasgd import __version__
from vcasgd.backoff import backoff, jittered
from vcasgd.controller.leadership import LeaderThread
from vcasgd.settings import Settings
from vcasgd.store import keys as names
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.events import EventCursor, EventFeed
from vcasgd.store.ledger.jobs import Jobs

log = logging.getLogger(__name__)

#: Seconds between two looks for new events, and for one request.
LOOK_SECONDS, REQUEST_SECONDS = 1.0, 10.0
#: The first and the longest pause between two attempts for an event, in seconds.
FIRST_PAUSE, MAX_PAUSE = 1.0, 15.0
#: Age in seconds at which events are dropped: the history of jobs that ended is thinned then.
MAX_AGE_SECONDS = 3600.0
#: Events that are read at a time.
MAX_EVENTS = 200
#: Seconds after the end of a job in which its last events are written.
LAST_EVENTS_SECONDS = 3600.0
#: Responses after which another attempt may succeed, besides those from 500.
_RETRIED = (408, 425, 429)


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """Return the signature of a body: HMAC-SHA256 of ``timestamp.body``, in hexadecimal digits."""
    return hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class _Position:
    """The last event that was accepted, and how many were dropped since then."""

    cursor: EventCursor
    dropped: int = 0

    @classmethod
    def parse(cls, text: str) -> _Position:
        cursor, _, dropped = text.partition(" ")
        return cls(EventCursor.parse(cursor), int(dropped))

    def __str__(self) -> str:
        return f"{self.cursor} {self.dropped}"


class Webhook(LeaderThread):
    """Thread that posts events while this controller is the leader; idle without a URL.

    The position is in the ledger, and behind an event only once it was accepted, so the next
    controller continues. The first one starts with events that are new then.
    """

    def __init__(
        self,
        settings: Settings,
        ledger: RedisClient,
        leads: Callable[[], bool],
        max_age_seconds: float = MAX_AGE_SECONDS,
    ) -> None:
        super().__init__("webhook", leads, LOOK_SECONDS)
        self._max_age_ms = int(max_age_seconds * 1000)
        url, secret = settings.webhook_url, settings.webhook_secret
        self._url = url.get_secret_value() if url else None
        self._secret = secret.get_secret_value() if secret else None
        self._kinds = frozenset(settings.webhook_events.split())
        self._cluster = settings.cluster
        self._ledger = ledger
        self._jobs, self._feed = Jobs(ledger), EventFeed(ledger)
        self._http = httpx.Client(timeout=REQUEST_SECONDS)

    def work(self) -> None:
        """Post new events until :meth:`stop`."""
        with self._http:
            super().work()

    def look(self) -> None:
        """Post new events, if there is a URL."""
        if not self._url or not self._leads():
            return
        position = self._position()
        for at, event in self._events(position.cursor, self._feed.now()):
            if self._is_wanted(event):
                body = {"cluster": self._cluster, "dropped": position.dropped, **event}
                if not self._deliver(self._url, at, json.dumps(body).encode()):
                    return
                position = _Position(at)
            else:
                position = _Position(at, position.dropped)
            self._store(position)

    def _events(self, cursor: EventCursor, until: int) -> list[tuple[EventCursor, dict[str, Any]]]:
        jobs = self._jobs.active_since(cursor.ms / 1000 - LAST_EVENTS_SECONDS)
        return self._feed.events(sorted(jobs), cursor, until, limit=MAX_EVENTS)

    def _is_wanted(self, event: Mapping[str, Any]) -> bool:
        return not self._kinds or event["kind"] in self._kinds

    # -- the position --------------------------------------------------------------------------

    def _position(self) -> _Position:
        """Return the position, after counting the events behind it that are too old."""
        stored = self._ledger.get(names.WEBHOOK)
        now = self._feed.now()
        if stored is None:
            self._store(_Position(EventCursor(now)))
            return _Position(EventCursor(now))
        position = _Position.parse(stored.decode())
        oldest = now - self._max_age_ms
        while position.cursor.ms < oldest:
            late = self._events(position.cursor, oldest)
            dropped = position.dropped + sum(self._is_wanted(event) for _, event in late)
            position = _Position(late[-1][0] if late else EventCursor(oldest), dropped)
            if late:
                log.warning("webhook: %d events are dropped, as they are too old", dropped)
                self._store(position)
        return position

    def _store(self, position: _Position) -> None:
        self._ledger.set(names.WEBHOOK, str(position))

    # -- one event -----------------------------------------------------------------------------

    def _deliver(self, url: str, at: EventCursor, body: bytes) -> bool:
        """Post an event until it is accepted, or refused for good.

        Return False if this thread has to stop, is no longer the leader's, or the event is too old.
        """
        failures = 0
        while not self._stopped.wait(jittered(backoff(failures, FIRST_PAUSE, MAX_PAUSE))):
            if not self._leads() or at.ms < self._feed.now() - self._max_age_ms:
                return False
            problem, final = self._attempt(url, str(at), body)
            if problem is None:
                return True
            if final:
                log.warning("webhook: event %s is refused: %s", at, problem)
                return True
            failures += 1
            if failures == 1:
                log.warning("webhook: event %s is posted again until it arrives: %s", at, problem)
        return False

    def _attempt(self, url: str, name: str, body: bytes) -> tuple[str | None, bool]:
        """Return the problem, if any, and True if another attempt is useless."""
        timestamp = str(int(time.time()))
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"vcasgd/{__version__}",
            "Vcasgd-Delivery": name,
            "Vcasgd-Timestamp": timestamp,
        }
        if self._secret:
            headers["Vcasgd-Signature"] = f"sha256={signature(self._secret, timestamp, body)}"
        try:
            status = self._http.post(url, content=body, headers=headers).status_code
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            # Without its text, which can contain the URL.
            return type(error).__name__, False
        if status < 300:
            return None, True
        return f"status {status}", status < 500 and status not in _RETRIED
