"""Where notices of eviction come from, seen from the machine that is about to go.

A notice is a hint: none of these sources ever raises, and a metadata server that can't be
reached is no notice. Whatever is missed here is caught by the leases.

AWS: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
GCP: https://cloud.google.com/compute/docs/instances/spot#preemption-process
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.client import HTTPException
from typing import Any, Literal, Protocol

from vcasgd.errors import SpecError

AWS_URL = "http://169.254.169.254"
GCP_URL = "http://metadata.google.internal"
#: for one request; the server is on the same host, so it answers in milliseconds or not at all
TIMEOUT_SECONDS = 1.0
#: of an AWS session token, and how much earlier a new one is asked for
TOKEN_TTL_SECONDS = 21_600
TOKEN_RENEWAL_SECONDS = 600


@dataclass(frozen=True)
class Notice:
    """What the cloud says. A ``rebalance`` is a raised risk, a ``terminate`` is certain."""

    kind: Literal["terminate", "rebalance"]
    at: float | None
    """When the machine goes, in Unix seconds; ``None`` where the cloud does not say."""
    source: str


class NoticeSource(Protocol):
    def poll(self) -> Notice | None:
        """The notice, if there is one by now. Returns within a few seconds; never raises."""
        ...


@dataclass(frozen=True)
class Response:
    status: int
    body: str


class Http(Protocol):
    def __call__(self, method: str, url: str, headers: Mapping[str, str]) -> Response:
        """Raises :class:`OSError` when there is no answer in time."""
        ...


def request(method: str, url: str, headers: Mapping[str, str]) -> Response:
    """Straight to the server: metadata is local to the host and no business of a proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        wanted = urllib.request.Request(url, method=method, headers=dict(headers))
        with opener.open(wanted, timeout=TIMEOUT_SECONDS) as answer:
            return Response(answer.status, answer.read().decode(errors="replace"))
    except urllib.error.HTTPError as error:
        with error:
            return Response(error.code, "")
    except (HTTPException, ValueError) as error:  # no HTTP, or no such address
        raise ConnectionError(f"{url}: {error!r}") from error


class NoNotices:
    """On machines that nobody takes away."""

    def poll(self) -> None:
        return None


class AwsNotices:
    """Of EC2: the certain interruption first, then the recommendation to rebalance.

    Speaks IMDSv2, the only version that can't be switched off; its token is kept and renewed.
    """

    def __init__(
        self, url: str = AWS_URL, http: Http = request, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._url = url.rstrip("/")
        self._http = http
        self._clock = clock
        self._token: str | None = None
        self._token_until = 0.0

    def poll(self) -> Notice | None:
        try:
            return self._terminate() or self._rebalance()
        except OSError:
            return None

    def _terminate(self) -> Notice | None:
        action = self._document("/latest/meta-data/spot/instance-action")
        if action is None:
            return None
        return Notice("terminate", _unix_seconds(action.get("time")), "aws instance-action")

    def _rebalance(self) -> Notice | None:
        """Its ``noticeTime`` is when it was said; when the machine goes is not known."""
        if self._document("/latest/meta-data/events/recommendations/rebalance") is None:
            return None
        return Notice("rebalance", None, "aws rebalance recommendation")

    def _document(self, path: str) -> dict[str, Any] | None:
        """A damaged document is an empty one: that there is any is what counts."""
        response = self._get(path)
        if response.status == 401:
            self._token = None
            response = self._get(path)
        if response.status != 200:
            return None
        try:
            document = json.loads(response.body)
        except ValueError:
            return {}
        return document if isinstance(document, dict) else {}

    def _get(self, path: str) -> Response:
        headers = {"X-aws-ec2-metadata-token": self._fresh_token()}
        return self._http("GET", self._url + path, headers)

    def _fresh_token(self) -> str:
        if self._token is None or self._clock() >= self._token_until:
            asked_at = self._clock()
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_SECONDS)}
            response = self._http("PUT", f"{self._url}/latest/api/token", headers)
            if response.status != 200:
                raise ConnectionError(f"no session token: status {response.status}")
            self._token = response.body
            self._token_until = asked_at + TOKEN_TTL_SECONDS - TOKEN_RENEWAL_SECONDS
        return self._token


@dataclass(frozen=True)
class GcpNotices:
    """Of Compute Engine, which gives up to 30 seconds but does not say until when."""

    url: str = GCP_URL
    http: Http = field(default=request)

    def poll(self) -> Notice | None:
        address = f"{self.url.rstrip('/')}/computeMetadata/v1/instance/preempted"
        try:
            response = self.http("GET", address, {"Metadata-Flavor": "Google"})
        except OSError:
            return None
        if response.status != 200 or response.body.strip() != "TRUE":
            return None
        return Notice("terminate", None, "gcp preempted")


def notices_from_environment(environment: Mapping[str, str]) -> NoticeSource:
    """By ``VCASGD_METADATA_URL``; without it nobody gives notice.

    ``VCASGD_METADATA_KIND`` is ``aws`` (the default) or ``gcp``. Raises :class:`SpecError`
    that names the variable, because a source that can't work would go unnoticed.
    """
    url = environment.get("VCASGD_METADATA_URL")
    kind = environment.get("VCASGD_METADATA_KIND", "aws")
    if not url:
        return NoNotices()
    if not url.startswith(("http://", "https://")):
        raise _wrong("VCASGD_METADATA_URL", f"{url!r} does not begin with http://")
    if kind not in ("aws", "gcp"):
        raise _wrong("VCASGD_METADATA_KIND", f"{kind!r} is neither aws nor gcp")
    return AwsNotices(url) if kind == "aws" else GcpNotices(url)


def _wrong(name: str, problem: str) -> SpecError:
    return SpecError(f"{name}: {problem}", field=name)


def _unix_seconds(text: object) -> float | None:
    try:
        moment = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()
