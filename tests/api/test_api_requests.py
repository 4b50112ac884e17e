"""IDs of requests in responses, problems, jobs, and events; requests that are invalid."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import pytest
from support.api_harness import Api, zipped
from support.waiting import PATIENCE

from vcasgd.client import Client
from vcasgd.store.ledger.job import JobState

HEADER = "X-Request-ID"


def test_request_id_is_returned(http: httpx.Client) -> None:
    assert http.get("status", headers={HEADER: "trace-1:2.3_4"}).headers[HEADER] == "trace-1:2.3_4"


@pytest.mark.parametrize("sent", [None, "", "two words", "x" * 65, "ä".encode(), "a\tb", '"', "{}"])
def test_missing_request_id_is_generated(http: httpx.Client, sent: str | bytes | None) -> None:
    headers = {} if sent is None else {HEADER: sent}
    first, second = (http.get("status", headers=headers).headers[HEADER] for _ in range(2))

    assert len(first) == len(second) == 32
    assert first != second


def test_problem_contains_the_request_id(http: httpx.Client, api: Api) -> None:
    answer = http.get("jobs/none-abc234", headers={HEADER: "asked-1"})
    assert (answer.headers[HEADER], answer.json()["request"]) == ("asked-1", "asked-1")

    with api.http("wrong") as stranger:
        refused = stranger.get("jobs")
    assert refused.status_code == 401
    assert refused.json()["request"] == refused.headers[HEADER]


def test_job_and_its_events_contain_the_request_id(
    api: Api, http: httpx.Client, client: Client
) -> None:
    # Given a job that was submitted by one request
    digest = client.upload(zipped())
    body = {"spec": {"name": "x", "task": "a:B", "epochs": 1, "subtasks_per_epoch": 2},
            "package": digest}  # fmt: skip
    job = http.post("jobs", json=body, headers={HEADER: "submit-1"}).json()
    assert job["request"] == "submit-1"
    assert api.jobs.transition(job["id"], JobState.RUNNING, [JobState.STARTING], why="started")

    # When another one pauses it
    http.post(f"jobs/{job['id']}/pause", headers={HEADER: "pause-1"})

    # Then each event has the ID of the request that caused it, or of the first one
    events = http.get(f"jobs/{job['id']}/events").json()
    assert [(each["kind"], each["request"]) for each in events] == [
        ("submitted", "submit-1"),
        ("job-running", "submit-1"),
        ("job-paused", "pause-1"),
    ]


def test_eviction_passes_the_request_id_to_the_controller(api: Api, http: httpx.Client) -> None:
    api.control.publish({"i-1": {"pool": "local", "state": "running"}}, {})

    http.post("machines/i-1/evict", json={"kill": True}, headers={HEADER: "evict-1"})

    [(asked, _)] = api.control.requests()
    assert (asked["machine"], asked["request"]) == ("i-1", "evict-1")


def test_changing_requests_are_logged_with_the_id(api: Api, http: httpx.Client) -> None:
    http.post("jobs/none-abc234/pause", headers={HEADER: "logged-1"})

    (line,) = [each for each in api.log.read_text().splitlines() if "request=logged-1" in each]
    assert "POST /api/v1/jobs/none-abc234/pause: 404" in line


def test_requests_fill_no_log(api: Api, http: httpx.Client) -> None:
    # Given requests with long paths, of which one has no token
    path = f"jobs/{'x' * 5000}/pause"
    with api.http("wrong") as stranger:
        assert stranger.post(path, headers={HEADER: "stranger-1"}).status_code == 401
    # and one that is none
    with socket.create_connection(("127.0.0.1", httpx.URL(api.url).port), PATIENCE) as connection:
        connection.sendall(b"stranger-1\r\n\r\n")
        assert b" 400 " in connection.recv(1000)
    http.post(path, headers={HEADER: "long-1"})

    lines = api.log.read_text().splitlines()
    (line,) = [each for each in lines if "request=long-1" in each]
    assert len(line) < 500
    assert not [each for each in lines if "stranger-1" in each or "Invalid" in each]


#: IDs of other forms, some of which Redis would take.
IDS = ("x", "-1", "1-2-3", "9" * 30, "$", "1\n", "\u0663")
PLACES = ("x", "1", "-", "1-2/a b", "1-2/\u0663")
TOKEN = {"name": "ann", "scope": "read"}


@pytest.mark.parametrize(
    ("method", "path", "sent", "field"),
    [
        *(("GET", f"jobs?{query}", {}, query.partition("=")[0])
          for query in ("limit=0", "limit=x", "limit=1001", "state=great")),
        *(("POST", "jobs", {"json": {}, "headers": {"Idempotency-Key": key}}, "Idempotency-Key")
          for key in ("", "x" * 201, "caf\u00e9".encode("latin-1"))),
        *(("GET", f"jobs/{{job}}/{what}", {"params": {"after": after}}, "after")
          for what in ("events", "logs", "metrics") for after in IDS),
        ("GET", "jobs/{job}/events", {"headers": {"Last-Event-ID": "nonsense"}}, "Last-Event-ID"),
        *(("GET", "stream", {"params": {"after": place}}, "after") for place in PLACES),
        *(("GET", "stream", {"headers": {"Last-Event-ID": place.encode()}}, "Last-Event-ID")
          for place in PLACES),
        *(("GET", f"jobs/{{job}}/subtasks?epoch={epoch}", {}, "epoch") for epoch in "03x"),
        *(("POST", "machines/i-1/evict", {"json": how}, field) for how, field in (
            ({"notice_seconds": -1}, "notice_seconds"),
            ({"notice_seconds": "soon"}, "notice_seconds"),
            ({"notice_seconds": 1e9}, "notice_seconds"),
            ({"kill": True, "notice_seconds": 5}, "kill"),
            ({"kil": True}, "kil"),
        )),
        *(("POST", "tokens", {"json": {**TOKEN, **fields}}, next(iter(fields))) for fields in (
            {"name": "Ann"}, {"name": "bootstrap"}, {"scope": "root"}, {"max_machines": 0},
            {"max_machines": 10**7}, {"expires": "soon"}, {"expires": "9999d"}, {"secret": "x"},
        )),
        *(("PUT", f"packages/{digest}", {"content": b""}, "digest")
          for digest in ("x", "A" * 64, "0" * 63, "0" * 65, "0" * 64 + "%0a")),
    ],
)  # fmt: skip
def test_an_invalid_request_is_refused_and_names_the_field(
    api: Api, http: httpx.Client, method: str, path: str, sent: dict[str, Any], field: str
) -> None:
    api.control.publish({"i-1": {"pool": "local"}}, {})

    answer = http.request(method, path.format(job=api.submit()), **sent)

    assert (answer.status_code, answer.json()["field"].lower()) == (422, field.lower())
    assert api.control.requests() == []
