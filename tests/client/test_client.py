"""The client with servers that misbehave."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.api_harness import A_JOB, Api, spec, zipped
from support.http_servers import LocalServer, QuietHandler
from support.ports import free_port
from support.waiting import PATIENCE

from vcasgd.client import Client, Job
from vcasgd.errors import ApiError, CheckpointDamaged, NotFound, SpecError
from vcasgd.schemas.jobs import JobView

Answer = Callable[[BaseHTTPRequestHandler], None]
#: Headers of a submission.
SENT = ("Authorization", "Content-Type", "Idempotency-Key")


@contextmanager
def fake_api(*answers: Answer) -> Iterator[Client]:
    """Serve the given responses in order, and then repeat the last one."""
    left = list(answers)

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path.endswith("/jobs/job"):
                return reply(json.dumps(A_JOB).encode())(self)
            answer = left.pop(0) if len(left) > 1 else left[0]
            self.close_connection = True
            return answer(self)

    with LocalServer(Handler) as server, Client(server.url, "token", timeout=PATIENCE) as client:
        yield client


def reply(
    content: bytes = b"", status: int = 200, cut: int = 0, check: Any = None, **headers: str
) -> Answer:
    """Return a response that lacks the last ``cut`` bytes of its length."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if check is not None:
            check(handler.headers)
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(content) + cut))
        # Otherwise, the client may send its next request on a connection that is about to end.
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(content)

    return answer


def stream(content: bytes = b"", **options: Any) -> Answer:
    return reply(content, **options, **{"Content-Type": "text/event-stream"})


def events(*numbers: int, end: bool = False) -> bytes:
    blocks = [
        f"id: {number}-0\r\nevent: count\r\ndata: "
        + json.dumps({"id": f"{number}-0", "at": 1.0, "kind": "count", "text": "", "details": {}})
        for number in numbers
    ]
    blocks += ['event: end\r\ndata: {"state": "failed"}'] if end else []
    return "".join(f"{block}\r\n\r\n" for block in blocks).encode()


# -- submissions --------------------------------------------------------------------------------


def test_a_job_whose_answer_is_lost_is_submitted_once(api: Api, client: Client) -> None:
    class Relay(QuietHandler):
        lost = 0

        def do_POST(self) -> None:
            headers = {name: self.headers[name] for name in SENT if name in self.headers}
            url = f"{api.url}{self.path}"
            answer = httpx.post(url, content=self.body(), headers=headers, trust_env=False)
            if not Relay.lost:
                Relay.lost = answer.status_code
                self.connection.close()
                return
            self.answer(answer.status_code, answer.content)

        def do_HEAD(self) -> None:
            self.answer(200)

        def do_GET(self) -> None:
            token = {"Authorization": self.headers["Authorization"]}
            answer = httpx.get(f"{api.url}{self.path}", headers=token, trust_env=False)
            self.answer(answer.status_code, answer.content)

    client.upload(package := zipped())
    with LocalServer(Relay) as server, Client(server.url, api.token) as relayed:
        job = relayed.submit(spec(), package)

        assert Relay.lost == 201
        assert [each.id for each in client.jobs()] == [job.id]

        # The same holds for one that trains its model on
        api.start_job(job.id)
        api.finish(job.id, model=api.store_checkpoint(job.id, 5)[0])
        Relay.lost = 0
        more = relayed.job(job.id).extend(5)

    assert Relay.lost == 201
    assert [each.id for each in client.jobs()] == [more.id, job.id]


# -- following ----------------------------------------------------------------------------------


def test_a_request_waits_while_the_token_has_too_many_in_progress() -> None:
    busy = reply(b'{"detail": "the token has 32 requests in progress"}', status=429)
    with fake_api(busy, busy, reply(b"[]")) as client:
        assert list(client.jobs()) == []


def test_broken_stream_is_resumed() -> None:
    asked = []

    def check(headers: Any) -> None:
        asked.append(headers["Last-Event-ID"])

    with fake_api(
        stream(events(1, 2) + events(3)[:-4], cut=100, check=check),
        reply(b"<html>gateway</html>", status=502),
        stream(events(3), check=check),
        stream(events(4, end=True), check=check),
    ) as client:
        seen = [event.id for event in client.job("job").events(after="0-5", follow=True)]

    assert seen == ["1-0", "2-0", "3-0", "4-0"]
    assert asked == ["0-5", "2-0", "3-0"]


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (reply(status=503), ApiError, "503"),
        (stream(), ApiError, "before the job did"),
        (reply(b"<html>It works!</html>"), ApiError, "text/event-stream"),
        (reply(status=404), NotFound, "404"),
    ],
    ids=["unavailable", "an empty stream", "another server", "a permanent error"],
)
def test_follower_gives_up_after_its_patience(
    answer: Answer, error: type[ApiError], text: str
) -> None:
    with fake_api(answer) as client, pytest.raises(error, match=text):
        list(client.job("job").events(follow=True, patience=0.5))


def test_patience_starts_with_the_first_failure() -> None:
    """A caller that handles an event for long must not lose the next one."""
    with fake_api(stream(events(1)), stream(events(2, end=True))) as client:
        seen = []
        for event in client.job("job").events(follow=True, patience=0.4):
            seen.append(event.id)
            time.sleep(0.6)
    assert seen == ["1-0", "2-0"]


def test_keep_alive_comments_are_no_events() -> None:
    content = b": keep-alive\r\n\r\n" + events(1) + b": keep-alive\r\n\r\n" + events(2, end=True)

    with fake_api(stream(content)) as client:
        assert [event.id for event in client.job("job").events(follow=True)] == ["1-0", "2-0"]


# -- waiting ------------------------------------------------------------------------------------


