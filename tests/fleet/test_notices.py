"""Eviction notices of AWS and GCP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.metadata import Metadata, MetadataServer
from support.waiting import PATIENCE

from vcasgd.errors import CloudUnavailable, SpecError
from vcasgd.fleet.metadata import Response, identity, request
from vcasgd.fleet.notices import (
    AwsNotices,
    FileNotices,
    GcpNotices,
    Notice,
    NoticeKind,
    notices_of_cloud,
    write_notice,
)
from vcasgd.steady_time import steady_time

ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
TOKEN = "X-aws-ec2-metadata-token"
TTL = "X-aws-ec2-metadata-token-ttl-seconds"
GOOGLE = {"Metadata-Flavor": "Google"}
PREEMPTED = "/computeMetadata/v1/instance/preempted"


class Clock:
    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@dataclass
class Imds:
    """EC2 metadata service with responses set by the test."""

    documents: dict[str, str] = field(default_factory=dict)
    tokens_issued: int = 0
    down: bool = False
    token_status: int = 200

    def __call__(self, method: str, url: str, headers: Mapping[str, str]) -> Response:
        if self.down:
            raise TimeoutError("timed out")
        path = url.removeprefix("http://imds")
        if method == "PUT":
            self.tokens_issued += 1
            return Response(self.token_status, f"token-{self.tokens_issued}")
        if headers[TOKEN] != f"token-{self.tokens_issued}":
            return Response(401, "")
        document = self.documents.get(path)
        return Response(404, "") if document is None else Response(200, document)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def imds() -> Imds:
    return Imds()


@pytest.fixture
def aws(imds: Imds, clock: Clock) -> AwsNotices:
    return AwsNotices("http://imds/", http=imds, clock=clock)


@pytest.fixture
def metadata(clock: Clock) -> Metadata:
    return Metadata("local-1", clock)


@pytest.fixture
def server(metadata: Metadata) -> Iterator[MetadataServer]:
    server = MetadataServer(metadata)
    server.start()
    yield server
    server.stop()


def test_without_a_document_there_is_no_notice(aws: AwsNotices) -> None:
    assert aws.poll() is None


def test_instance_action_is_a_notice_with_a_time(aws: AwsNotices, imds: Imds) -> None:
    imds.documents[ACTION] = '{"action": "terminate", "time": "2023-11-14T22:15:20Z"}'
    assert aws.poll() == Notice("terminate", 1_700_000_120.0)


def test_rebalance_is_a_notice_without_a_time(aws: AwsNotices, imds: Imds) -> None:
    imds.documents[REBALANCE] = '{"noticeTime": "2023-11-14T22:13:20Z"}'
    assert aws.poll() == Notice("rebalance", None)


def test_the_certain_notice_goes_first(aws: AwsNotices, imds: Imds) -> None:
    imds.documents |= {
        ACTION: '{"action": "stop", "time": "2023-11-14T22:15:20Z"}',
        REBALANCE: "{}",
    }
    notice = aws.poll()
    assert notice is not None
    assert notice.kind == "terminate"


@pytest.mark.parametrize("body", ["", "not json", "[]", "{}", '{"time": null}', '{"time": "soon"}'])
def test_a_damaged_document_is_still_a_notice(aws: AwsNotices, imds: Imds, body: str) -> None:
    imds.documents[ACTION] = body
    assert aws.poll() == Notice("terminate", None)


def test_an_unreachable_server_is_no_notice(aws: AwsNotices, imds: Imds) -> None:
    imds.documents[ACTION] = "{}"
    imds.down = True
    assert aws.poll() is None
    imds.down = False
    assert aws.poll() is not None


def test_a_refused_token_is_no_notice(aws: AwsNotices, imds: Imds) -> None:
    imds.token_status = 403
    assert aws.poll() is None


def test_the_token_is_kept_and_renewed_before_its_end(
    aws: AwsNotices, imds: Imds, clock: Clock
) -> None:
    aws.poll()
    clock.now += 20_000
    aws.poll()
    assert imds.tokens_issued == 1
    clock.now += 1_000
    aws.poll()
    assert imds.tokens_issued == 2


def test_token_that_the_server_lost_is_renewed(aws: AwsNotices, imds: Imds) -> None:
    aws.poll()
    imds.tokens_issued += 1
    imds.documents[ACTION] = "{}"
    assert aws.poll() is not None


@pytest.mark.parametrize(
    ("response", "noticed"),
    [
        (Response(200, "TRUE\n"), True),
        (Response(200, "FALSE"), False),
        (Response(403, "TRUE"), False),
        (TimeoutError("timed out"), False),
    ],
)
def test_gcp(response: Response | OSError, noticed: bool) -> None:
    def http(method: str, url: str, headers: Mapping[str, str]) -> Response:
        assert (method, url, headers) == ("GET", f"http://gcp{PREEMPTED}", GOOGLE)
        if isinstance(response, OSError):
            raise response
        return response

    expected = Notice("terminate", None) if noticed else None
    assert GcpNotices("http://gcp", http).poll() == expected


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://127.0.0.1:port", "http://.", ""])
def test_nobody_answers(url: str) -> None:
    assert AwsNotices(url).poll() is None
    assert GcpNotices(url).poll() is None


def test_source_by_environment() -> None:
    url = {"VCASGD_METADATA_URL": "http://127.0.0.1:9"}
    assert isinstance(notices_of_cloud(url), AwsNotices)
    for kind, source in {"aws": AwsNotices, "gcp": GcpNotices}.items():
        assert isinstance(notices_of_cloud({"VCASGD_METADATA_KIND": kind}), source)
    with pytest.raises(SpecError, match="VCASGD_METADATA_URL"):
        notices_of_cloud({"VCASGD_METADATA_URL": "127.0.0.1:9"})
    with pytest.raises(SpecError, match="VCASGD_METADATA_KIND"):
        notices_of_cloud(url | {"VCASGD_METADATA_KIND": "azure"})


def test_the_local_server_speaks_to_both(server: MetadataServer, metadata: Metadata) -> None:
    aws, gcp = AwsNotices(server.url), GcpNotices(server.url)
    assert aws.poll() is None
    assert gcp.poll() is None
    metadata.notify(1_700_000_120.7)
    assert aws.poll() == Notice("terminate", 1_700_000_120.0)
    assert gcp.poll() == Notice("terminate", None)


def test_the_first_notice_stands(server: MetadataServer, metadata: Metadata) -> None:
    metadata.notify(1_700_000_120.0)
    metadata.notify(1_700_000_500.0)
    notice = AwsNotices(server.url).poll()
    assert notice is not None
    assert notice.at == 1_700_000_120.0


def test_local_server_requires_the_session_token(server: MetadataServer, clock: Clock) -> None:
    url = f"{server.url}/latest/meta-data/instance-id"
    token = request("PUT", f"{server.url}/latest/api/token", {TTL: "60"}).body
    assert request("GET", url, {}).status == 401
    assert request("GET", url, {TOKEN: "made up"}).status == 401
    assert request("GET", url, {TOKEN: token}) == Response(200, "local-1")
    clock.now += 61
    assert request("GET", url, {TOKEN: token}).status == 401


@pytest.mark.parametrize("ttl", ["0", "21601", "-1", "soon", ""])
def test_local_server_limits_the_life_of_a_token(server: MetadataServer, ttl: str) -> None:
    assert request("PUT", f"{server.url}/latest/api/token", {TTL: ttl}).status == 400


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/computeMetadata/v1/instance/id", GOOGLE, 200),
        ("/computeMetadata/v1/instance/id", {}, 403),
        (PREEMPTED, {}, 403),
        (f"{PREEMPTED}?wait_for_change=true&timeout_sec=soon", GOOGLE, 400),
        (f"{PREEMPTED}?wait_for_change=true&timeout_sec=0", GOOGLE, 200),
        (f"{PREEMPTED}?wait_for_change=true&last_etag=0", GOOGLE, 200),
        ("/elsewhere", GOOGLE, 404),
    ],
)
def test_local_server_paths_of_gcp(
    server: MetadataServer, path: str, headers: dict[str, str], status: int
) -> None:
    assert request("GET", server.url + path, headers).status == status


def test_a_hanging_get_returns_at_the_notice(server: MetadataServer, metadata: Metadata) -> None:
    etag = metadata.preempted()[1]
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(metadata.wait_preempted, etag, 30.0)
        metadata.notify(1_700_000_030.0)
        assert waiting.result(timeout=PATIENCE)[0] == "TRUE"
    hanging = f"{server.url}{PREEMPTED}?wait_for_change=true&timeout_sec=0&last_etag={etag}"
    assert request("GET", hanging, GOOGLE) == Response(200, "TRUE")


def test_cloud_server_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def http(method: str, url: str, headers: Mapping[str, str]) -> Response:
        asked.append(url)
        return Response(404, "")

    AwsNotices(http=http).poll()
    GcpNotices(http=http).poll()
    assert asked[0] == "http://169.254.169.254/latest/api/token"
    assert asked[-1] == "http://metadata.google.internal" + PREEMPTED


def test_gcp_waits_for_a_change(server: MetadataServer, metadata: Metadata) -> None:
    source = GcpNotices(server.url)
    assert source.poll() is None
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(source.poll)
        metadata.notify(1_700_000_030.0)
        assert waiting.result(timeout=PATIENCE) == Notice("terminate", None)


def test_advice_alone_is_a_rebalance(server: MetadataServer, metadata: Metadata) -> None:
    metadata.recommend_rebalance()
    aws = AwsNotices(server.url)
    assert aws.poll() == Notice("rebalance", None)
    assert GcpNotices(server.url).poll() is None
    metadata.notify(1_700_000_120.0)
    notice = aws.poll()
    assert notice is not None
    assert notice.kind == "terminate"


def test_a_machine_passes_notices_on_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    file = FileNotices(path)
    assert file.poll() is None
    write_notice(path, NoticeKind.REBALANCE, None)
    assert file.poll() == Notice(NoticeKind.REBALANCE, None)
    write_notice(path, NoticeKind.TERMINATE, 20.5)
    notice = file.poll()
    assert notice is not None
    assert notice.kind is NoticeKind.TERMINATE
    assert notice.at is not None
    assert notice.at <= steady_time() + 20.5 < notice.at + PATIENCE


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"kind": "x", "at": 1}', '{"kind": "terminate"}']
)
def test_an_invalid_notice_file_is_no_notice(tmp_path: Path, text: str) -> None:
    (tmp_path / "notice").write_text(text)
    assert FileNotices(tmp_path / "notice").poll() is None


@pytest.mark.parametrize("kind", ["aws", "gcp"])
def test_machine_finds_its_identity(server: MetadataServer, kind: str) -> None:
    assert identity(kind, server.url) == "local-1"
    with pytest.raises(CloudUnavailable):
        identity(kind, "http://127.0.0.1:9")
    with pytest.raises(CloudUnavailable, match="returned no id"):
        identity(kind, f"{server.url}/elsewhere") if kind == "gcp" else identity(
            kind, server.url, lambda *_: Response(200, "")
        )
