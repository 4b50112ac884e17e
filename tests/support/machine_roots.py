"""Folder that acts as a machine's root for the scripts in infra, with the services they call."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

from support.http_servers import LocalServer, QuietHandler
from support.metadata import Metadata, MetadataServer
from support.processes import run_program

INFRA = Path(__file__).parents[2] / "infra"
#: Credentials of a role, as the metadata server returns them.
KEYS = {"AccessKeyId": "AKIDEXAMPLE", "SecretAccessKey": "a/secret+key", "Token": "a session=="}
#: Commands of a system that has all packages installed and refuses to create users.
_PROGRAMS = {"dpkg": "exit 0", "id": "exit 1", "useradd": "exit 1"}


def write_root(root: Path, settings: str) -> None:
    """Write the scripts and ``machine.env``, as cloud-init does."""
    library = root / "usr/local/lib/vcasgd"
    library.mkdir(parents=True)
    for script in (INFRA / "bin").iterdir():
        (library / script.name).symlink_to(script)
    for folder in ("etc/vcasgd", "run", "dev"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "etc/vcasgd/machine.env").write_text(settings)


def run_failing_boot(root: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the real script on a system on which its step ``add_user`` fails."""
    programs = root / "programs"
    programs.mkdir()
    for name, text in _PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    return run_program(
        [root / "usr/local/lib/vcasgd/boot"],
        env={
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "VCASGD_ROOT": str(root),
            **environment,
        },
    )


@contextmanager
def metadata_of(machine_id: str) -> Iterator[str]:
    """Serve an EC2 machine's metadata over IMDSv2."""
    metadata = Metadata(machine_id)
    for path, text in {
        "iam/security-credentials/": "a-role",
        "iam/security-credentials/a-role": json.dumps(KEYS, indent=2),
        "placement/region": "us-east-1",
        "services/domain": "amazonaws.com",
    }.items():
        metadata.overrides[f"/latest/meta-data/{path}"] = (HTTPStatus.OK, text)
    with MetadataServer(metadata) as server:
        yield server.url


@contextmanager
def recording_ec2() -> Iterator[tuple[str, list[tuple[dict[str, str], str]]]]:
    """Serve an EC2 endpoint that records the headers and the body of each request."""
    asked: list[tuple[dict[str, str], str]] = []

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            asked.append((dict(self.headers), self.body().decode()))
            self.answer(200)

    with LocalServer(Handler) as server:
        yield server.url, asked
