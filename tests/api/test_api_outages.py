"""Outages of the ledger and the storage, invalid settings, and shutdown of the API."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path

import httpx
import pytest
from support.api_harness import Api, spec, zipped
from support.waiting import PATIENCE, await_truth
from typer.testing import CliRunner

from vcasgd.cli.commands import app as cli
from vcasgd.errors import ApiError
from vcasgd.fleet.providers.local.processes import Process
from vcasgd.stack import PartState, StackHome, StackPhase, StackState


def get(api: Api, path: str) -> httpx.Response:
    return httpx.get(api.url + path, timeout=PATIENCE, trust_env=False)


def test_api_reports_a_missing_ledger_and_recovers(own_api: Api) -> None:
    job = own_api.submit()
    with own_api.client() as client, own_api.http() as http:
        own_api.ledger.kill()

        answer = http.get("jobs")
        assert answer.status_code == 503
        assert answer.headers["Retry-After"] == "1"
        assert answer.json()["type"] == "urn:vcasgd:problem:store-unavailable"
        with pytest.raises(ApiError) as caught:
            client.job(job).pause()
        assert caught.value.status == 503
        assert get(own_api, "/healthz").status_code == 200
        ready = get(own_api, "/readyz")
        assert (ready.status_code, ready.json()["status"]) == (503, "unavailable")
        assert "ledger" in ready.json()["reasons"][0]

        own_api.ledger.start()
        await_truth(lambda: get(own_api, "/readyz").status_code == 200)
        assert client.job(job).id == job


def test_a_ledger_without_writes_is_reported(own_api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in own_api.env.items():
        monkeypatch.setenv(name, value)
    status = CliRunner().invoke(cli, ["status"])
    assert (status.exit_code, "active jobs: 0" in status.stdout) == (0, True)

    own_api.connection.execute_command("REPLICAOF", "127.0.0.1", "1")

    status = CliRunner().invoke(cli, ["status"])
    assert status.exit_code == 1
    assert "the store takes no writes" in status.output
    # Also in the row of a stack's ledger
    part = PartState(os.getpid(), Process.of(os.getpid()).started, ready=True)
    parts = {"ledger": part, "tensors": part}
    home = StackHome(own_api.home)
    StackState(StackPhase.READY, part, own_api.url, parts=parts).write(home.path)
    monkeypatch.delenv("VCASGD_API_URL")
    lock = home.acquire()
    assert lock is not None
    with lock:
        rows = json.loads(CliRunner().invoke(cli, ["status", "--json"]).stdout)["parts"]
    assert {row["name"]: row["ready"] for row in rows} == {"ledger": False, "tensors": True}
    monkeypatch.setenv("VCASGD_API_URL", own_api.url)
    own_api.connection.execute_command("REPLICAOF", "NO", "ONE")
    assert CliRunner().invoke(cli, ["status"]).exit_code == 0


def test_hanging_ledger_is_reported(own_api: Api) -> None:
    own_api.ledger.process.freeze()
    try:
        ready = get(own_api, "/readyz")
    finally:
        own_api.ledger.process.thaw()

    assert ready.status_code == 503
    assert "does not answer" in ready.json()["reasons"][0]


def test_follower_survives_a_restart_of_the_ledger(own_api: Api) -> None:
    job = own_api.submit()
    with own_api.client() as client:
        events = client.job(job).events(follow=True)
        assert next(events).kind == "submitted"

        own_api.ledger.kill()
        own_api.ledger.start()
        own_api.jobs.event(job, "note", "back again")
        own_api.finish(job)

        assert [event.kind for event in events] == ["note", "job-succeeded"]


def test_full_ledger_refuses_new_jobs_and_shows_why(
    own_api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, ended = own_api.submit(), own_api.submit()
    own_api.start_job(job)
    own_api.finish(ended)
    ledger = own_api.connection
    with own_api.client() as client, own_api.http() as http:
        package = zipped()
        client.submit(spec(), package, idempotency_key="k")
        ledger.config_set("maxmemory", ledger.info("memory")["used_memory"])

        # New jobs are refused with the reason, repeated requests are not
        with pytest.raises(ApiError, match="accepts no new jobs; running jobs continue") as caught:
            client.submit(spec(), zipped())
        assert caught.value.status == 507
        assert caught.value.details["problem"]["type"] == "urn:vcasgd:problem:store-full"
        assert "vcasgd delete" in (caught.value.remedy or "")
        assert client.submit(spec(), package, idempotency_key="k").id
        # The state is shown
        assert http.get("store").json()["ledger"]["full"]
        assert http.get("status").json()["ledger_full"]
        assert "vcasgd_ledger_full 1.0" in get(own_api, "/metrics").text
        monkeypatch.setenv("VCASGD_TOKEN", own_api.token)
        shown = CliRunner().invoke(cli, ["status", "--url", own_api.url])
        assert "new jobs are refused" in shown.stderr
        # Everything else goes on
        client.job(job).pause()
        client.job(job).resume()
        http.delete(f"jobs/{ended}").raise_for_status()
        client.job(job).cancel()

        ledger.config_set("maxmemory", 0)
        assert client.submit(spec(), zipped()).id
        assert not http.get("status").json()["ledger_full"]


def test_missing_storage_affects_files_only(own_api: Api) -> None:
    job = own_api.submit()
    shutil.rmtree(own_api.home / "storage")
    (own_api.home / "storage").write_text("not a folder")

    with own_api.client() as client, own_api.http() as http:
        assert client.job(job).id == job
        for answer in (
            http.get(f"jobs/{job}/checkpoints"),
            http.head(f"packages/{'0' * 64}"),
            http.post("jobs", json={"spec": spec().model_dump(mode="json"), "package": "0" * 64}),
        ):
            assert answer.status_code == 503, answer.text
        with pytest.raises(ApiError, match="503 Service Unavailable"):
            client.submit(spec(), zipped())


def failed(api: Api, **env: str) -> str:
    api.log.write_text("")
    process = api.launch(**env)
    try:
        assert process.wait() == 1
    finally:
        process.end()
    said = api.log.read_text()
    assert "Traceback" not in said
    assert api.token not in said
    assert "word@host" not in said
    return said


def test_port_in_use_is_reported_with_a_remedy(own_api: Api) -> None:
    said = failed(own_api)

    assert f"PortInUse: port {own_api.port} of 127.0.0.1 is in use" in said
    assert "VCASGD_API_URL" in said


@pytest.fixture
def unstarted(tmp_path: Path, shared_api: Api) -> Api:
    return Api(tmp_path, shared_api.ledger)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("VCASGD_TOKEN", "", "VCASGD_TOKEN is not set"),
        ("VCASGD_TOKEN", "fifteen letters", "VCASGD_TOKEN has fewer than 16 characters"),
        ("VCASGD_HEARTBEAT", "fast", "VCASGD_HEARTBEAT: "),
        ("VCASGD_API_URL", "nonsense", "VCASGD_API_URL: nonsense must have the form"),
        ("VCASGD_API_URL", "http://127.0.0.1:999999", "VCASGD_API_URL: "),
        ("VCASGD_API_URL", "http://192.0.2.1:8700", "can't listen on 192.0.2.1 port 8700"),
        ("VCASGD_LEDGER_URL", "nonsense", "VCASGD_LEDGER_URL: is not of the form"),
        ("VCASGD_LEDGER_URL", "redis://:pass/word@host", "VCASGD_LEDGER_URL: is not of the form"),
        ("VCASGD_STORAGE_URL", "nonsense", "VCASGD_STORAGE_URL"),
        ("VCASGD_LOG_LEVEL", "loud", "VCASGD_LOG_LEVEL"),
    ],
)
def test_invalid_setting_is_named(unstarted: Api, name: str, value: str, said: str) -> None:
    assert said in failed(unstarted, **{name: value})


def test_api_starts_without_the_ledger(unstarted: Api) -> None:
    try:
        # It waits for the ledger for the time of a lease.
        unstarted.start(VCASGD_LEDGER_URL="redis://127.0.0.1:1/0", VCASGD_HEARTBEAT="0.1")
        assert get(unstarted, "/healthz").status_code == 200
        assert get(unstarted, "/readyz").status_code == 503
    finally:
        unstarted.end()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_api_stops_while_clients_follow(own_api: Api, number: signal.Signals) -> None:
    job = own_api.submit()
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            events = stack.enter_context(own_api.client()).job(job).events(follow=True, patience=0)
            assert next(events).kind == "submitted"
        os.kill(own_api.process.pid, number)
        assert own_api.process.wait() == 0

    assert "Traceback" not in own_api.log.read_text()


def test_api_stops_while_the_ledger_hangs(own_api: Api) -> None:
    job = own_api.submit()
    with own_api.client() as client:
        events = client.job(job).events(follow=True, patience=0)
        assert next(events).kind == "submitted"
        own_api.ledger.process.freeze()
        try:
            time.sleep(0.5)
            assert own_api.process.terminate() == 0
        finally:
            own_api.ledger.process.thaw()


@pytest.mark.slow
@pytest.mark.extended
def test_an_idle_connection_is_open_for_longer_than_clients_keep_theirs(own_api: Api) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", own_api.port, timeout=PATIENCE)
    with contextlib.closing(connection):
        for _ in range(2):
            connection.request("GET", "/healthz")
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200
            # httpx and most browsers close theirs after 5 s.
            time.sleep(6)


def test_early_disconnect_causes_no_error(own_api: Api) -> None:
    job = own_api.submit()
    request = (
        f"GET /api/v1/jobs/{job}/events HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\n"
        f"Authorization: Bearer {own_api.token}\r\n\r\n"
    )
    upload = (
        f"PUT /api/v1/packages/{'0' * 64} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n"
        f"Authorization: Bearer {own_api.token}\r\n\r\nbut no more"
    )
    for text in (request, upload) * 3:
        with socket.create_connection(("127.0.0.1", own_api.port)) as connection:
            connection.sendall(text.encode())
            time.sleep(0.05)

    with own_api.client() as client:
        assert client.job(job).id == job
    assert own_api.process.terminate() == 0
    assert "Traceback" not in own_api.log.read_text()
