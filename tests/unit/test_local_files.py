"""The default folder of caches."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from vcasgd.local_files import NEW_SECONDS, default_cache_folder, temporary_folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "home"
    folder.mkdir(mode=0o755)
    monkeypatch.setenv("HOME", str(folder))
    default_cache_folder.cache_clear()
    yield folder
    default_cache_folder.cache_clear()


def test_it_is_private_and_shared_by_the_users_processes(home: Path) -> None:
    folder = default_cache_folder("packages")

    assert folder == home / ".cache/vcasgd/packages"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    default_cache_folder.cache_clear()
    assert default_cache_folder("packages") == folder


def open_to_all(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o777)


@pytest.mark.parametrize(
    "spoil",
    [
        open_to_all,
        lambda home: open_to_all(home / ".cache"),
        lambda home: open_to_all(home / ".cache/vcasgd/packages"),
        lambda home: (home / ".cache").write_text("a file"),
        lambda home: home.rmdir(),
    ],
    ids=["home", "above", "itself", "a file", "no home"],
)
def test_a_folder_that_others_can_write_to_is_not_used(
    home: Path, spoil: Callable[[Path], object]
) -> None:
    spoil(home)

    folder = default_cache_folder("packages")

    assert home not in folder.parents
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


#: Creates a temporary folder of 1 KB, and waits.
HOLDER = """
import sys
from vcasgd.local_files import temporary_folder
with temporary_folder("vcasgd-test-") as folder:
    (folder / "file").write_bytes(bytes(1000))
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_temporary_folders_of_killed_processes_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    start = partial(
        *(subprocess.Popen, [sys.executable, "-c", HOLDER]),
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with start() as killed, start() as alive:
        left, held = (Path(each.stdout.readline().strip()) for each in (killed, alive))
        killed.kill()
        killed.wait()
        for folder in (left, held):
            modified = folder.stat().st_mtime - NEW_SECONDS - 1
            os.utime(folder, (modified, modified))

        with temporary_folder("vcasgd-test-") as folder:
            assert sorted(tmp_path.iterdir()) == sorted([held, folder])
        assert not folder.exists()
