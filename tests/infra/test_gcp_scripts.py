"""Scripts of machines on Google Cloud, on a small fake of the APIs that they use.

There is no emulator of Google Cloud. The fake serves real HTTP.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from support.machine_roots import run_failing_boot, write_root

TOKEN = "an access token"


class FakeGoogle(ThreadingHTTPServer):
    """Metadata, Secret Manager, Memorystore, and Cloud Storage of one project, in memory."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.secrets: dict[str, str] = {}
        self.objects: dict[str, bytes] = {"release/wheel.whl": b"a wheel"}
        self.attributes: dict[str, str] = {}
        self.broken = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeGoogle

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path.startswith("/computeMetadata/v1/instance/"):
            assert self.headers["Metadata-Flavor"] == "Google"
            name = path.removeprefix("/computeMetadata/v1/instance/")
            self._metadata(name)
        elif self._is_allowed():
            self._get(path)

    def do_PUT(self) -> None:
        assert self.headers["Metadata-Flavor"] == "Google"
        name = self.path.removeprefix("/computeMetadata/v1/instance/guest-attributes/")
        self.server.attributes[name] = self._body().decode()
        self._answer(200)

    def do_POST(self) -> None:
        parts = urlsplit(self.path)
        if not self._is_allowed():
            return
        if parts.path.endswith(":addVersion"):
            name = parts.path.rpartition("/")[2].removesuffix(":addVersion")
            data = json.loads(self._body())["payload"]["data"]
            self.server.secrets[name] = base64.b64decode(data).decode()
        else:
            assert parts.path == "/upload/storage/v1/b/a-bucket/o"
            self.server.objects[parse_qs(parts.query)["name"][0]] = self._body()
        self._answer(200, b"{}")

    def _metadata(self, name: str) -> None:
        if name == "service-accounts/default/token":
            self._answer(200, json.dumps({"access_token": TOKEN}).encode())
        else:
            self._answer(200, b"a-machine")

    def _get(self, path: str) -> None:
        if self.server.broken:
            self._answer(403)
        elif path.endswith("/versions/latest:access"):
            value = self.server.secrets.get(path.split("/")[5])
            data = base64.b64encode((value or "").encode()).decode()
            self._answer(200 if value else 404, json.dumps({"payload": {"data": data}}).encode())
        elif path.endswith("/authString"):
            self._answer(200, b'{"authString": "made-by-google"}')
        else:
            name = unquote(path.rpartition("/")[2])
            self._answer(
                200 if name in self.server.objects else 404, self.server.objects.get(name, b"")
            )

    def _is_allowed(self) -> bool:
        allowed = self.headers["Authorization"] == f"Bearer {TOKEN}"
        if not allowed:
            self._answer(401)
        return allowed

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""


@pytest.fixture
def google() -> Iterator[FakeGoogle]:
    server = FakeGoogle()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