@contextmanager
def waited_for(api: Api, client: Client, running: int, paths: list[str]) -> Iterator[Job]:
    """Serve a job that has ended after some answers, through an API whose streams are taken."""
    job = api.submit()
    rows = [client.job(job).model_dump(mode="json")]
    api.finish(job)
    rows.append(client.job(job).model_dump(mode="json"))

    def answer(handler: BaseHTTPRequestHandler) -> None:
        paths.append(handler.path.rpartition("/")[2])
        row = json.dumps(rows[paths.count(job) > running]).encode()
        taken = reply(b'{"detail": "the token has 64 streams in progress"}', status=429)
        (taken if paths[-1] == "events" else reply(row))(handler)

    with fake_api(answer) as fake:
        yield fake.job(job)


def test_wait_ends_in_time(api: Api, client: Client) -> None:
    with waited_for(api, client, 1000, []) as job:
        started = time.monotonic()
        with pytest.raises(ApiError, match="has not ended after 1 s"):
            job.wait(timeout=1.0)
        # Also on a busy machine.
        assert 0.9 < time.monotonic() - started < PATIENCE / 2


def test_wait_repeats_no_request_after_its_time(api: Api, client: Client) -> None:
    requests: list[str] = []

    def busy(handler: BaseHTTPRequestHandler) -> None:
        requests.append(handler.path)
        reply(b'{"detail": "the token has 32 requests in progress"}', status=429)(handler)

    row = client.job(api.submit()).model_dump_json().encode()
    with fake_api(reply(row), busy) as fake:
        job = fake.job("another")
        with pytest.raises(ApiError, match="32 requests"):
            job.wait(timeout=0.0)
    assert len(requests) == 1


def test_any_number_of_threads_may_wait(api: Api, client: Client) -> None:
    paths: list[str] = []
    # Given a token with as many streams as it may have, and a job that ends soon
    with waited_for(api, client, 2, paths) as job:
        # Then a waiter needs no stream
        assert job.wait(patience=0.5).state == "succeeded"
    assert paths == 3 * [job.id]


# -- downloads ------------------------------------------------------------------------------------


def etag(data: bytes) -> str:
    return f'"{hashlib.sha256(data).hexdigest()}"'


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (reply(b"some of", cut=100, ETag=etag(b"some of it")), ApiError),
        (reply(b"damaged", ETag=etag(b"whole")), CheckpointDamaged),
        (reply(b"without a digest"), CheckpointDamaged),
    ],
)
def test_incomplete_download_leaves_no_file(
    tmp_path: Path, answer: Answer, error: type[Exception]
) -> None:
    path = tmp_path / "model"
    path.write_text("what was there")

    with fake_api(answer) as client, pytest.raises(error):
        client.job("job").download(path)

    assert path.read_text() == "what was there"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["../../evil", "/etc/evil", "evil"])
def test_download_stays_in_its_directory(tmp_path: Path, name: str) -> None:
    disposition = {"Content-Disposition": f'attachment; filename="{name}"'}

    with fake_api(reply(b"data", ETag=etag(b"data"), **disposition)) as client:
        assert client.job("job").download(tmp_path) == tmp_path / "evil"


# -- answers that are none ------------------------------------------------------------------------


def test_missing_api_is_an_error_with_a_remedy() -> None:
    with Client(f"http://me:secret@127.0.0.1:{free_port()}", "token") as client:
        with pytest.raises(ApiError, match="no answer from http://") as caught:
            client.jobs()
        assert "secret" not in repr(client) + str(caught.value)
        with pytest.raises(ApiError):
            list(client.job("job").events(follow=True, patience=0.1))
        with pytest.raises(ApiError):
            client.job("job").wait(timeout=PATIENCE, patience=0.1)
    assert "vcasgd up" in (caught.value.remedy or "")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (reply(b"<html>It works!</html>"), "sent an unexpected response: .*address of the API"),
        (reply(b"oops", status=500), "^the API answered 500"),
    ],
    ids=["another server", "no problem"],
)
def test_response_that_is_none_is_an_error(answer: Answer, text: str) -> None:
    with fake_api(answer) as client, pytest.raises(ApiError, match=text):
        client.jobs()


def test_what_no_request_can_contain_is_an_error(api: Api, client: Client) -> None:
    job = client.job(api.submit())
    for send in (
        lambda: client.evict(machine="m-1", notice_seconds=math.inf),
        lambda: job.change(weight=math.nan),
        lambda: client.submit(spec(), zipped(), "schlüssel"),
    ):
        with pytest.raises(SpecError, match="the request can't be sent"):
            send()


@pytest.mark.parametrize("url", ["nonsense", "ftp://127.0.0.1/", "http://127.0.0.1:x/"])
def test_invalid_url_is_an_api_error(url: str) -> None:
    with pytest.raises(ApiError), Client(url, "token") as client:
        client.jobs()


@pytest.mark.parametrize("token", ["", " ", "secret-ü", "secret\nHost: evil"])
def test_invalid_token_is_not_quoted(token: str) -> None:
    with pytest.raises(SpecError, match="the token is empty or contains") as caught:
        Client("http://127.0.0.1:1", token)
    assert "secret" not in str(caught.value)


def test_fields_of_a_newer_api_are_ignored(api: Api, client: Client) -> None:
    row = client.job(api.submit()).model_dump(mode="json")
    newer = {
        **row, "novel": 1, "progress": {**row["progress"], "novel": 2},
        "spec": {**row["spec"], "novel": 3, "workers": {**row["spec"]["workers"], "novel": 4}},
    }  # fmt: skip

    assert JobView.model_validate(newer) == JobView.model_validate(row)
