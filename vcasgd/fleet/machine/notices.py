"""Where notices of eviction come from, seen from the machine that is about to go.

A notice is a hint: none of these sources ever raises, and a metadata server that can't be
reached is no notice. Whatever is missed here is caught by the leases.

AWS: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
GCP: https://cloud.google.com/compute/docs/instances/spot#preemption-process
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import quote

from vcasgd.errors import SpecError
from vcasgd.fleet.machine.metadata import AWS_URL, GCP_URL, AwsMetadata, Http, gcp_value, request

#: names the file by which a machine's own system gives notice
NOTICE_FILE_VARIABLE = "VCASGD_NOTICE_FILE"
#: how long a request to Google's server waits for a change; shorter than the request may take
WAIT_SECONDS = 2


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


class NoNotices:
    """On machines that nobody takes away."""

    def poll(self) -> None:
        return None


class AwsNotices:
    """Of EC2: the certain interruption first, then the recommendation to rebalance."""

    def __init__(
        self, url: str = AWS_URL, http: Http = request, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metadata = AwsMetadata(url, http, clock)

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
        response = self._metadata.get(path)
        if response.status != 200:
            return None
        try:
            document = json.loads(response.body)
        except ValueError:
            return {}
        return document if isinstance(document, dict) else {}


class GcpNotices:
    """Of Compute Engine, which gives up to 30 seconds but does not say until when.

    The request hangs until the value changes, so a preemption is heard of at once.
    """

    def __init__(self, url: str = GCP_URL, http: Http = request) -> None:
        self._url = url
        self._http = http
        self._etag = ""

    def poll(self) -> Notice | None:
        try:
            response = gcp_value(f"preempted{self._wait()}", self._url, self._http)
        except OSError:
            return None
        if response.status != 200:
            return None
        self._etag = response.etag
        if response.body.strip() != "TRUE":
            return None
        return Notice("terminate", None, "gcp preempted")

    def _wait(self) -> str:
        """Only for a change of what is known already."""
        if not self._etag:
            return ""
        return f"?wait_for_change=true&timeout_sec={WAIT_SECONDS}&last_etag={quote(self._etag)}"


class FileNotices:
    """Of the machine itself: a shutdown that its system was told of, see :func:`write_notice`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def poll(self) -> Notice | None:
        try:
            at = float(self._path.read_text())
        except (OSError, ValueError):
            return None
        return Notice("terminate", at, "shutdown")


class AnyNotices:
    """Of several sources: a certain end goes before a raised risk."""

    def __init__(self, *sources: NoticeSource) -> None:
        self._sources = sources

    def poll(self) -> Notice | None:
        found = [notice for source in self._sources if (notice := source.poll()) is not None]
        return next((one for one in found if one.kind == "terminate"), next(iter(found), None))


def write_notice(path: Path, at: float) -> None:
    """Tells :class:`FileNotices` that the machine goes at ``at`` (Unix seconds)."""
    temporary = path.with_suffix(".new")
    temporary.write_text(repr(at))
    temporary.replace(path)


def notices_from_environment(environment: Mapping[str, str]) -> NoticeSource:
    """By ``VCASGD_METADATA_URL`` and ``VCASGD_METADATA_KIND``: ``aws``, ``gcp``, or ``local``,
    which speaks as both do.

    Without a kind the URL is taken for one of AWS; without a URL the kind's own is asked; without
    both nobody gives notice. A shutdown is heard of through ``VCASGD_NOTICE_FILE``. Raises
    :class:`SpecError` that names the variable, because a source that can't work would go
    unnoticed.
    """
    url = environment.get("VCASGD_METADATA_URL")
    kind = environment.get("VCASGD_METADATA_KIND")
    file = environment.get(NOTICE_FILE_VARIABLE)
    if url and not url.startswith(("http://", "https://")):
        raise _wrong("VCASGD_METADATA_URL", f"{url!r} does not begin with http://")
    if kind and kind not in ("aws", "gcp", "local"):
        raise _wrong("VCASGD_METADATA_KIND", f"{kind!r} is none of aws, gcp, local")
    cloud = _of_cloud(kind, url)
    return AnyNotices(FileNotices(Path(file)), cloud) if file else cloud


def _of_cloud(kind: str | None, url: str | None) -> NoticeSource:
    if kind == "gcp":
        return GcpNotices(url or GCP_URL)
    if kind == "aws" or url:
        return AwsNotices(url or AWS_URL)
    return NoNotices()


def _wrong(name: str, problem: str) -> SpecError:
    return SpecError(f"{name}: {problem}", field=name)


def _unix_seconds(text: object) -> float | None:
    try:
        moment = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()
