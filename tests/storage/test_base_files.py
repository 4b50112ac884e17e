"""Bases of jobs: fetched once from each kind of location, shared, and verified."""

from __future__ import annotations

import fcntl
import hashlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.http_servers import LocalServer
from support.waiting import PATIENCE

from vcasgd import local_files
from vcasgd.errors import DataError, SpecError, StorageUnavailable
from vcasgd.settings import Settings
from vcasgd.spec.job import JobSpec
from vcasgd.spec.sections import BaseSpec
from vcasgd.storage import base_files
from vcasgd.storage.base_files import fetch_base, prepare_base
from vcasgd.task.task import base, use_base

CONTENT = bytes(range(256)) * 5000


class Ranges(SimpleHTTPRequestHandler):
    """A web server that answers ranges, as those for large files do; it counts its bytes."""

    served = 0

    def do_GET(self) -> None:
        file = Path(self.translate_path(self.path))
        if not file.is_file():
            self.send_error(404)
            return
        data = file.read_bytes()
        first, _, last = self.headers.get("Range", "bytes=0-")[6:].partition("-")
        stop = min(int(last) + 1, len(data)) if last else len(data)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{stop - 1}/{len(data)}")
        self.send_header("Content-Length", str(stop - int(first)))
        self.end_headers()
        self.wfile.write(data[int(first) : stop])
        Ranges.served += stop - int(first)

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    folder = tmp_path / "origin"
    folder.mkdir()
    (folder / "base.bin").write_bytes(CONTENT)
    return folder


@pytest.fixture
def web(origin: Path) -> Iterator[str]:
    Ranges.served = 0
    with LocalServer(partial(Ranges, directory=origin)) as server:
        yield server.url


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def spec(location: str | Path, data: bytes = CONTENT) -> BaseSpec:
    return BaseSpec(location=str(location), sha256=digest(data))


def test_a_file_is_fetched_once_and_keeps_its_name(web: str, tmp_path: Path) -> None:
    wanted, parts = spec(f"{web}/base.bin"), []

    first = fetch_base(wanted, tmp_path / "cache", lambda: parts.append(1))
    assert first.read_bytes() == CONTENT
    assert first.name == "base.bin"
    assert parts

    second = fetch_base(wanted, tmp_path / "cache")
    assert second == first
    assert Ranges.served == len(CONTENT)


