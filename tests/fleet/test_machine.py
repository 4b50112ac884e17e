"""Machine in a cloud: user data, secrets, and boot command, with real files and processes."""

from __future__ import annotations

import base64
import json
import os
import resource
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path

import pytest
from support.http_servers import LocalServer, QuietHandler
from support.metadata import Metadata, MetadataServer
from support.ports import free_port
from support.provider_backends import AwsBackend, GcpBackend, aws_backend, script_of
from support.waiting import PATIENCE, await_truth

from vcasgd.errors import CloudDenied, CloudUnavailable, InvalidRequest, SpecError
from vcasgd.fleet.metadata import gcp_secret
from vcasgd.fleet.providers.base import Boot
from vcasgd.fleet.providers.user_data import boot_environment, combined, worker_script
from vcasgd.machine import main as machine

TRICKY = """it's "$HOME" `id` \\ end"""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for servers of this process, which may be slow."""
    monkeypatch.setattr("vcasgd.fleet.metadata.TIMEOUT_SECONDS", PATIENCE)


@pytest.fixture
def metadata() -> Iterator[MetadataServer]:
    with MetadataServer(Metadata("i-123")) as server:
        yield server


def unit(folder: Path, url: str, script: str) -> dict[str, str]:
    """Run the script as cloud-init does, and read its output as systemd's unit does."""
    env = {"PATH": os.environ["PATH"], "VCASGD_ROOT": str(folder)}
    subprocess.run(["sh", "-c", script], env=env, check=True, timeout=PATIENCE)
    path = folder / "etc/vcasgd/worker.env"
    assert path.stat().st_mode & 0o077 == 0
    shown = f"set -a; . {shlex.quote(str(path))}; exec env -0"
    output = subprocess.run(
        ["sh", "-c", shown],
        env={"HOME": "/root"},
        check=True,
        capture_output=True,
        timeout=PATIENCE,
    ).stdout.decode()
    environment = dict(line.split("=", 1) for line in output.split("\0") if line)
    return {**environment, "PATH": os.environ["PATH"], "VCASGD_METADATA_URL": url}


@pytest.mark.parametrize("template", ["", "#cloud-config\na: 1\n", "#!/bin/sh\necho ü\n"])
def test_user_data_keeps_what_the_template_has(template: str) -> None:
    script = worker_script({"A": TRICKY})
    first = combined(template, script, 10_000)
    assert script_of(first) == script
    # As a template it is parsed again, and the result is stable.
    again = combined(first, script, 20_000)
    assert again.count("text/x-shellscript") == first.count("text/x-shellscript") + 1
    assert combined(template, script, 10_000) == first
    with pytest.raises(InvalidRequest, match="limit is 10"):
        combined(template, script, 10)


def test_multiline_value_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="A: the value must be one line"):
        worker_script({"A": "a\nb"})


def test_machine_runs_its_boot_command(metadata: MetadataServer, tmp_path: Path) -> None:
    boot = Boot(
        ("{python}", "-c", "pass", "{machine_id}"), {"TRICKY": TRICKY, "ME": "{machine_id}"}
    )
    script = worker_script(boot_environment(boot, "aws", "us-east-1", {}))
    found = machine.boot_of(unit(tmp_path, metadata.url, script))
    assert found.argv == (sys.executable, "-c", "pass", "i-123")
    assert (found.env["TRICKY"], found.env["ME"]) == (TRICKY, "i-123")
    assert found.env["VCASGD_METADATA_KIND"] == "aws"
    assert "VCASGD_BOOT_ARGV" not in found.env


def test_new_machine_retries_until_its_metadata_server_responds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    port = free_port()
    environment = {
        **boot_environment(Boot(("true", "{machine_id}")), "aws", "us-east-1", {}),
        "VCASGD_METADATA_URL": f"http://127.0.0.1:{port}",
    }
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(machine.boot_of, environment)
        await_truth(lambda: "does not respond" in caplog.text)
        with MetadataServer(Metadata("i-9"), port):
            assert found.result(PATIENCE).argv == ("true", "i-9")


def test_missing_boot_command_is_refused() -> None:
    with pytest.raises(SpecError, match="VCASGD_BOOT_ARGV"):
        machine.boot_of({})


def test_the_end_of_the_command_is_the_end(metadata: MetadataServer) -> None:
    boot = Boot(("{python}", "-c", "raise SystemExit(7)"))
    env = {
        **os.environ,
        **boot_environment(boot, "aws", "us-east-1", {}),
        "VCASGD_METADATA_URL": metadata.url,
    }
    argv = [sys.executable, "-m", "vcasgd.machine.main"]
    assert subprocess.run(argv, env=env, timeout=PATIENCE, check=False).returncode == 7


