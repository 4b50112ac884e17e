"""Sessions of the dashboard: cookies, their lifetime, and protection from other sites."""

from __future__ import annotations

import time
from collections.abc import Iterator
from http.cookies import SimpleCookie

import httpx
import pytest
from support.api_harness import Api

import vcasgd
from vcasgd.api.sessions import COOKIE, SESSION_SECONDS, Sessions

PAGE = {"X-Vcasgd-Request": "dashboard"}


@pytest.fixture
def browser(api: Api) -> Iterator[httpx.Client]:
    """Return an HTTP client without the token."""
    with httpx.Client(base_url=f"{api.url}/api/v1/", trust_env=False) as browser:
        yield browser


def sign_in(api: Api, browser: httpx.Client, **headers: str) -> httpx.Response:
    return browser.post("session", json={"token": api.token}, headers=headers)


def test_sign_in_and_out(api: Api, browser: httpx.Client) -> None:
    assert browser.get("session").status_code == 401

    answer = sign_in(api, browser)

    assert (answer.status_code, answer.content) == (204, b"")
    assert browser.get("session").json() == {
        "signed_in": True, "cluster": "vcasgd", "version": vcasgd.__version__,
    }  # fmt: skip
    assert browser.get("jobs").json() == []
    assert browser.delete("session", headers=PAGE).status_code == 204
    assert browser.get("session").status_code == 401


def test_cookie_is_protected_and_contains_no_token(api: Api, browser: httpx.Client) -> None:
    header = sign_in(api, browser).headers["Set-Cookie"]
    proxied = sign_in(api, browser, **{"X-Forwarded-Proto": "https"}).headers["Set-Cookie"]

    cookie = SimpleCookie(header)[COOKIE]
    assert api.token not in header
    assert (cookie["httponly"], cookie["samesite"].lower(), cookie["path"]) == (True, "strict", "/")
    assert cookie["max-age"] == str(SESSION_SECONDS)
    assert not cookie["secure"]
    assert SimpleCookie(proxied)[COOKIE]["secure"]


@pytest.mark.parametrize("token", ["", "wrong", "wr\u00f6ng"])
def test_wrong_token_does_not_sign_in(browser: httpx.Client, token: str) -> None:
    answer = browser.post("session", json={"token": token})

    assert answer.status_code == 401
    assert "Set-Cookie" not in answer.headers


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"X-Vcasgd-Request": "something"},
        {**PAGE, "Origin": "https://evil.example"},
        {**PAGE, "Origin": "null"},
        {**PAGE, "Origin": "http://127.0.0.1:1"},
        {**PAGE, "Sec-Fetch-Site": "cross-site"},
        {**PAGE, "Sec-Fetch-Site": "same-site"},
    ],
)
def test_other_sites_cannot_change_anything(
    api: Api, browser: httpx.Client, headers: dict[str, str]
) -> None:
    job = api.submit()
    sign_in(api, browser)

    answer = browser.post(f"jobs/{job}/cancel", headers=headers)

    assert (answer.status_code, answer.json()["type"]) == (403, "urn:vcasgd:problem:forbidden")
    assert api.jobs.get(job).state == "starting"


def test_dashboard_can_change_things(api: Api, browser: httpx.Client) -> None:
    job = api.submit()
    sign_in(api, browser)
    headers = {**PAGE, "Origin": api.url, "Sec-Fetch-Site": "same-origin"}

    assert browser.post(f"jobs/{job}/cancel", headers=headers).status_code == 200


def test_other_sites_cannot_sign_in(api: Api, browser: httpx.Client) -> None:
    answer = sign_in(api, browser, Origin="https://evil.example")

    assert (answer.status_code, "Set-Cookie" in answer.headers) == (403, False)


def test_session_expires_and_cannot_be_forged(monkeypatch: pytest.MonkeyPatch) -> None:
    start = 1_800_000_000
    monkeypatch.setattr(time, "time", lambda: start)
    sessions = Sessions("token")
    session = sessions.new()
    monkeypatch.setattr(time, "time", lambda: start + 1000)
    nonce, time_part, signature = session.split(".")
    later = f"{nonce}.{sessions.new().split('.')[1]}.{signature}"

    assert sessions.read(session)
    assert sessions.among(f"theme=dark; {COOKIE}={session}") == sessions.read(session)
    assert later != session
    for forged in (
        later, f"x{nonce}.{time_part}.{signature}", "", "..", "x", session[:-1], f"{session}0",
        session.upper(), "9" * 99,
    ):  # fmt: skip
        assert not sessions.read(forged), forged
    assert not Sessions("another").read(session)
    assert Sessions("token").read(session), "another process of the API accepts it"
    monkeypatch.setattr(time, "time", lambda: start + SESSION_SECONDS)
    assert not sessions.read(session)


def test_session_from_a_clock_that_is_ahead_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 30)
    session = Sessions("token").new()
    monkeypatch.undo()

    assert Sessions("token").read(session)


@pytest.mark.parametrize("cookie", [b"vcasgd_session=\xff\xfe", b"vcasgd_session", b"=;=,\x01"])
def test_invalid_cookie_is_refused(browser: httpx.Client, cookie: bytes) -> None:
    answer = browser.get("jobs", headers={"Cookie": cookie})

    assert answer.status_code == 401
