"""Metadata server that answers as those of AWS and of Google Cloud do.

AWS: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
GCP: https://cloud.google.com/compute/docs/metadata/querying-metadata
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from http import HTTPStatus
from urllib.parse import parse_qs, urlsplit

from support.http_servers import LocalServer, QuietHandler

#: Longest time to live of a session token, as in AWS.
TOKEN_TTL_LIMIT_SECONDS = 21_600
#: Longest time that a request with ``wait_for_change`` blocks.
WAIT_LIMIT_SECONDS = 300


class Metadata:
    """Content of the server. Thread-safe."""

    def __init__(self, machine_id: str, clock: Callable[[], float] = time.time) -> None:
        self.machine_id = machine_id
        self._clock = clock
        self._changed = threading.Condition()
        self._noticed_at: float | None = None
        self._gone_at: float | None = None
        self._advised_at: float | None = None
        self._tokens: dict[str, float] = {}
        #: Other answers, by path.
        self.overrides: dict[str, tuple[HTTPStatus, str]] = {}

    def notify(self, gone_at: float) -> None:
        """Announce that the machine goes at ``gone_at`` (Unix seconds), unless it is announced."""
        with self._changed:
            if self._gone_at is None:
                self._noticed_at, self._gone_at = self._clock(), gone_at
                self._changed.notify_all()

    def recommend_rebalance(self) -> None:
        """Publish a rebalance recommendation; the machine may stay for long."""
        with self._changed:
            self._advised_at = self._advised_at or self._clock()

    def issue_token(self, ttl_seconds: int) -> str:
        token = secrets.token_urlsafe(32)
        with self._changed:
            now = self._clock()
            self._tokens = {old: end for old, end in self._tokens.items() if end > now}
            self._tokens[token] = now + ttl_seconds
        return token

    def accepts(self, token: str | None) -> bool:
        with self._changed:
            return token is not None and self._tokens.get(token, 0.0) > self._clock()

    def spot_action(self) -> dict[str, str] | None:
        """Return the action, or None without a notice."""
        if self._gone_at is None:
            return None
        return {"action": "terminate", "time": _zulu(self._gone_at)}

    def rebalance(self) -> dict[str, str] | None:
        """Return the recommendation, or None without a notice and without advice."""
        published_at = self._advised_at or self._noticed_at
        return None if published_at is None else {"noticeTime": _zulu(published_at)}

    def preempted(self) -> tuple[str, str]:
        """Return value and entity tag."""
        preempted = self._gone_at is not None
        return ("TRUE" if preempted else "FALSE"), f"{1 + preempted:016x}"

    def wait_preempted(self, last_etag: str | None, timeout_seconds: float) -> tuple[str, str]:
        """Return once the tag differs from ``last_etag``, or after the timeout."""
        known = last_etag or self.preempted()[1]
        with self._changed:
            self._changed.wait_for(lambda: self.preempted()[1] != known, timeout_seconds)
        return self.preempted()


class MetadataServer(LocalServer):
    """Server of a machine's metadata, by default on a free port."""

    def __init__(self, metadata: Metadata, port: int = 0) -> None:
        super().__init__(_Handler, port)
        self.metadata = metadata


class _Refused(Exception):
    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status)
        self.status = status


class _Handler(QuietHandler):
    server: MetadataServer
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        self._route({"/latest/api/token": self._token})

    def do_GET(self) -> None:
        metadata = self.server.metadata
        aws, gcp = "/latest/meta-data", "/computeMetadata/v1/instance"
        rebalance = f"{aws}/events/recommendations/rebalance"
        self._route(
            {
                f"{aws}/instance-id": lambda: self._aws(metadata.machine_id),
                f"{aws}/spot/instance-action": lambda: self._aws(metadata.spot_action()),
                rebalance: lambda: self._aws(metadata.rebalance()),
                f"{gcp}/id": lambda: self._gcp(lambda: (metadata.machine_id, "0" * 16)),
                f"{gcp}/name": lambda: self._gcp(lambda: (metadata.machine_id, "0" * 16)),
                f"{gcp}/preempted": lambda: self._gcp(self._preempted),
            }
        )

    def _route(self, routes: dict[str, Callable[[], None]]) -> None:
        try:
            path = urlsplit(self.path).path
            if path in self.server.metadata.overrides:
                self.answer(*self.server.metadata.overrides[path])
                return
            route = routes.get(path)
            if route is None:
                raise _Refused(HTTPStatus.NOT_FOUND)
            route()
        except _Refused as refusal:
            self.answer(refusal.status)

    def _token(self) -> None:
        ttl = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        if not ttl.isdecimal() or not 1 <= int(ttl) <= TOKEN_TTL_LIMIT_SECONDS:
            raise _Refused(HTTPStatus.BAD_REQUEST)
        self.answer(HTTPStatus.OK, self.server.metadata.issue_token(int(ttl)))

    def _aws(self, value: str | dict[str, str] | None) -> None:
        if not self.server.metadata.accepts(self.headers.get("X-aws-ec2-metadata-token")):
            raise _Refused(HTTPStatus.UNAUTHORIZED)
        if value is None:
            raise _Refused(HTTPStatus.NOT_FOUND)
        self.answer(HTTPStatus.OK, value if isinstance(value, str) else json.dumps(value))

    def _gcp(self, read: Callable[[], tuple[str, str]]) -> None:
        if self.headers.get("Metadata-Flavor") != "Google":
            raise _Refused(HTTPStatus.FORBIDDEN)
        value, etag = read()
        self.answer(HTTPStatus.OK, value, ETag=etag, Metadata_Flavor="Google")

    def _preempted(self) -> tuple[str, str]:
        query = {name: values[-1] for name, values in parse_qs(urlsplit(self.path).query).items()}
        if query.get("wait_for_change") != "true":
            return self.server.metadata.preempted()
        timeout = query.get("timeout_sec", str(WAIT_LIMIT_SECONDS))
        if not timeout.isdecimal():
            raise _Refused(HTTPStatus.BAD_REQUEST)
        return self.server.metadata.wait_preempted(
            query.get("last_etag"), min(int(timeout), WAIT_LIMIT_SECONDS)
        )


def _zulu(unix_seconds: float) -> str:
    """Format a time as AWS does, in whole seconds, rounded down."""
    return datetime.fromtimestamp(int(unix_seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