#: Waits for the notice of its machine, and prints it.
AWAITS_NOTICE = """
import os, pathlib, time
notice = pathlib.Path(os.environ["VCASGD_NOTICE_FILE"])
print("up", flush=True)
parent = os.getppid()
while not notice.exists() and os.getppid() == parent:
    time.sleep(0.05)
print(notice.read_text(), flush=True)
"""


def test_a_notice_on_a_full_disk_is_given_later_and_ends_no_machine(
    metadata: MetadataServer,
) -> None:
    # Given a machine
    boot = boot_environment(Boot(("{python}", "-c", AWAITS_NOTICE)), "aws", "us-east-1", {})
    env = {**os.environ, **boot, "VCASGD_METADATA_URL": metadata.url}
    argv = [sys.executable, "-m", "vcasgd.machine.main"]
    with subprocess.Popen(
        argv, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "up\n"
        # When the cloud gives notice while its disk has no room
        limits = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, limits[1]))
        metadata.metadata.recommend_rebalance()
        assert any("can't be written" in line for line in process.stderr)
        # Then the command gets it as soon as there is room
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, limits)
        assert json.loads(process.stdout.readline())["kind"] == "rebalance"
        assert process.wait(PATIENCE) == 0


# --- secrets ------------------------------------------------------------------------------


def test_a_secret_of_aws_is_not_in_the_user_data(metadata: MetadataServer, tmp_path: Path) -> None:
    boot = Boot(("true",), {"RAY_AUTH_TOKEN": "the-token", "OTHER": "x"})
    with aws_backend() as backend:
        import boto3

        boto3.client("secretsmanager", region_name="us-east-1").create_secret(
            Name="ray-token", SecretString="the-token"
        )
        document = backend.document()
        template = {**document["template"], "secrets": {"RAY_AUTH_TOKEN": "ray-token"}}
        provider = backend.provider(template=template)
        (id_,) = provider.launch(backend.pool, 1, boot, "t1")
        assert "the-token" not in backend.user_data(id_)
        environment = unit(tmp_path, metadata.url, script_of(backend.user_data(id_)))
        found = machine.boot_of(environment)
    assert found.env["RAY_AUTH_TOKEN"] == "the-token"
    assert found.env["OTHER"] == "x"


def test_secret_in_the_image_is_not_fetched(metadata: MetadataServer) -> None:
    env = {
        **boot_environment(Boot(("true",)), "gcp", "us-central1", {"RAY_AUTH_TOKEN": "nowhere"}),
        "VCASGD_METADATA_URL": metadata.url,
        "RAY_AUTH_TOKEN": "mine",
    }
    assert machine.boot_of(env).env["RAY_AUTH_TOKEN"] == "mine"


def test_a_secret_of_google(
    httpd: tuple[str, dict[str, tuple[int, str]]], metadata: MetadataServer
) -> None:
    url, pages = httpd
    name = "projects/p/secrets/ray"
    data = base64.b64encode(b"the-token").decode()
    pages[f"/v1/{name}/versions/latest:access"] = (200, json.dumps({"payload": {"data": data}}))

    token = "/computeMetadata/v1/instance/service-accounts/default/token"
    metadata.metadata.overrides[token] = (HTTPStatus.OK, '{"access_token": "granted"}')

    assert gcp_secret(name, metadata.url, url) == "the-token"
    with pytest.raises(CloudDenied, match="status 404"):
        gcp_secret("projects/p/secrets/other", metadata.url, url)
    with pytest.raises(CloudUnavailable):
        gcp_secret(name, metadata.url, "http://127.0.0.1:9")


@pytest.fixture
def httpd() -> Iterator[tuple[str, dict[str, tuple[int, str]]]]:
    """Serve pages by path to clients with the token."""
    pages: dict[str, tuple[int, str]] = {}

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            status, body = pages.get(self.path, (404, ""))
            if self.headers.get("Authorization") != "Bearer granted":
                status, body = 401, ""
            self.answer(status, body)

    with LocalServer(Handler) as server:
        yield server.url, pages


def test_the_template_s_own_metadata_stays(aws: AwsBackend, gcp: GcpBackend) -> None:
    boot = Boot(("true",), {"A": "1"})
    for backend in (aws, gcp):
        (id_,) = backend.provider().launch(backend.pool, 1, boot, "t1")
        assert "runcmd: [[/usr/local/lib/vcasgd/boot]]" in backend.user_data(id_)
        assert 'A="1"' in script_of(backend.user_data(id_))
