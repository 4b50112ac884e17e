"""Fake of the Google APIs that machines use, over real HTTP, and machines that use it."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from support.http_servers import LocalServer, QuietHandler
from support.machine_roots import write_root
from support.processes import run_program

TOKEN = "an access token"


class FakeGoogle(LocalServer):
    """Metadata, Secret Manager, Memorystore, and Cloud Storage of one project, in memory."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.secrets: dict[str, str] = {}
        self.objects: dict[str, bytes] = {"release/wheel.whl": b"a wheel"}
        self.attributes: dict[str, str] = {}
        self.broken = False


class _Handler(QuietHandler):
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
        self.server.attributes[name] = self.body().decode()
        self.answer(200)

    def do_POST(self) -> None:
        parts = urlsplit(self.path)
        if not self._is_allowed():
            return
        if parts.path.endswith(":addVersion"):
            name = parts.path.rpartition("/")[2].removesuffix(":addVersion")
            data = json.loads(self.body())["payload"]["data"]
            self.server.secrets[name] = base64.b64decode(data).decode()
        else:
            assert parts.path == "/upload/storage/v1/b/a-bucket/o"
            self.server.objects[parse_qs(parts.query)["name"][0]] = self.body()
        self.answer(200, b"{}")

    def _metadata(self, name: str) -> None:
        if name == "service-accounts/default/token":
            self.answer(200, json.dumps({"access_token": TOKEN}))
        else:
            self.answer(200, b"a-machine")

    def _get(self, path: str) -> None:
        if self.server.broken:
            self.answer(403)
        elif path.endswith("/versions/latest:access"):
            value = self.server.secrets.get(path.split("/")[5])
            data = base64.b64encode((value or "").encode()).decode()
            self.answer(200 if value else 404, json.dumps({"payload": {"data": data}}))
        elif path.endswith("/authString"):
            self.answer(200, b'{"authString": "made-by-google"}')
        else:
            name = unquote(path.rpartition("/")[2])
            self.answer(
                200 if name in self.server.objects else 404, self.server.objects.get(name, b"")
            )

    def _is_allowed(self) -> bool:
        allowed = self.headers["Authorization"] == f"Bearer {TOKEN}"
        if not allowed:
            self.answer(401)
        return allowed


class GoogleMachine:
    """Folder that acts as a machine's root, with the scripts in their places."""

    def __init__(
        self, root: Path, google: FakeGoogle, role: str, redis: str = "", more: str = ""
    ) -> None:
        self.root = root
        ledger = (
            "rediss://:PASSWORD@10.0.0.3:6378/0" if redis else "redis://:PASSWORD@10.0.0.10:6379/0"
        )
        write_root(
            root,
            f"CLOUD=gcp ROLE={role} CLUSTER=mine PROJECT=a-project MANAGED_REDIS='{redis}'\n"
            f"STORE_HOSTS='10.0.0.20 10.0.0.21' LEDGER_URL='{ledger}'\n{more}",
        )
        group = run_program(["id", "-gn"], check=True).stdout
        self.environment = {
            **os.environ,
            "VCASGD_ROOT": str(root),
            "VCASGD_GROUP": group.strip(),
            "PATIENCE_SECONDS": "0",
            "VCASGD_METADATA_URL": google.url,
            "SECRET_MANAGER_URL": google.url,
            "CLOUD_STORAGE_URL": google.url,
            "MEMORYSTORE_URL": google.url,
        }

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        program = self.root / "usr/local/lib/vcasgd" / command[0]
        return run_program([program, *command[1:]], env=self.environment)

    def shell(self, text: str) -> subprocess.CompletedProcess[str]:
        """Run a line of Bash that can call the scripts' functions."""
        library = self.root / "usr/local/lib/vcasgd/common"
        return run_program(["bash", "-euc", f". {library}; {text}"], env=self.environment)

    def secrets(self) -> dict[str, str]:
        text = (self.root / "run/vcasgd/secrets.env").read_text()
        return dict(line.split("=", 1) for line in text.splitlines())
