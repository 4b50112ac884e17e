"""Authentication by token or by the dashboard's cookie, and secrecy of the token."""

from __future__ import annotations

import time
from collections.abc import Iterator
from http.cookies import SimpleCookie

import httpx
import pytest
from support.api_harness import Api, operations
from support.waiting import PATIENCE

import vcasgd
from vcasgd.api.callers import COOKIE, SIGN_IN_SECONDS, SignIns
from vcasgd.client import Client
from vcasgd.errors import Unauthorized

PUBLIC = {"/healthz", "/readyz", "/api/v1/openapi.json", "/wheel", "/wheel/{name}"}
#: The operation that receives the token.
OPEN = ("post", "/api/v1/sign-in")
PAGE = {"X-Vcasgd-Request": "dashboard"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic dXNlcjpwYXNz"},
        {"Authorization": b"Bearer \xff\xfe"},
        {"Cookie": f"{COOKIE}=\xff\xfe".encode("latin-1")},
        {"Cookie": COOKIE},
        {"Cookie": "=;=,\x01"},
    ],
)
def test_requests_without_the_token_are_refused(api: Api, headers: dict[str, str | bytes]) -> None:
    with api.visitor(headers) as http:
        found = [each[:2] for each in operations(http) if each[1] not in PUBLIC]
        assert len(found) > 20
        for method, path in [*found, ("get", "/api/v1/nothing"), ("get", "/api/v2/jobs")]:
            if (method, path) == OPEN:
                continue
            answer = http.request(method, f"{api.url}{path}", content=b"{")
            assert answer.status_code == 401, (method, path)
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert answer.headers["Content-Type"] == "application/problem+json"


def test_token_never_appears_in_logs_or_responses(api: Api, client: Client) -> None:
    client.jobs()
    with Client(api.url, "wr0ng-token") as stranger, pytest.raises(Unauthorized) as caught:
        stranger.jobs()

    log = api.log.read_text()
    for text in (repr(client), repr(vars(client)), log, str(caught.value)):
        assert api.token not in text
        assert "wr0ng-token" not in text
    assert api.ledger.files.password not in log


def test_unknown_route_and_wrong_method_return_problems(http: httpx.Client) -> None:
    unknown, wrong = http.get("nothing"), http.delete("jobs")

    assert (unknown.status_code, wrong.status_code) == (404, 405)
    assert unknown.json()["detail"] == "there is nothing at /api/v1/nothing"
    assert wrong.json()["title"] == "Method Not Allowed"
    assert wrong.headers["Allow"]
    for answer in (unknown, wrong):
        assert answer.headers["Content-Type"] == "application/problem+json"


@pytest.mark.parametrize("path", ["healthz", "metrics", "api/v1/jobs", "api/v1/openapi.json", "x"])
def test_no_browser_guesses_the_type_of_a_response(api: Api, path: str) -> None:
    answer = httpx.get(f"{api.url}/{path}", trust_env=False, timeout=PATIENCE)

    assert answer.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8700", 200),
        ("127.0.0.1", 200),
        ("[::1]:8700", 200),
        ("rebound.example:8700", 401),
        ("localhost.example", 401),
        ("192.0.2.1", 401),
        ("[", 401),
        ("", 401),
    ],
)
def test_a_page_whose_name_resolves_to_this_machine_reads_no_metrics(
    api: Api, host: str, status: int
) -> None:
    answer = httpx.get(
        f"{api.url}/metrics", headers={"Host": host}, trust_env=False, timeout=PATIENCE
    )

    assert answer.status_code == status


@pytest.fixture
def browser(api: Api) -> Iterator[httpx.Client]:
    with api.visitor() as browser:
        yield browser


def sign_in(api: Api, browser: httpx.Client, **headers: str) -> httpx.Response:
    return browser.post("sign-in", json={"token": api.token}, headers=headers)


def test_sign_in_and_out(api: Api, browser: httpx.Client) -> None:
    assert browser.get("sign-in").status_code == 401

    answer = sign_in(api, browser)

    assert (answer.status_code, answer.content) == (204, b"")
    assert browser.get("sign-in").json() == {
        "signed_in": True, "cluster": "vcasgd", "version": vcasgd.__version__,
    }  # fmt: skip
    assert browser.get("jobs").json() == []
    assert browser.delete("sign-in", headers=PAGE).status_code == 204
    assert browser.get("sign-in").status_code == 401


def test_cookie_is_protected_and_contains_no_token(api: Api, browser: httpx.Client) -> None:
    header = sign_in(api, browser).headers["Set-Cookie"]
    proxied = sign_in(api, browser, **{"X-Forwarded-Proto": "https"}).headers["Set-Cookie"]

    cookie = SimpleCookie(header)[COOKIE]
    assert api.token not in header
    assert (cookie["httponly"], cookie["samesite"].lower(), cookie["path"]) == (True, "strict", "/")
    assert cookie["max-age"] == str(SIGN_IN_SECONDS)
    assert not cookie["secure"]
    assert SimpleCookie(proxied)[COOKIE]["secure"]


@pytest.mark.parametrize("token", ["", "wrong", "wr\u00f6ng"])
def test_wrong_token_does_not_sign_in(browser: httpx.Client, token: str) -> None:
    answer = browser.post("sign-in", json={"token": token})

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
    dashboard = {**PAGE, "Origin": api.url, "Sec-Fetch-Site": "same-origin"}
    assert browser.post(f"jobs/{job}/cancel", headers=dashboard).status_code == 200


def test_other_sites_cannot_sign_in(api: Api, browser: httpx.Client) -> None:
    answer = sign_in(api, browser, Origin="https://evil.example")

    assert (answer.status_code, "Set-Cookie" in answer.headers) == (403, False)


def test_a_sign_in_expires_and_cannot_be_forged(monkeypatch: pytest.MonkeyPatch) -> None:
    start = 1_800_000_000
    monkeypatch.setattr(time, "time", lambda: start)
    sign_ins = SignIns("token")
    cookie = sign_ins.new()
    monkeypatch.setattr(time, "time", lambda: start + 1000)
    content, time_part, signature = cookie.split(".")
    later = f"{content}.{sign_ins.new().split('.')[1]}.{signature}"

    assert sign_ins.read(cookie)
    assert sign_ins.among(f"theme=dark; {COOKIE}={cookie}") == sign_ins.read(cookie)
    assert later != cookie
    for forged in (
        later, f"x{content}.{time_part}.{signature}", "", "..", "x", cookie[:-1], f"{cookie}0",
        cookie.upper(), "9" * 99,
    ):  # fmt: skip
        assert not sign_ins.read(forged), forged
    assert not SignIns("another").read(cookie)
    assert SignIns("token").read(cookie), "another process of the API accepts it"
    monkeypatch.setattr(time, "time", lambda: start - 30)
    assert sign_ins.read(cookie), "from a clock that is ahead"
    monkeypatch.setattr(time, "time", lambda: start + SIGN_IN_SECONDS)
    assert not sign_ins.read(cookie)
