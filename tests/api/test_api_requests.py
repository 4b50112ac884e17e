"""IDs of requests in responses, problems, jobs, and events."""

from __future__ import annotations

import httpx
import pytest
from support.api_harness import Api, zipped

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

    (asked,) = api.control.take_requests()
    assert (asked["machine"], asked["request"]) == ("i-1", "evict-1")


def test_changing_requests_are_logged_with_the_id(api: Api, http: httpx.Client) -> None:
    http.post("jobs/none-abc234/pause", headers={HEADER: "logged-1"})

    (line,) = [each for each in api.log.read_text().splitlines() if "request=logged-1" in each]
    assert "POST /api/v1/jobs/none-abc234/pause: 404" in line
