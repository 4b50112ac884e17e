"""The client against servers that misbehave."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.api_harness import Api
from support.ports import free_port
from support.waiting import PATIENCE

from vcasgd.client import Client, JobView
from vcasgd.client.following import Message, parse
from vcasgd.errors import ApiError, CheckpointDamaged, NotFound, SpecError

Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def fake_api(*answers: Answer) -> Iterator[Client]:
    """Answers one request after another; the last answer is given again and again."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer = left.pop(0) if len(left) > 1 else left[0]
            answer(self)
            self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            with Client(url, "token", timeout=PATIENCE) as client:
                yield client
        finally:
            server.shutdown()
            thread.join(PATIENCE)


def reply(
    content: bytes = b"", status: int = 200, cut: int = 0, check: Any = None, **headers: str
) -> Answer:
    """``cut``: how much of what was promised is never sent."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if check is not None:
            check(handler.headers)
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(content) + cut))
        handler.end_headers()
        handler.wfile.write(content)

    return answer


def events(*numbers: int, end: bool = False) -> bytes:
    blocks = [
        f"id: {number}-0\r\nevent: count\r\ndata: "
        + json.dumps({"id": f"{number}-0", "at": 1.0, "kind": "count", "text": "", "details": {}})
        for number in numbers
    ]
    blocks += ['event: end\r\ndata: {"state": "failed"}'] if end else []
    return "".join(f"{block}\r\n\r\n" for block in blocks).encode()


# -- following ----------------------------------------------------------------------------------


def test_a_broken_stream_is_taken_up_where_it_broke() -> None:
    asked = []
    torn = events(1, 2) + events(3)[:-4]

    with fake_api(
        reply(torn, cut=100, check=lambda headers: asked.append(headers["Last-Event-ID"])),
        reply(b"<html>gateway</html>", status=502),
        reply(events(3), check=lambda headers: asked.append(headers["Last-Event-ID"])),
        reply(events(4, end=True), check=lambda headers: asked.append(headers["Last-Event-ID"])),
    ) as client:
        seen = [event.id for event in client.events("job", after="0-5", follow=True)]

    assert seen == ["1-0", "2-0", "3-0", "4-0"]
    assert asked == ["0-5", "2-0", "3-0"]


def test_a_follower_gives_up_after_its_patience() -> None:
    with fake_api(reply(status=503)) as client, pytest.raises(ApiError) as caught:
        list(client.events("job", follow=True, patience=0.5))
    assert caught.value.status == 503


def test_a_stream_that_never_says_anything_is_given_up() -> None:
    with fake_api(reply()) as client, pytest.raises(ApiError, match="before the job did"):
        list(client.logs("job", follow=True, patience=0.3))


def test_patience_begins_with_the_first_failure() -> None:
    """A caller that takes its time over an event must not lose the next."""
    with fake_api(reply(events(1)), reply(events(2, end=True))) as client:
        seen = []
        for event in client.events("job", follow=True, patience=0.4):
            seen.append(event.id)
            time.sleep(0.6)
    assert seen == ["1-0", "2-0"]


def test_what_waiting_does_not_mend_is_raised_at_once() -> None:
    with fake_api(reply(status=404)) as client, pytest.raises(NotFound):
        list(client.events("job", follow=True))


def test_parsing() -> None:
    lines = [": keep-alive", "", "id: 1", "event: note", "data: a", "data:b", "retry: 5", "",
             "data: plain", "", "id: 3", "", "id: 4", "data: cut off"]  # fmt: skip

    assert list(parse(iter(lines))) == [
        Message("1", "note", "a\nb"),
        Message(None, "message", "plain"),
    ]


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
def test_a_download_is_whole_or_not_there(
    tmp_path: Path, answer: Answer, error: type[Exception]
) -> None:
    path = tmp_path / "model"
    path.write_text("what was there")

    with fake_api(answer) as client, pytest.raises(error):
        client.download("job", path)

    assert path.read_text() == "what was there"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["../../evil", "/etc/evil", "evil"])
def test_a_download_stays_in_its_directory(tmp_path: Path, name: str) -> None:
    disposition = {"Content-Disposition": f'attachment; filename="{name}"'}

    with fake_api(reply(b"data", ETag=etag(b"data"), **disposition)) as client:
        assert client.download("job", tmp_path) == tmp_path / "evil"


def test_a_folder_that_does_not_exist_is_said(tmp_path: Path) -> None:
    with fake_api(reply(b"data", ETag=etag(b"data"))) as client, pytest.raises(FileNotFoundError):
        client.download("job", tmp_path / "nowhere" / "model")


# -- answers that are none ------------------------------------------------------------------------


def test_nobody_there_is_an_error_with_a_remedy() -> None:
    with Client(f"http://127.0.0.1:{free_port()}", "token") as client:
        with pytest.raises(ApiError, match="no answer from http://127") as caught:
            client.jobs()
        with pytest.raises(ApiError):
            list(client.events("job", follow=True, patience=0.1))
        with pytest.raises(ApiError):
            client.wait("job", timeout=PATIENCE, patience=0.1)
    assert "vcasgd up" in (caught.value.remedy or "")


def test_another_server_on_that_port_is_noticed() -> None:
    with fake_api(reply(b"<html>It works!</html>")) as client:
        with pytest.raises(ApiError, match="something else than JSON") as caught:
            client.jobs()
        assert "address of the API" in (caught.value.remedy or "")


def test_an_answer_without_a_document_is_said() -> None:
    with fake_api(reply(b"oops", status=500)) as client, pytest.raises(ApiError) as caught:
        client.jobs()
    assert str(caught.value).startswith("the API answered 500")


@pytest.mark.parametrize("url", ["nonsense", "ftp://127.0.0.1/", "http://127.0.0.1:x/"])
def test_a_url_that_is_none_is_an_error_of_ours(url: str) -> None:
    with pytest.raises(ApiError), Client(url, "token") as client:
        client.jobs()


@pytest.mark.parametrize("token", ["", " ", "secret-ü", "secret\nHost: evil"])
def test_a_token_that_cannot_be_sent_is_not_quoted(token: str) -> None:
    with pytest.raises(SpecError, match="the token is empty or holds") as caught:
        Client("http://127.0.0.1:1", token)
    assert "secret" not in str(caught.value)


def test_a_password_in_the_url_is_not_shown() -> None:
    port = free_port()
    with Client(f"http://me:secret@127.0.0.1:{port}", "token") as client:
        with pytest.raises(ApiError) as caught:
            client.jobs()
        assert "secret" not in repr(client) + str(caught.value)


def test_waiting_has_an_end(api: Api, client: Client) -> None:
    job = api.submit()

    with pytest.raises(ApiError, match=f"{job} is not over after 0.2 s"):
        client.wait(job, timeout=0.2)


def test_fields_of_a_newer_api_are_passed_over(api: Api, client: Client) -> None:
    row = client.job(api.submit()).to_dict()
    newer = {**row, "novel": 1, "progress": {**row["progress"], "novel": 2}}

    assert JobView.from_json(newer) == JobView.from_json(row)
