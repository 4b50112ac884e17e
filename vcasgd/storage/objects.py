"""Object storage: one folder, S3 bucket or GCS bucket, by URL. The only importer of obstore."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import ObjectStore, from_url

from vcasgd.errors import NotFound, StorageUnavailable

#: a request that takes longer is given up; uploads of large models happen in parts of their own
REQUEST_TIME = timedelta(seconds=60)


class Storage:
    """Named bytes. Every write is atomic: readers see the old object, the new one, or none."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._store = _open(url)
        # an upload in parts that finds a disk full would leave there what it has written
        self._parts = False if urlsplit(url).scheme == "file" else None

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Raises :class:`StorageUnavailable`, also where there is no room."""
        with _mapped(name):
            obstore.put(self._store, name, bytes(data), use_multipart=self._parts)

    def get(self, name: str) -> bytes:
        """Raises :class:`NotFound`, :class:`StorageUnavailable`."""
        with _mapped(name):
            return bytes(obstore.get(self._store, name).bytes())

    def has(self, name: str) -> bool:
        """Raises :class:`StorageUnavailable`."""
        try:
            with _mapped(name):
                obstore.head(self._store, name)
        except NotFound:
            return False
        return True

    def names(self, prefix: str) -> dict[str, int]:
        """Names under a prefix, with sizes in bytes."""
        with _mapped(prefix):
            pages = obstore.list(self._store, prefix)
            return {str(each["path"]): int(each["size"]) for page in pages for each in page}

    def move(self, name: str, to: str) -> None:
        """Replaces what is there. Raises :class:`NotFound`, :class:`StorageUnavailable`."""
        with _mapped(name):
            obstore.rename(self._store, name, to)

    def delete(self, name: str) -> None:
        """Silent where there is no such object."""
        try:
            with _mapped(name):
                obstore.delete(self._store, name)
        except NotFound:
            return


def _open(url: str) -> ObjectStore:
    parts = urlsplit(url)
    with _mapped(url):
        if parts.scheme == "file":
            Path(parts.path).mkdir(parents=True, exist_ok=True)
            return from_url(url)
        # the clouds' own addresses are https; http is only where AWS_ENDPOINT_URL says so, and
        # options given here displace AWS_ALLOW_HTTP
        store: ObjectStore = from_url(
            url, client_options={"timeout": REQUEST_TIME, "allow_http": True}
        )
        return store


@contextmanager
def _mapped(name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(f"{name} is not in the object storage", status=404) from error
    except (BaseError, OSError, ValueError) as error:
        raise StorageUnavailable(f"object storage: {name}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
