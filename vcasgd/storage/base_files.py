"""Bases of jobs on this machine: fetched once, shared by its workers, and verified."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit, urlunsplit

from vcasgd.errors import DataError, NotFound, StorageUnavailable
from vcasgd.local_files import default_cache_folder, hold_lock
from vcasgd.settings import Settings
from vcasgd.spec.sections import LIST_NAME, BaseSpec
from vcasgd.storage.objects import Storage
from vcasgd.task.task import use_base

#: Bytes that are hashed at a time.
CHUNK_BYTES = 8 << 20
#: Most seconds to wait for another worker of this machine that fetches the same base.
LOCK_SECONDS = 3600.0


def prepare_base(
    base: BaseSpec | None, settings: Settings, on_progress: Callable[[], None] = lambda: None
) -> None:
    """Fetch a job's base, if it has one, and make it known to the user's code.

    Raises as :func:`fetch_base` does.
    """
    if base is None:
        use_base(None)
        return
    code = settings.cache_dir
    cache = code / "base" if code else default_cache_folder("base")
    use_base(fetch_base(base, cache, on_progress))


def fetch_base(base: BaseSpec, cache: Path, on_progress: Callable[[], None] = lambda: None) -> Path:
    """Return the path of a base on this machine. Fetch it into ``cache`` if necessary.

    A base that is on this machine already is used where it is. Every call reads the files and
    verifies their digests. ``on_progress`` is called for each part that is read, and while another
    worker fetches the base. Raises :class:`DataError` if a file is missing or has another digest,
    and :class:`~vcasgd.errors.StorageUnavailable`.
    """
    parts = urlsplit(base.location)
    if parts.scheme in ("", "file"):
        copy = _Copy(base, Path(parts.path).parent, None, on_progress)
        copy.verify()
        return copy.path
    with _locked(cache / f".{base.sha256}.lock", on_progress):
        folder = urlunsplit(parts._replace(path=str(PurePosixPath(parts.path).parent)))
        copy = _Copy(base, cache / base.sha256, Storage(folder), on_progress)
        try:
            copy.verify()
        except DataError:
            copy.fetch()
        return copy.path


class _Copy:
    """A base in a folder of this machine, and the storage that it comes from, if any."""

    def __init__(
        self, base: BaseSpec, folder: Path, source: Storage | None, on_progress: Callable[[], None]
    ) -> None:
        self._base, self._folder, self._source = base, folder, source
        self._on_progress = on_progress
        self._name = PurePosixPath(urlsplit(base.location).path).name

    @property
    def path(self) -> Path:
        return self._folder if self._base.is_folder else self._folder / self._name

    def verify(self) -> None:
        """Raise :class:`DataError` unless all files are there with their digests."""
        self._verify(self._folder, self._name, self._base.sha256)
        for name, digest in self._listed(self._folder):
            self._verify(self._folder, name, digest)

    def fetch(self) -> None:
        """Replace the folder's content."""
        # A worker that was killed may have left a part.
        new = self._folder.with_name(f".part-{self._folder.name}")
        shutil.rmtree(new, ignore_errors=True)
        try:
            self._download(new, self._name, self._base.sha256)
            for name, digest in self._listed(new):
                self._download(new, name, digest)
            shutil.rmtree(self._folder, ignore_errors=True)
            new.rename(self._folder)
        except OSError as error:
            raise StorageUnavailable(f"base: can't be stored in {self._folder}: {error}") from error
        finally:
            shutil.rmtree(new, ignore_errors=True)

    def _listed(self, folder: Path) -> Iterator[tuple[str, str]]:
        """Yield the names and digests in the list of a folder, if the base is one."""
        if not self._base.is_folder:
            return
        for line in (folder / self._name).read_text().splitlines():
            digest, _, name = line.partition(" ")
            name = name.lstrip(" *").removeprefix("./")
            if not name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise DataError(f"base: {self._base.location}: no name of a file: {line[:200]!r}")
            if name != LIST_NAME:
                yield name, digest

    def _verify(self, folder: Path, name: str, digest: str) -> None:
        sha256 = hashlib.sha256()
        try:
            with (folder / name).open("rb") as file:
                while chunk := file.read(CHUNK_BYTES):
                    sha256.update(chunk)
                    self._on_progress()
        except OSError as error:
            raise DataError(f"base: {folder / name} can't be read: {error.strerror}") from error
        self._compare(name, sha256.hexdigest(), digest)

    def _download(self, folder: Path, name: str, digest: str) -> None:
        assert self._source is not None
        path, sha256 = folder / name, hashlib.sha256()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("wb") as file:
                for chunk in self._source.stream(name).chunks:
                    sha256.update(chunk)
                    file.write(chunk)
                    self._on_progress()
        except NotFound as error:
            raise DataError(f"base: {name} is not in {self._source.url}") from error
        self._compare(name, sha256.hexdigest(), digest)

    def _compare(self, name: str, found: str, expected: str) -> None:
        if found != expected:
            raise DataError(
                f"base: {name} of {self._base.location} has the digest {found[:12]}…, not "
                f"{expected[:12]}…",
                remedy="restore the file, or set base.sha256 to what sha256sum prints",
            )


@contextmanager
def _locked(path: Path, on_progress: Callable[[], None]) -> Iterator[None]:
    """Hold a lock, so that one worker of this machine fetches while the others wait.

    Raises :class:`StorageUnavailable` after :data:`LOCK_SECONDS`.
    """
    try:
        with hold_lock(path, LOCK_SECONDS, on_progress):
            yield
    except TimeoutError as error:
        raise StorageUnavailable(f"base: {error}") from None
