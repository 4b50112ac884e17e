"""Clients that connect and send nothing, send slowly, read nothing, or come in thousands."""

from __future__ import annotations

import json
import resource
import secrets
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from support.api_harness import Api, spec
from support.waiting import PATIENCE, await_truth

import vcasgd
from vcasgd.agent.connection import JoinToken
from vcasgd.api.connections import BoundedConnection, BoundedServer
from vcasgd.api.middleware import BodyLimit
from vcasgd.limits import (
    MAX_CONNECTIONS,
    MAX_REQUESTS_PER_TOKEN,
    MAX_STREAMS,
    MAX_STREAMS_PER_TOKEN,
    MAX_UPLOADS_PER_TOKEN,
)
from vcasgd.schemas.fleet import WorkerOrder
from vcasgd.store.ledger.machines import WorkerOrders

#: More than the buffers of a connection hold.
LARGE = 20_000_000


@pytest.fixture(autouse=True, scope="module")
def many_files() -> Iterator[None]:
    """Let this process open as many connections as the API accepts, and more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


def head(method: str, path: str, token: str | None = None, *lines: str) -> bytes:
    own = [f"Authorization: Bearer {token}"] if token else []
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *own, *lines, "", ""]).encode()


def status_of(client: socket.socket) -> int:
    """Return the status of the response, 0 if the connection ended without one."""
    answer = b""
    while b"\r\n" not in answer:
        try:
            part = client.recv(4096)
        except ConnectionError:
            part = b""
        if not part:
            return 0
        answer += part
    return int(answer.split()[1])


#: Seconds of a short time limit.
SHORT = 0.2


class Impatient(BoundedConnection):
    """A connection whose limits a test sets when its client is as slow as it should be."""

    head_timeout = unread_timeout = PATIENCE


async def _large(_: Request) -> Response:
    return PlainTextResponse("x" * LARGE)


async def _echo(request: Request) -> Response:
    return PlainTextResponse(f"{len(await request.body())}")


@dataclass
class Impatiently:
    """A server in this process that waits for bodies only shortly."""

    port: int

    def answers(self) -> bool:
        url = f"http://127.0.0.1:{self.port}/echo"
        return httpx.post(url, content=b"abc", timeout=PATIENCE).text == "3"


@pytest.fixture(scope="module")
def server() -> Iterator[Impatiently]:
    routes = [Route("/large", _large), Route("/echo", _echo, methods=["POST"])]
    app = BodyLimit(Starlette(routes=routes), public="-", own="-", seconds=SHORT)
    config = uvicorn.Config(app, http=Impatient, log_config=None, lifespan="off")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = BoundedServer(config)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        yield Impatiently(listener.getsockname()[1])
        server.should_exit = True
        thread.join(PATIENCE)


def has_ended(client: socket.socket) -> bool:
    try:
        return client.recv(1 << 16) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("sent", [b"", b"GET / HTT", b"GET / HTTP/1.1\r\nHost: x\r\nX: "])
def test_a_connection_without_a_request_ends(
    server: Impatiently, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(server.port) as client:
        client.sendall(sent)
        monkeypatch.setattr(Impatient, "head_timeout", SHORT)
        assert has_ended(client)


def test_a_head_that_comes_byte_by_byte_ends(
    server: Impatiently, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(server.port) as client:
        client.sendall(head("POST", "/echo", None, "Content-Length: 0"))
        assert status_of(client) == 200
        monkeypatch.setattr(Impatient, "head_timeout", SHORT)
        client.settimeout(0.05)

        def trickle() -> bool:
            try:
                client.sendall(b"x")
                return client.recv(4096) == b""
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        await_truth(trickle)


def test_a_body_that_does_not_arrive_is_refused(server: Impatiently) -> None:
    with connected(server.port) as client:
        client.sendall(head("POST", "/echo", None, "Content-Length: 10") + b"abc")
        assert status_of(client) == 408
    # The body of this one may come late, too, on a busy machine.
    await_truth(server.answers)


def test_a_client_that_reads_nothing_is_disconnected(
    server: Impatiently, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(server.port) as client:
        client.sendall(head("GET", "/large"))

        def unread() -> int:
            return len(client.recv(1 << 20, socket.MSG_PEEK))

        await_truth(unread)
        monkeypatch.setattr(Impatient, "unread_timeout", SHORT)
        # it never reads, so only the end of its connection can make this fail
        with pytest.raises(ConnectionError):
            await_truth(lambda: client.sendall(b"x"))


@contextmanager
def crowd(api: Api, size: int, sent: bytes) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        clients = []
        for _ in range(size):
            clients.append(stack.enter_context(connected(api.port)))
            clients[-1].sendall(sent)
        yield clients


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HTT", head("POST", "/api/v1/sign-in", None, "Content-Length: 100")],
    ids=["silent", "half a head", "no body"],
)
def test_a_crowd_without_a_token_takes_no_place_from_others(own_api: Api, sent: bytes) -> None:
    with own_api.http() as http, crowd(own_api, MAX_CONNECTIONS + 200, sent) as strangers:
        assert http.get("jobs").status_code == 200
        # Further ones come, and a request that is in progress keeps its place.
        with (
            http.stream("GET", "stream") as stream,
            crowd(own_api, MAX_CONNECTIONS, sent),
        ):
            assert stream.status_code == 200
            job = own_api.submit()
            assert any(job in line for line in stream.iter_lines())
            assert httpx.get(f"{own_api.url}/healthz", timeout=PATIENCE).status_code == 200
        # The oldest made room.
        assert has_ended(strangers[0])
    assert own_api.process.alive


def test_a_read_token_cannot_take_all_streams(own_api: Api) -> None:
    with own_api.http() as http:
        created = http.post("tokens", json={"name": "reader", "scope": "read"}).json()
    request = head("GET", "/api/v1/stream", created["token"], "Accept: text/event-stream")
    attempts = MAX_STREAMS + 10

    with ExitStack() as stack:
        statuses = []
        for _ in range(attempts):
            reader = stack.enter_context(connected(own_api.port))
            reader.sendall(request)
            statuses.append(status_of(reader))
        with own_api.http() as http, http.stream("GET", "stream") as stream:
            assert stream.status_code == 200
            assert http.get("jobs").status_code == 200
            with own_api.http(created["token"]) as own:
                refused = own.get("stream")
                assert own.get("jobs").status_code == 200

    refusals = attempts - MAX_STREAMS_PER_TOKEN
    assert statuses == [200] * MAX_STREAMS_PER_TOKEN + [429] * refusals
    assert refused.status_code == 429
    assert refused.headers["Retry-After"] == "1"
    assert refused.json()["detail"].startswith("the token reader has 64 streams in progress")
    # The places are free again.
    with own_api.http(created["token"]) as own:

        def answered() -> bool:
            with own.stream("GET", "stream") as stream:
                return stream.status_code == 200

        await_truth(answered)


def test_a_token_has_a_limited_number_of_requests_in_progress(own_api: Api) -> None:
    with own_api.http() as http:
        created = http.post("tokens", json={"name": "reader", "scope": "read"}).json()
        body = json.dumps({"yaml": "a: 1"}).encode()
        lines = "Content-Type: application/json", f"Content-Length: {len(body)}"
        request = head("POST", "/api/v1/jobs/validate", created["token"], *lines)

        with crowd(own_api, MAX_REQUESTS_PER_TOKEN + 1, request) as clients:
            # All but one wait for their bodies.
            (refused, *_), _, _ = select.select(clients, [], [], PATIENCE)
            assert http.get("jobs").status_code == 200
            for each in clients:
                if each is not refused:
                    each.sendall(body)
            statuses = [status_of(each) for each in clients]

    assert sorted(statuses) == [200] * MAX_REQUESTS_PER_TOKEN + [429]


def test_a_token_has_a_limited_number_of_uploads_in_progress(own_api: Api) -> None:
    with own_api.http() as http:
        created = http.post("tokens", json={"name": "ann", "scope": "submit"}).json()
        lines = "Content-Type: application/zip", "Content-Length: 100"
        path = f"packages/{'0' * 64}"
        request = head("PUT", f"/api/v1/{path}", created["token"], *lines)

        with crowd(own_api, MAX_UPLOADS_PER_TOKEN + 1, request) as clients:
            # All but one wait for their bodies.
            (refused, *_), _, _ = select.select(clients, [], [], PATIENCE)
            assert status_of(refused) == 429
            assert http.put(path, content=b"x").status_code == 422


def test_readers_that_do_not_read_packages_take_little_memory(own_api: Api) -> None:
    package, digest = secrets.token_bytes(LARGE), "0" * 64
    own_api.storage.put(f"packages/{digest}.zip", package)
    with own_api.http() as http:
        token = http.post("tokens", json={"name": "reader", "scope": "read"}).json()["token"]
        assert http.get(f"packages/{digest}").content == package
    before = own_api.process.peak_bytes()

    with crowd(own_api, 20, head("GET", f"/api/v1/packages/{digest}", token)) as readers:
        assert {status_of(each) for each in readers} == {200}
        assert own_api.process.peak_bytes() - before < 5 * LARGE


def test_machines_that_do_not_read_their_packages_take_little_memory(own_api: Api) -> None:
    own_api.end()
    own_api.start(VCASGD_TENSORS_URL=own_api.ledger.files.url)
    package = secrets.token_bytes(LARGE)
    own_api.storage.put("packages/large.zip", package)
    own_api.control.publish({}, {"volunteers": {"provider": "join"}})
    with own_api.http() as http:
        wanted = {"name": "ann", "scope": "join", "pool": "volunteers"}
        token = JoinToken.parse(http.post("tokens", json=wanted).json()["token"]).text
    with own_api.http(token) as http:
        facts = {"version": vcasgd.__version__, "host": "laptop", "cpus": 2.0, "memory_mb": 8000}
        http.headers["X-Vcasgd-Machine"] = own = secrets.token_hex(32)
        joined = http.post("join", json=facts)
        assert joined.status_code == 201, joined.text
        location = joined.headers["Location"]
        job = own_api.jobs.submit(spec(), "large").id
        machine = joined.json()["machine"]
        order = WorkerOrder(worker=f"{job}.{machine}", job=job, start="1", env={})
        WorkerOrders(own_api.connection).set({machine: [order]})
        path = f"{location}/packages/large"
        assert http.get(f"{own_api.url}{path}").content == package
        before = own_api.process.peak_bytes()

        with crowd(own_api, 20, head("GET", path, token, f"X-Vcasgd-Machine: {own}")) as readers:
            assert {status_of(each) for each in readers} == {200}
            assert http.post(f"machines/{machine}/report", json={}).status_code == 200
            assert own_api.process.peak_bytes() - before < 5 * LARGE
        assert http.delete(f"{own_api.url}{location}").status_code == 204
