"""The webhook: posts the events of all jobs to a URL, each at least once and in order.

Its thread shares nothing with the loops, so a receiver that hangs delays only other events.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from vcasgd import __version__
from vcasgd.backoff import backoff, jittered
from vcasgd.errors import StoreError
from vcasgd.settings import Settings
from vcasgd.store import keys as names
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.events import EventCursor, EventFeed
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.threads import EssentialThread

log = logging.getLogger(__name__)

#: Seconds between two looks for new events, and for one request.
LOOK_SECONDS, REQUEST_SECONDS = 1.0, 10.0
#: Attempts for each event, and the first and the longest pause between two of them, in seconds.
ATTEMPTS, FIRST_PAUSE, LONGEST_PAUSE = 6, 1.0, 15.0
#: Age in seconds of events that are dropped, after a long outage of the receiver.
OLDEST_SECONDS = 3600
#: Events that are read at a time, and newest jobs whose last events can still be missing.
MOST_EVENTS, NEWEST_JOBS = 200, 100
#: Responses after which another attempt may succeed, besides those from 500.
_RETRIED = (408, 425, 429)


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """Return the signature of a body: HMAC-SHA256 of ``timestamp.body``, in hexadecimal digits."""
    return hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


class Webhook(EssentialThread):
    """Thread that posts events while this controller is the leader; idle without a URL.

    The position is in the ledger, so the next controller continues. The first one starts with
    events that are new then.
    """

    def __init__(self, settings: Settings, ledger: RedisClient, sure: Callable[[], bool]) -> None:
        super().__init__("webhook")
        url, secret = settings.webhook_url, settings.webhook_secret
        self._url = url.get_secret_value() if url else None
        self._secret = secret.get_secret_value() if secret else None
        self._kinds = frozenset(settings.webhook_events.split())
        self._cluster = settings.cluster
        self._ledger, self._sure = ledger, sure
        self._jobs, self._feed = Jobs(ledger), EventFeed(ledger)
        self._http = httpx.Client(timeout=REQUEST_SECONDS)
        self._stopped = threading.Event()

    def work(self) -> None:
        """Post new events until :meth:`stop`."""
        while self._url and not self._stopped.wait(LOOK_SECONDS):
            try:
                if self._sure():
                    self._post_new(self._url)
            except StoreError as error:
                log.warning("ledger: %s", error)
            except Exception:
                # A webhook must not end the controller.
                log.exception("webhook")
        self._http.close()

    def stop(self) -> None:
        """End :meth:`work` after the present attempt."""
        self._stopped.set()

    def _post_new(self, url: str) -> None:
        now = self._feed.now()
        cursor = self._cursor(now)
        jobs = {*self._jobs.active(), *self._jobs.newest(NEWEST_JOBS)}
        for at, event in self._feed.events(sorted(jobs), cursor, now, limit=MOST_EVENTS):
            if self._stopped.is_set() or not self._sure():
                return
            if not self._kinds or event["kind"] in self._kinds:
                self._post(url, str(at), event)
            self._ledger.set(names.WEBHOOK, str(at))

    def _cursor(self, now: int) -> EventCursor:
        stored = self._ledger.get(names.WEBHOOK)
        if stored is None:
            self._ledger.set(names.WEBHOOK, str(EventCursor(now)))
            return EventCursor(now)
        return max(EventCursor.parse(stored.decode()), EventCursor(now - OLDEST_SECONDS * 1000))

    def _post(self, url: str, name: str, event: Mapping[str, Any]) -> None:
        """Post an event until it is accepted, refused for good, or has failed too often."""
        body = json.dumps({"cluster": self._cluster, **event}).encode()
        for failures in range(ATTEMPTS):
            pause = jittered(backoff(failures, FIRST_PAUSE, LONGEST_PAUSE))
            if self._stopped.wait(pause):
                return
            problem, final = self._attempt(url, name, body)
            if problem is None:
                return
            if final:
                break
        log.warning("webhook: event %s is dropped: %s", name, problem)

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
