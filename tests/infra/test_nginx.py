"""The proxy of the control plane: a real nginx with its configuration, in front of a real API."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from http.cookies import SimpleCookie
from pathlib import Path

import httpx
import pytest
from support.api_harness import Api
from support.children import Process
from support.missing import skip_here
from support.ports import free_port, listens
from support.waiting import PATIENCE, await_truth

from vcasgd.api.callers import COOKIE
from vcasgd.client import Client
from vcasgd.client.problems import may_work_later
from vcasgd.errors import ApiError, SpecError

CONFIGURATION = Path(__file__).parents[2] / "infra/nginx/vcasgd.conf"
#: Directives of the main nginx.conf, which includes the tested file.
_AROUND = """\
daemon off; pid {home}/pid; error_log stderr; events {{}}
http {{
  access_log off;
  client_body_temp_path {home}/body; proxy_temp_path {home}/proxy; fastcgi_temp_path {home}/fastcgi;
  uwsgi_temp_path {home}/uwsgi; scgi_temp_path {home}/scgi;
  {server}
}}
"""


@pytest.fixture
def site(api: Api, tmp_path: Path) -> Iterator[str]:
    """Return the URL of the proxy, on a port that is not the default one."""
    nginx, port = require_nginx(), free_port()
    text = CONFIGURATION.read_text()
    for ours, machines in (
        (str(tmp_path), "/var/lib/vcasgd/ledger/tls"),
        (f"listen 127.0.0.1:{port} ssl", "listen 443 ssl"),
        ("", "listen [::]:443 ssl default_server;"),
        (api.url, "http://127.0.0.1:8700"),
    ):
        assert text.count(machines) >= 1, machines
        text = text.replace(machines, ours)
    make_certificate(tmp_path)
    (tmp_path / "nginx.conf").write_text(_AROUND.format(home=tmp_path, server=text))
    process = Process([nginx, "-c", str(tmp_path / "nginx.conf")], tmp_path / "log")
    try:
        await_truth(lambda: listens(port) or not process.alive)
        assert process.alive, (tmp_path / "log").read_text()
        yield f"https://localhost:{port}"
    finally:
        process.end()


def require_nginx() -> str:
    """Return the program. Skips the test if it is missing, but never in CI."""
    found = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if found is None:
        skip_here("nginx is not installed (Debian: apt install nginx-light)")
    return found


def make_certificate(folder: Path) -> None:
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", folder / "api.key", "-out", folder / "api.pem"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *subject, *files]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def browser(site: str, tmp_path: Path) -> Iterator[httpx.Client]:
    trusted = ssl.create_default_context(cafile=str(tmp_path / "api.pem"))
    with httpx.Client(base_url=site, verify=trusted, timeout=PATIENCE, trust_env=False) as browser:
        yield browser


def test_metrics_need_the_token(api: Api, browser: httpx.Client) -> None:
    assert httpx.get(f"{api.url}/metrics", trust_env=False, timeout=PATIENCE).status_code == 200
    assert browser.get("/metrics").status_code == 401
    own = {"X-Forwarded-For": "127.0.0.1"}
    assert browser.get("/metrics", headers=own).status_code == 401
    token = {"Authorization": f"Bearer {api.token}"}
    assert browser.get("/metrics", headers=token).status_code == 200


def test_dashboard_works_on_any_port_and_its_cookie_is_for_tls_only(
    api: Api, site: str, browser: httpx.Client
) -> None:
    page = {"Origin": site, "Sec-Fetch-Site": "same-origin"}

    signed_in = browser.post("/api/v1/sign-in", json={"token": api.token}, headers=page)

    assert signed_in.status_code == 204
    cookie = SimpleCookie(signed_in.headers["Set-Cookie"])[COOKIE]
    assert cookie["secure"]
    assert browser.get("/api/v1/jobs").status_code == 200
    page["X-Vcasgd-Request"] = "dashboard"
    assert browser.delete("/api/v1/sign-in", headers=page).status_code == 204


def test_pages_of_another_port_are_another_site(api: Api, site: str, browser: httpx.Client) -> None:
    other = {"Origin": "https://localhost", "Sec-Fetch-Site": "same-site"}

    answer = browser.post("/api/v1/sign-in", json={"token": api.token}, headers=other)

    assert answer.status_code == 403


def test_client_trusts_the_certificate_that_is_named(
    api: Api, site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a certificate of an unknown authority, then the error names the remedy
    with Client(site, api.token) as stranger, pytest.raises(ApiError) as refused:
        stranger.status()
    assert "VCASGD_CA_FILE" in str(refused.value.remedy)
    assert not may_work_later(refused.value)
    # And it is trusted if the client, or either variable, names it
    own = tmp_path / "api.pem"
    with Client(site, api.token, ca_file=own) as client:
        assert client.status().version
    for name in ("VCASGD_CA_FILE", "SSL_CERT_FILE"):
        with monkeypatch.context() as patch:
            patch.setenv(name, str(own))
            with Client(site, api.token) as client:
                assert client.status().version
            # for the names in it only
            address = site.replace("localhost", "127.0.0.1")
            with Client(address, api.token) as client, pytest.raises(ApiError):
                client.status()
    # And a file that is no certificate is an error of its own
    monkeypatch.setenv("VCASGD_CA_FILE", str(tmp_path / "nginx.conf"))
    with pytest.raises(SpecError, match="VCASGD_CA_FILE"):
        Client(site, api.token)


def test_a_body_without_a_token_is_refused_before_it_arrives(site: str, tmp_path: Path) -> None:
    # Given a client that announces a large package and sends only its start
    address = httpx.URL(site)
    assert address.port is not None
    trusted = ssl.create_default_context(cafile=str(tmp_path / "api.pem"))
    head = (
        f"PUT /api/v1/packages/{'0' * 64} HTTP/1.1\r\nHost: x\r\nContent-Length: 150000000\r\n\r\n"
    )
    with (
        socket.create_connection((address.host, address.port), PATIENCE) as plain,
        trusted.wrap_socket(plain, server_hostname=address.host) as client,
    ):
        client.sendall(head.encode() + bytes(1000))
        # Then the answer doesn't wait for the rest
        assert client.recv(1000).startswith(b"HTTP/1.1 401 ")