class Machine:
    """Folder that acts as a machine's root, with the scripts in their places."""

    def __init__(self, root: Path, google: FakeGoogle, role: str, redis: str = "") -> None:
        self.root = root
        ledger = (
            "rediss://:PASSWORD@10.0.0.3:6378/0" if redis else "redis://:PASSWORD@10.0.0.10:6379/0"
        )
        write_root(
            root,
            f"CLOUD=gcp ROLE={role} CLUSTER=mine PROJECT=a-project MANAGED_REDIS='{redis}'\n"
            f"STORE_HOSTS='10.0.0.20 10.0.0.21' LEDGER_URL='{ledger}'\n",
        )
        group = subprocess.run(["id", "-gn"], capture_output=True, text=True, check=True).stdout
        self.environment = {
            **os.environ,
            "VCASGD_ROOT": str(root),
            "VCASGD_GROUP": group.strip(),
            "VCASGD_METADATA_URL": google.url,
            "SECRET_MANAGER_URL": google.url,
            "CLOUD_STORAGE_URL": google.url,
            "MEMORYSTORE_URL": google.url,
        }

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        program = self.root / "usr/local/lib/vcasgd" / command[0]
        return subprocess.run(
            [program, *command[1:]],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def shell(self, text: str) -> subprocess.CompletedProcess[str]:
        """Run a line of Bash that can call the scripts' functions."""
        library = self.root / "usr/local/lib/vcasgd/common"
        return subprocess.run(
            ["bash", "-euc", f". {library}; {text}"],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def secrets(self) -> dict[str, str]:
        text = (self.root / "run/vcasgd/secrets.env").read_text()
        return dict(line.split("=", 1) for line in text.splitlines())


def test_secrets_are_generated_once_and_read_by_the_store(
    google: FakeGoogle, tmp_path: Path
) -> None:
    control = Machine(tmp_path / "control", google, "control-plane")
    store = Machine(tmp_path / "store", google, "store")
    # When the control plane starts twice, and a store node once
    for machine in (control, control, store):
        done = machine.run("secrets")
        assert done.returncode == 0, done.stderr
    # Then they have the same passwords
    assert set(google.secrets) == {"mine-servers", "mine-api-token", "mine-ray-token"}
    passwords = json.loads(google.secrets["mine-servers"])
    secrets = control.secrets()
    assert secrets["VCASGD_LEDGER_URL"] == f"redis://:{passwords['ledger']}@10.0.0.10:6379/0"
    assert secrets["VCASGD_TENSORS_URL"].split() == [
        f"redis://:{passwords['tensors']}@10.0.0.{number}:6380/0" for number in (20, 21)
    ]
    assert secrets["VCASGD_TOKEN"] == google.secrets["mine-api-token"]
    assert store.secrets()["VCASGD_JOB_SECRET"] == secrets["VCASGD_JOB_SECRET"] == passwords["jobs"]
    assert (
        f"requirepass {passwords['tensors']}"
        in (tmp_path / "store/run/vcasgd/tensors.conf").read_text()
    )


def test_managed_redis_uses_the_password_of_google(google: FakeGoogle, tmp_path: Path) -> None:
    path = "projects/a-project/locations/us-central1/instances/mine-ledger"
    machine = Machine(tmp_path / "control", google, "control-plane", redis=path)
    done = machine.run("secrets")
    assert done.returncode == 0, done.stderr
    assert machine.secrets()["VCASGD_LEDGER_URL"] == "rediss://:made-by-google@10.0.0.3:6378/0"
    assert "VCASGD_JOB_SECRET" not in machine.secrets()


def test_unreadable_secret_is_not_replaced(google: FakeGoogle, tmp_path: Path) -> None:
    google.secrets["mine-servers"] = "{}"
    google.broken = True
    done = Machine(tmp_path / "control", google, "control-plane").run("secrets")
    assert done.returncode != 0
    assert "secret mine-servers: status 403" in done.stderr
    assert google.secrets == {"mine-servers": "{}"}


def test_objects_and_failures_are_stored(google: FakeGoogle, tmp_path: Path) -> None:
    machine = Machine(tmp_path / "worker", google, "worker")
    file = tmp_path / "wheel.whl"
    done = machine.shell(f"fetch_object gs://a-bucket/release/wheel.whl {file}")
    assert done.returncode == 0, done.stderr
    assert file.read_bytes() == b"a wheel"
    assert machine.shell(f"fetch_object gs://a-bucket/release/other {file}").returncode != 0
    done = machine.shell(f"store_object {file} gs://a-bucket/control/api.pem")
    assert google.objects["control/api.pem"] == b"a wheel"
    # And failures appear in the attributes of the machine
    assert machine.run("unit-failed", "vcasgd-worker.service").returncode == 0
    said = google.attributes["vcasgd/boot-error"]
    assert said.startswith("worker: vcasgd-worker.service was given up")


def test_failed_boot_step_is_reported_to_google(google: FakeGoogle, tmp_path: Path) -> None:
    machine = Machine(tmp_path / "worker", google, "worker")
    done = run_failing_boot(machine.root, {"VCASGD_METADATA_URL": google.url})
    assert done.returncode == 1
    assert google.attributes["vcasgd/boot-error"] == "worker: step add_user failed (status 1)"
