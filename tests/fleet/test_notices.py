"""Eviction notices of AWS and GCP."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path

import pytest
from support.metadata import Metadata, MetadataServer
from support.waiting import PATIENCE

from vcasgd.errors import CloudUnavailable, SpecError
from vcasgd.fleet.metadata import AWS_URL, GCP_URL, identity
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
PREEMPTED = "/computeMetadata/v1/instance/preempted"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the server, which may be slow."""
    monkeypatch.setattr("vcasgd.fleet.metadata.TIMEOUT_SECONDS", PATIENCE)


@pytest.fixture
def metadata() -> Metadata:
    return Metadata("local-1")


@pytest.fixture
def server(metadata: Metadata) -> Iterator[MetadataServer]:
    with MetadataServer(metadata) as server:
        yield server


@pytest.fixture
def aws(server: MetadataServer) -> AwsNotices:
    return AwsNotices(server.url)


def test_the_notice_of_the_cloud_is_found(
    server: MetadataServer, metadata: Metadata, aws: AwsNotices
) -> None:
    gcp = GcpNotices(server.url)
    assert aws.poll() is None
    assert gcp.poll() is None
    metadata.notify(1_700_000_120.7)
    metadata.notify(1_700_000_500.0)
    assert aws.poll() == Notice("terminate", 1_700_000_120.0), "the first one stands"
    assert gcp.poll() == Notice("terminate", None)


def test_advice_is_a_rebalance_until_there_is_a_notice(
    server: MetadataServer, metadata: Metadata, aws: AwsNotices
) -> None:
    metadata.recommend_rebalance()
    assert aws.poll() == Notice("rebalance", None)
    assert GcpNotices(server.url).poll() is None
    metadata.notify(1_700_000_120.0)
    assert aws.poll() == Notice("terminate", 1_700_000_120.0)


@pytest.mark.parametrize("body", ["", "not json", "[]", "{}", '{"time": null}', '{"time": "soon"}'])
def test_a_damaged_document_is_still_a_notice(
    aws: AwsNotices, metadata: Metadata, body: str
) -> None:
    metadata.overrides[ACTION] = (HTTPStatus.OK, body)
    assert aws.poll() == Notice("terminate", None)


def test_an_unreachable_server_is_no_notice(
    server: MetadataServer, metadata: Metadata, aws: AwsNotices
) -> None:
    metadata.notify(1_700_000_120.0)
    port = server.port
    server.stop()
    assert aws.poll() is None
    assert GcpNotices(server.url).poll() is None
    with MetadataServer(metadata, port):
        assert aws.poll() is not None


def test_a_refused_token_is_no_notice(aws: AwsNotices, metadata: Metadata) -> None:
    metadata.notify(1_700_000_120.0)
    metadata.overrides["/latest/api/token"] = (HTTPStatus.FORBIDDEN, "")
    assert aws.poll() is None


def test_the_token_is_kept_and_renewed_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now, issued = [0.0], []
    metadata = Metadata("local-1", lambda: now[0])
    issue = metadata.issue_token
    monkeypatch.setattr(metadata, "issue_token", lambda ttl: issued.append(ttl) or issue(ttl))
    metadata.notify(1_700_000_120.0)
    with MetadataServer(metadata) as server:
        aws = AwsNotices(server.url)
        for now[0] in (0.0, 20_000.0, 22_000.0):
            assert aws.poll() is not None
    assert len(issued) == 2


def test_a_refused_request_of_google_is_no_notice(
    server: MetadataServer, metadata: Metadata
) -> None:
    metadata.overrides[PREEMPTED] = (HTTPStatus.FORBIDDEN, "TRUE")
    assert GcpNotices(server.url).poll() is None


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://127.0.0.1:port", "http://.", ""])
def test_nobody_answers(url: str) -> None:
    assert AwsNotices(url).poll() is None
    assert GcpNotices(url).poll() is None


def test_source_by_environment() -> None:
    assert (AWS_URL, GCP_URL) == ("http://169.254.169.254", "http://metadata.google.internal")
    url = {"VCASGD_METADATA_URL": "http://127.0.0.1:9"}
    assert isinstance(notices_of_cloud(url), AwsNotices)
    for kind, source in {"aws": AwsNotices, "gcp": GcpNotices}.items():
        assert isinstance(notices_of_cloud({"VCASGD_METADATA_KIND": kind}), source)
    with pytest.raises(SpecError, match="VCASGD_METADATA_URL"):
        notices_of_cloud({"VCASGD_METADATA_URL": "127.0.0.1:9"})
    with pytest.raises(SpecError, match="VCASGD_METADATA_KIND"):
        notices_of_cloud(url | {"VCASGD_METADATA_KIND": "azure"})


def test_gcp_waits_for_a_change(
    server: MetadataServer, metadata: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vcasgd.fleet.notices.WAIT_SECONDS", 100)
    source = GcpNotices(server.url)
    assert source.poll() is None
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(source.poll)
        metadata.notify(1_700_000_030.0)
        assert waiting.result(timeout=PATIENCE) == Notice("terminate", None)


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


@pytest.mark.parametrize(
    ("kind", "path"),
    [("aws", "/latest/meta-data/instance-id"), ("gcp", "/computeMetadata/v1/instance/name")],
)
def test_machine_finds_its_identity(
    server: MetadataServer, metadata: Metadata, kind: str, path: str
) -> None:
    assert identity(kind, server.url) == "local-1"
    with pytest.raises(CloudUnavailable):
        identity(kind, "http://127.0.0.1:9")
    metadata.overrides[path] = (HTTPStatus.OK, "")
    with pytest.raises(CloudUnavailable, match="returned no id"):
        identity(kind, server.url)
