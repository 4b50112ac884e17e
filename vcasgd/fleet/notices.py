"""Sources of eviction notices, polled on the machine itself.

A notice is a hint: no source ever raises, and an unreachable metadata server means no notice.
Leases cover notices that are missed.

AWS: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
GCP: https://cloud.google.com/compute/docs/instances/spot#preemption-process
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from vcasgd.errors import SpecError
from vcasgd.fleet.metadata import AWS_URL, GCP_URL, AwsMetadata, gcp_value
from vcasgd.steady_time import boot_time, unix_time

log = logging.getLogger(__name__)

#: Variable with the path of the file through which the machine gives notice to its processes.
NOTICE_FILE_VARIABLE = "VCASGD_NOTICE_FILE"
#: Seconds that a request to Google's server waits for a change; less than the request's time limit.
WAIT_SECONDS = 2


class NoticeKind(StrEnum):
    """Content of a notice: the end is certain, or the risk of it is elevated."""

    TERMINATE = "terminate"
    REBALANCE = "rebalance"


@dataclass(frozen=True)
class Notice:
    """Notice of the cloud. ``at``: when the machine goes (Unix seconds), if the cloud says so."""

    kind: NoticeKind
    at: float | None


class NoticeSource(Protocol):
    """Source of notices."""

    def poll(self) -> Notice | None:
        """Return the current notice, or None. Takes at most a few seconds, and never raises."""
        ...


class AwsNotices:
    """Source for EC2: interruptions first, then rebalance recommendations."""

    def __init__(self, url: str = AWS_URL) -> None:
        self._metadata = AwsMetadata(url)

    def poll(self) -> Notice | None:
        try:
            return self._terminate() or self._rebalance()
        except OSError:
            return None

    def _terminate(self) -> Notice | None:
        action = self._document("/latest/meta-data/spot/instance-action")
        if action is None:
            return None
        return Notice(NoticeKind.TERMINATE, _unix_seconds(action.get("time")))

    def _rebalance(self) -> Notice | None:
        """Return the recommendation.

        Its ``noticeTime`` is the time of publication, not of the end.
        """
        if self._document("/latest/meta-data/events/recommendations/rebalance") is None:
            return None
        return Notice(NoticeKind.REBALANCE, None)

    def _document(self, path: str) -> dict[str, Any] | None:
        """Return a document. A malformed one counts as empty, because its existence matters."""
        response = self._metadata.get(path)
        if response.status != 200:
            return None
        try:
            document = json.loads(response.body)
        except ValueError:
            return {}
        return document if isinstance(document, dict) else {}


class GcpNotices:
    """Source for Compute Engine, which gives up to 30 seconds without a time.

    The request blocks until the value changes, so a preemption is noticed at once.
    """

    def __init__(self, url: str = GCP_URL) -> None:
        self._url = url
        self._etag = ""

    def poll(self) -> Notice | None:
        try:
            response = gcp_value(f"preempted{self._wait()}", self._url)
        except OSError:
            return None
        if response.status != 200:
            return None
        self._etag = response.etag
        if response.body.strip() != "TRUE":
            return None
        return Notice(NoticeKind.TERMINATE, None)

    def _wait(self) -> str:
        """Return the query that waits for a change of the last value."""
        if not self._etag:
            return ""
        return f"?wait_for_change=true&timeout_sec={WAIT_SECONDS}&last_etag={quote(self._etag)}"


class FileNotices:
    """Source for the processes of a machine, whose first one writes the file: see
    :func:`write_notice`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def poll(self) -> Notice | None:
        try:
            row = json.loads(self._path.read_text())
            at = row["at"]
            return Notice(NoticeKind(row["kind"]), None if at is None else unix_time(float(at)))
        except (OSError, ValueError, LookupError, TypeError):
            return None


def write_notice(path: Path, kind: NoticeKind, seconds: float | None) -> bool:
    """Announce to :class:`FileNotices` that the machine goes in so many seconds, if that is known.

    The file has the :func:`boot_time`, which all processes of a machine agree on. Return False if
    it can't be written: a full disk must not end a machine before its time.
    """
    at = None if seconds is None else boot_time() + seconds
    temporary = path.with_suffix(".new")
    try:
        temporary.write_text(json.dumps({"kind": kind, "at": at}))
        temporary.replace(path)
    except OSError as error:
        log.warning("the notice can't be written: %s", error)
        return False
    return True


def notices_of_cloud(environment: Mapping[str, str]) -> NoticeSource:
    """Return the source for ``VCASGD_METADATA_KIND`` (``aws`` or ``gcp``).

    ``VCASGD_METADATA_URL`` overrides the address. Raises :class:`SpecError` that names an invalid
    variable, because a broken source would otherwise go unnoticed.
    """
    url = environment.get("VCASGD_METADATA_URL")
    kind = environment.get("VCASGD_METADATA_KIND", "aws")
    if url and not url.startswith(("http://", "https://")):
        variable = "VCASGD_METADATA_URL"
        raise SpecError(f"{variable}: {url!r} does not start with http://", field=variable)
    match kind:
        case "aws":
            return AwsNotices(url or AWS_URL)
        case "gcp":
            return GcpNotices(url or GCP_URL)
    variable = "VCASGD_METADATA_KIND"
    raise SpecError(f"{variable}: {kind!r} is not aws or gcp", field=variable)


def _unix_seconds(text: object) -> float | None:
    try:
        moment = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()
