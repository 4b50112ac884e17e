"""Which versions in the tensors server must stay, and which chunks nobody needs any more."""

from __future__ import annotations

from vcasgd.store.tensors.snapshot import Meta, Snapshot, SnapshotView
from vcasgd.store.tensors.snapshots import MOST_PINS, Snapshots


class Pins:
    """The parameter server's memory of pinned versions, and of the version before the present.

    Readers may still be reading the version before, so it goes one publication later.
    """

    def __init__(self, snapshots: Snapshots, token: int) -> None:
        self._snapshots = snapshots
        self._token = token
        self._pinned: dict[str, Meta] = {}
        self._previous: Meta | None = None

    def load(self) -> list[Meta]:
        """After taking over: the versions that are pinned."""
        self._pinned = {name: pin.meta for name, pin in self._snapshots.pins().items()}
        self._previous = None
        return list(self._pinned.values())

    def forget(self) -> None:
        """The tensors server came back empty, and with it every pin is gone."""
        self._pinned, self._previous = {}, None

    @property
    def full(self) -> bool:
        return len(self._pinned) >= MOST_PINS

    def spare(self, present: Meta) -> list[str]:
        """Keys of the version before ``present``, if nobody may need it any more."""
        if self._previous is None:
            return []
        used = map(_version, (present, *self._pinned.values()))
        if _version(self._previous) in used:
            return []
        return self._snapshots.chunk_keys(self._previous)

    def published(self, before: Meta | None, pinned: dict[str, Meta]) -> None:
        """A version replaced ``before`` (None: it changed nothing), and was pinned or not."""
        self._pinned |= pinned
        if before is not None:
            self._previous = before

    def serve(self, look: SnapshotView, present: Snapshot) -> None:
        """Removes what was unpinned, and pins the present version under the wanted names."""
        for name in self._pinned.keys() - look.pins:
            self._drop(name, present.meta)
        names = look.wanted[: MOST_PINS - len(self._pinned)]
        if names:
            self._snapshots.pin(self._token, names, present)
            # one that is kept already stays what it is
            self._pinned = dict.fromkeys(names, present.meta) | self._pinned

    def _drop(self, name: str, present: Meta) -> None:
        meta, kept = self._pinned[name], {**self._pinned}
        del kept[name]
        # the version before this one goes with the next publication
        used = [present, self._previous or present, *kept.values()]
        if _version(meta) not in map(_version, used):
            self._snapshots.remove([meta])
        self._pinned = kept


def _version(meta: Meta) -> tuple[int, int]:
    """What names a snapshot's chunks; the totals beside them may change."""
    return meta.version, meta.token
