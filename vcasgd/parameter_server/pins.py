"""Versions that must stay in the tensors server, and chunks that are no longer needed."""

from __future__ import annotations

from collections.abc import Callable

from vcasgd.store.tensors.snapshot import Meta, Record, Snapshot, SnapshotView
from vcasgd.store.tensors.snapshot_index import MAX_PINS
from vcasgd.store.tensors.snapshot_store import SnapshotStore


class Pins:
    """The pinned versions of a shard, and its previous version.

    Readers may still be reading the previous version, so its chunks are deleted one publication
    later.
    """

    def __init__(self, snapshots: SnapshotStore, token: int) -> None:
        self._snapshots = snapshots
        self._token = token
        self._pinned: dict[str, Meta] = {}
        self._previous: Meta | None = None

    def load(self) -> list[Meta]:
        """Read the pinned versions from the tensors server, and return them."""
        self._pinned = {name: pin.meta for name, pin in self._snapshots.pins().items()}
        self._previous = None
        return list(self._pinned.values())

    @property
    def full(self) -> bool:
        """True if no further version can be pinned."""
        return len(self._pinned) >= MAX_PINS

    def unused_chunks(self, present: Meta) -> list[str]:
        """Return the keys of the version before ``present``, unless it is still in use."""
        if self._previous is None:
            return []
        used = map(_version, (present, *self._pinned.values()))
        if _version(self._previous) in used:
            return []
        return self._snapshots.chunk_keys(self._previous)

    def published(self, before: Meta | None, pinned: dict[str, Meta]) -> None:
        """Record that a version replaced ``before`` (None if unchanged), and what it pinned."""
        self._pinned |= pinned
        if before is not None:
            self._previous = before

    def serve(self, view: SnapshotView, present: Meta, record: Callable[[], Record]) -> None:
        """Delete unpinned versions, and pin the present one under the requested names.

        ``record`` returns the present applied record; it is called only for a pin.
        """
        for name in self._pinned.keys() - view.pins:
            self._drop(name, present)
        names = view.pin_requests[: MAX_PINS - len(self._pinned)]
        if names:
            self._snapshots.pin(self._token, names, Snapshot(present, record()))
            # A name that is in use keeps its version.
            self._pinned = dict.fromkeys(names, present) | self._pinned

    def _drop(self, name: str, present: Meta) -> None:
        meta, remaining = self._pinned[name], {**self._pinned}
        del remaining[name]
        # The next publication deletes the previous version.
        used = [present, self._previous or present, *remaining.values()]
        if _version(meta) not in map(_version, used):
            self._snapshots.remove([meta])
        self._pinned = remaining


def _version(meta: Meta) -> tuple[int, int]:
    """Return what identifies a snapshot's chunks; its totals may change."""
    return meta.version, meta.token