def test_workers_that_start_together_fetch_one_copy(web: str, tmp_path: Path) -> None:
    wanted, found = spec(f"{web}/base.bin"), []
    threads = [
        threading.Thread(target=lambda: found.append(fetch_base(wanted, tmp_path / "cache")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)

    assert len(found) == 4
    assert Ranges.served == len(CONTENT)


def test_a_worker_that_waits_for_another_one_reports_progress_until_the_limit(
    web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_files, "LOCK_SECONDS", 0.5)
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(local_files, "time", clock)
    wanted, reports = spec(f"{web}/base.bin"), []
    with (tmp_path / f".{wanted.sha256}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StorageUnavailable, match="another process holds"):
            fetch_base(wanted, tmp_path, lambda: reports.append(1))

    assert len(reports) >= 2
    assert Ranges.served == 0
    assert fetch_base(wanted, tmp_path).read_bytes() == CONTENT


def test_a_damaged_copy_is_fetched_again(web: str, tmp_path: Path) -> None:
    wanted = spec(f"{web}/base.bin")
    path = fetch_base(wanted, tmp_path / "cache")
    path.write_bytes(CONTENT[:-1] + b"x")

    assert fetch_base(wanted, tmp_path / "cache").read_bytes() == CONTENT


def test_another_content_is_refused_and_leaves_nothing(web: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"base\.bin of http.* has the digest .* sha256sum prints"):
        fetch_base(spec(f"{web}/base.bin", b"other"), tmp_path / "cache")
    with pytest.raises(DataError, match=r"none\.bin is not in http"):
        fetch_base(spec(f"{web}/none.bin"), tmp_path / "cache")

    assert [each.name for each in (tmp_path / "cache").iterdir() if each.is_dir()] == []


def test_a_worker_that_is_killed_leaves_no_part_behind_for_the_next_one(
    web: str, tmp_path: Path
) -> None:
    wanted, cache = spec(f"{web}/base.bin"), tmp_path / "cache"
    program = f"""
import os, signal
from pathlib import Path
from vcasgd.spec.sections import BaseSpec
from vcasgd.storage.base_files import fetch_base

base = BaseSpec(location={wanted.location!r}, sha256={wanted.sha256!r})
fetch_base(base, Path({str(cache)!r}), lambda: os.kill(os.getpid(), signal.SIGKILL))
"""
    killed = subprocess.run([sys.executable, "-c", program], check=False)
    assert killed.returncode == -signal.SIGKILL

    assert fetch_base(wanted, cache).read_bytes() == CONTENT

    assert {each.name for each in cache.iterdir()} == {wanted.sha256, f".{wanted.sha256}.lock"}


@pytest.mark.parametrize("local", [True, False], ids=["on this machine", "on the web"])
def test_a_list_makes_the_base_a_folder(
    web: str, origin: Path, tmp_path: Path, local: bool
) -> None:
    (origin / "more").mkdir()
    (origin / "more" / "config.json").write_text("{}")
    lines = f"{digest(CONTENT)}  base.bin\n{digest(b'{}')} *./more/config.json\n"
    (origin / "SHA256SUMS").write_text(lines)
    location = origin / "SHA256SUMS" if local else f"{web}/SHA256SUMS"

    folder = fetch_base(spec(location, lines.encode()), tmp_path / "cache")

    assert (folder / "base.bin").read_bytes() == CONTENT
    assert (folder / "more" / "config.json").read_text() == "{}"
    assert (folder == origin) is local
    (folder / "more" / "config.json").write_text("[]")
    if local:
        with pytest.raises(DataError, match=r"more/config\.json of .* has the digest"):
            fetch_base(spec(location, lines.encode()), tmp_path / "cache")


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", ""])
def test_a_list_can_name_only_files_below_it(origin: Path, tmp_path: Path, name: str) -> None:
    lines = f"{digest(CONTENT)}  {name}\n"
    (origin / "SHA256SUMS").write_text(lines)

    with pytest.raises(DataError, match="no name of a file"):
        fetch_base(spec(origin / "SHA256SUMS", lines.encode()), tmp_path / "cache")


def test_a_file_of_this_machine_stays_where_it_is(origin: Path, tmp_path: Path) -> None:
    assert fetch_base(spec(origin / "base.bin"), tmp_path / "cache") == origin / "base.bin"
    assert fetch_base(spec((origin / "base.bin").as_uri()), tmp_path) == origin / "base.bin"
    assert not (tmp_path / "cache").exists()
    with pytest.raises(DataError, match=r"nowhere can't be read: No such file"):
        fetch_base(spec(origin / "nowhere"), tmp_path / "cache")


def test_the_task_gets_the_path(web: str, tmp_path: Path) -> None:
    try:
        prepare_base(spec(f"{web}/base.bin"), Settings(cache_dir=tmp_path / "code"))
        assert base("default").read_bytes() == CONTENT
        assert base("default").is_relative_to(tmp_path / "code" / "base")
        prepare_base(None, Settings())
        assert base("default") == Path("default")
        with pytest.raises(SpecError, match="base: there is none"):
            base()
    finally:
        use_base(None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"location": "model.bin"}, "base.location: must be s3://"),
        ({"location": "ftp://host/file"}, "base.location: must be s3://"),
        ({"location": "s3://bucket/"}, "base.location: must name a file"),
        ({"location": "https://user:word@host/file"}, "can't contain a password"),
        ({"location": "https://host/file?signature=1"}, "can't contain a password or a query"),
        ({"location": "s3://bucket/file", "sha256": "abc"}, "base.sha256: "),
    ],
)
def test_invalid_bases_are_errors(fields: dict[str, str], message: str) -> None:
    job = {"name": "job", "task": "t:T", "epochs": 1}
    with pytest.raises(SpecError) as caught:
        JobSpec.parse({**job, "base": {"sha256": digest(CONTENT), **fields}})
    assert message in str(caught.value)
