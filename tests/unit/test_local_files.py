"""The default folder of caches."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vcasgd.local_files import default_cache_folder


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
