"""``vcasgd doctor`` on installations that are broken on purpose, and its checks on facts."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from support.gpus import environment
from support.http_servers import LocalServer, QuietHandler
from support.ports import free_port
from typer.testing import CliRunner

from vcasgd import __version__, doctor
from vcasgd.cli.commands import app
from vcasgd.doctor import Severity
from vcasgd.gpus import Gpu

Run = Callable[..., dict[str, dict[str, str]]]

AWS_POOL = """
pools:
  - {name: cloud, provider: aws, region: us-east-1, zones: [us-east-1a],
     machine_types: [%s], template: {launch_template: lt-1}}
"""


@pytest.fixture
def home(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VCASGD_API_PORT", str(free_port()))
    return home


@pytest.fixture
def run(home: Path) -> Run:
    def run(status: int = 1) -> dict[str, dict[str, str]]:
        """Return the findings by check, without those of the machine that the tests run on."""
        done = CliRunner().invoke(app, ["doctor", "--json"])
        found = {row["check"]: row for row in json.loads(done.stdout)}
        errors = [row for row in found.values() if row["severity"] == "error"]
        assert done.exit_code == (1 if errors else 0), done.output
        assert status == 0 or errors
        assert all(row["message"] and row["remedy"] for row in found.values())
        return found

    return run


@pytest.fixture
def answers() -> Iterator[dict[str, Any]]:
    status = {
        "version": __version__, "cluster": "vcasgd", "controller": True, "active_jobs": [],
        "servers": 1, "machines": 0, "workers": 0,
    }  # fmt: skip
    known: dict[str, Any] = {"status": status, "pools": [], "code": 200, "ahead": 0.0}

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.send_response_only(known["code"])
            self.send_header("Date", formatdate(time.time() + known["ahead"], usegmt=True))
            self.end_headers()
            self.wfile.write(json.dumps(known[self.path.rpartition("/")[2]]).encode())

    with LocalServer(Handler) as server:
        known["url"] = server.url
        yield known


@pytest.fixture
def api(answers: dict[str, Any], home: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("VCASGD_API_URL", answers["url"])
    monkeypatch.setenv("VCASGD_TOKEN", "a-token")
    return answers


def test_sound_installation_has_no_error(run: Run, api: dict[str, Any]) -> None:
    found = run(0)
    # the machine of the tests may be small, and the dashboard may not be built
    assert not found.keys() & {"settings", "home", "port", "secrets", "pools", "prices"}
    assert not found.keys() & {"packages", "api", "api-version", "clock", "controller", "quota"}


def test_it_says_if_there_is_no_api_to_check(answers: dict[str, Any], home: Path) -> None:
    unchecked = "no API was checked: no stack runs here"
    assert unchecked in CliRunner().invoke(app, ["doctor"]).stdout
    named = CliRunner().invoke(app, ["doctor", "--url", answers["url"], "--token", "a-token"])
    assert unchecked not in named.stdout
    assert not home.exists()


@pytest.mark.parametrize(
    ("variable", "value", "check", "text"),
    [
        ("VCASGD_HEARTBEAT", "0", "settings", "VCASGD_HEARTBEAT"),
        ("VCASGD_REDIS_SERVER", "/nowhere/redis-server", "redis", "/nowhere/redis-server"),
        ("VCASGD_API_URL", "http://127.0.0.1:1", "api", "no answer"),
        ("VCASGD_POOLS", "pools: [{name: x, provider: moon}]", "pools", "unknown provider 'moon'"),
        (
            "VCASGD_POOLS",
            AWS_POOL % "made-up.8xlarge",
            "prices",
            "no known price for made-up.8xlarge in us-east-1",
        ),
    ],
)
def test_invalid_setting(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    check: str,
    text: str,
) -> None:
    if variable == "VCASGD_POOLS":
        (tmp_path / "pools.yaml").write_text(value)
        value = str(tmp_path / "pools.yaml")
    monkeypatch.setenv("VCASGD_TOKEN", "a-token")
    monkeypatch.setenv(variable, value)
    assert text in run()[check]["message"]


@pytest.mark.parametrize(
    ("url", "token", "text"),
    [
        ("http://127.0.0.1:x", "a-token", "Invalid port: 'x'"),
        ("http://[::1", "a-token", "the URL of the API is invalid"),
        ("http://127.0.0.1:1", "für-alle", "the token is empty or contains characters"),
        ("http://127.0.0.1:1", None, "no token for http://127.0.0.1:1"),
    ],
)
def test_url_or_token_that_is_no_such_thing_is_one_of_the_findings(
    run: Run, monkeypatch: pytest.MonkeyPatch, url: str, token: str | None, text: str
) -> None:
    # Given something else that is wrong, too
    monkeypatch.setenv("VCASGD_REDIS_SERVER", "/nowhere/redis-server")
    monkeypatch.setenv("VCASGD_API_URL", url)
    if token is not None:
        monkeypatch.setenv("VCASGD_TOKEN", token)
    found = run()
    assert text in found["api"]["message"]
    assert "redis" in found
    # And so it is with the option
    monkeypatch.delenv("VCASGD_API_URL")
    assert text in next(each for each in doctor.findings(url) if each.check == "api").message


def test_home_that_is_a_file_or_open_to_others(run: Run, home: Path) -> None:
    home.write_text("")
    assert "is not a folder" in run()["home"]["message"]
    severities = [finding.severity for finding in doctor.findings()]
    assert severities == sorted(severities), "errors come first"

    home.unlink()
    home.mkdir()
    (home / "token").write_text("a-token")
    (home / "token").chmod(0o644)
    assert run()["secrets"]["remedy"] == f"chmod 600 {home / 'token'}"


def test_port_that_another_program_uses(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("VCASGD_API_PORT", str(server.getsockname()[1]))
        assert "--port 0" in run()["port"]["remedy"]


def test_control_plane_has_no_conflict_with_its_own_api(
    run: Run, api: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given the API of a cluster on the port that a stack would use, and no stack
    monkeypatch.setenv("VCASGD_API_PORT", api["url"].rpartition(":")[2])
    # When the settings name that API, then its port is not taken by another program
    assert not run(0).keys() & {"port", "api"}
    # And without them, it is
    monkeypatch.delenv("VCASGD_API_URL")
    assert "another program" in run()["port"]["message"]


@pytest.mark.parametrize(
    ("change", "check", "text"),
    [
        ({"code": 401}, "api", "401"),
        ({"version": "0.0.9"}, "api-version", "0.0.9"),
        ({"ahead": 3600.0}, "clock", "s behind the API's"),
        ({"ahead": -3600.0}, "clock", "s ahead of the API's"),
        ({"controller": False}, "controller", "no running controller"),
        ({"pools": [{"name": "p", "quotas": {"spot": 8}}]}, "quota", "quota of 8 machines"),
        ({"pools": [{"name": "p", "reason": "denied"}]}, "pool", "backs off: denied"),
    ],
)
def test_api_of_a_broken_cluster(
    run: Run, api: dict[str, Any], change: dict[str, Any], check: str, text: str
) -> None:
    for name, value in change.items():
        (api if name in api else api["status"])[name] = value
    assert text in run(0)[check]["message"]


@pytest.mark.parametrize("reason", ["3 of 3 machines in use", "no machine has joined"])
def test_a_pool_without_free_machines_is_sound(run: Run, api: dict[str, Any], reason: str) -> None:
    api["status"]["pools"] = [{"name": "p", "reason": reason}]
    assert "pool" not in run(0)


@pytest.mark.parametrize(
    ("found", "check", "severity"),
    [
        (doctor.package(Requirement("ray<3"), "3.1"), "packages", Severity.ERROR),
        (doctor.package(Requirement("ray<3"), None), "packages", Severity.ERROR),
        (doctor.libraries(["ray"]), "stack", Severity.WARNING),
        (doctor.dashboard(Path("/nowhere")), "dashboard", Severity.WARNING),
        (doctor.memory(10**9), "memory", Severity.ERROR),
        (doctor.disk(Path("/home"), 10**8), "disk", Severity.ERROR),
        (doctor.shared_memory(64 * 10**6), "shared-memory", Severity.WARNING),
        (doctor.open_files(256), "open-files", Severity.ERROR),
        (doctor.prices({"t": 600.0, "new": 6.0}), "prices", Severity.WARNING),
    ],
)
def test_broken_machine_is_one_finding(
    found: Iterator[doctor.Finding], check: str, severity: Severity
) -> None:
    (finding,) = found
    assert (finding.check, finding.severity) == (check, severity)


def test_sound_and_unknown_values_are_no_findings() -> None:
    checks = [doctor.memory(10**11), doctor.memory(None),
              doctor.disk(Path("/home"), 10**11), doctor.disk(Path("/home"), None),
              doctor.shared_memory(None), doctor.open_files(None)]  # fmt: skip
    assert [finding for check in checks for finding in check] == []


def test_gpus_are_named(tmp_path: Path) -> None:
    cards = [
        {"uuid": "GPU-a", "name": "NVIDIA L4", "total": 24e9, "free": 6e9, "utilization": 97},
        {"uuid": "GPU-b", "name": "NVIDIA T4", "total": 16e9, "free": 16e9},
    ]
    done = subprocess.run(
        [sys.executable, "-m", "vcasgd.cli", "doctor"],
        env=environment(cards, VCASGD_HOME=str(tmp_path / "home")),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines()[:2] == [
        "GPU 0: NVIDIA L4, 18.0 of 24.0 GB in use, 97 % busy",
        "GPU 1: NVIDIA T4, 0.0 of 16.0 GB in use",
    ]


@pytest.mark.parametrize(
    ("gpus", "torch", "expected"),
    [(1, "2.13.0+cpu", 1), (1, "2.13.0+cu130", 0), (1, "2.13.0", 0), (0, "2.13.0+cpu", 0)],
)
def test_torch_without_cuda_on_a_machine_with_gpus(gpus: int, torch: str, expected: int) -> None:
    found = gpus * [Gpu("GPU-a", "NVIDIA L4", 10**9, 10**9, None)]
    assert [finding.check for finding in doctor.gpus(found, torch)] == expected * ["gpus"]
