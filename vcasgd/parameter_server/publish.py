"""Publication of a shard's batches as new versions, and the versions that have to stay."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from vcasgd.errors import StoreFull
from vcasgd.learning.evaluation import EvaluationPoints
from vcasgd.parameter_server.blend import ModelState
from vcasgd.parameter_server.reports import Reports
from vcasgd.store.tensors.snapshot import Change, Meta, Snapshot, SnapshotView, pin_text
from vcasgd.store.tensors.snapshot_index import MAX_PINS
from vcasgd.store.tensors.snapshot_store import REMOVED_CHUNKS, SnapshotStore

#: Longest time for which a version has no low halves if workers need only bfloat16.
EXACT_SECONDS = 1.0


@dataclass
class Publisher:
    """Publisher of one shard under one fencing token.

    Pinned versions stay in the tensors server. So does the previous one: readers may still be
    reading it, so its chunks are deleted one publication later.
    """

    points: EvaluationPoints
    snapshots: SnapshotStore
    reports: Reports
    token: int
    _exact_at: float = field(default=float("-inf"), init=False)
    _pinned: dict[str, Meta] = field(default_factory=dict, init=False)
    _previous: Meta | None = field(default=None, init=False)
    #: True if the tensors server has been full.
    _short: bool = field(default=False, init=False)
    #: Versions that this process has published.
    publications: int = field(default=0, init=False)

    def load_pins(self) -> list[Meta]:
        """Read the pinned versions from the tensors server, and return them."""
        self._pinned = {name: pin.meta for name, pin in self.snapshots.pins().items()}
        self._previous = None
        return list(self._pinned.values())

    def replaced(self, version: Meta) -> None:
        """Record that another version has replaced this one."""
        self._previous = version

    # -- batches -------------------------------------------------------------------------------

    def publish(self, model: ModelState, *, committed: bool = False) -> None:
        """Publish the model's batch. With ``committed``, only the last answer was lost.

        Raises as :meth:`SnapshotStore.commit` does; the same batch may then be published again.
        """
        if not model.batch.closed:
            # Decided once, so that a repeated publication stays the same.
            model.batch.exact = model.batch.point is not None or self.exact_is_due
            model.end_batch()
        meta, changed = model.next_meta(self.token), model.batch.applied > 0
        name, point = None, model.batch.point
        if point is not None and len(self._pinned) < MAX_PINS:
            name = self.points.pin(point)
        elif point != self.points.last:
            # Evaluations don't keep up, so this one is left out.
            point = None
        if not committed:
            self._commit(model, meta, name)
        if changed and meta.exact:
            self._exact_at = time.monotonic()
        if name is not None:
            self._pinned[name] = meta
        if changed:
            self._previous = model.meta
        self.reports.published(model.batch.done, point)
        self.publications += changed
        model.published(meta)

    @property
    def exact_is_due(self) -> bool:
        """True if :data:`EXACT_SECONDS` have passed since the last exact version."""
        return time.monotonic() - self._exact_at >= EXACT_SECONDS

    def complete(self, model: ModelState) -> None:
        """Add the low halves to the present version if they are missing."""
        if not model.meta.exact:
            meta = self.snapshots.complete(model.meta, model.weights)
            self.snapshots.commit(self.token, meta, Change(base=meta.version))
            model.meta, self._exact_at = meta, time.monotonic()

    def _commit(self, model: ModelState, meta: Meta, pin: str | None) -> None:
        batch = model.batch
        unused: list[str] = []
        if batch.applied:
            followed = model.followed if meta.stepped else None
            if self._previous is not None and not self._is_used(self._previous, model.meta):
                unused = self.snapshots.chunk_keys(self._previous)
            # A smaller version needs little room, and would cost one more exchange.
            large = self._short or len(unused) > REMOVED_CHUNKS
            try:
                self.snapshots.write(
                    *(meta, model.weights, model.state, followed, batch.step),
                    base=model.meta.version,
                    instead_of=unused if large else (),
                )
            except StoreFull:
                self._short = True
                raise
            listed = set(self.snapshots.step_keys(meta))
            unused = [] if large else unused
            unused += [key for key in self.snapshots.step_keys(model.meta) if key not in listed]
        change = Change(
            base=model.meta.version,
            fields=model.changed_fields(meta),
            done=tuple(batch.done),
            forget=model.forgotten,
            entries=tuple(batch.entries),
            processed=tuple(batch.processed),
            refused=batch.refused,
            reset=model.positions_to_reset(),
            pin=pin,
            pinned=pin_text(Snapshot(meta, model.stored_record())) if pin else "",
        )
        # Refused updates change the totals, so the description is always written.
        self.snapshots.commit(self.token, meta, change, [*batch.payloads, *unused])

    # -- pins ----------------------------------------------------------------------------------

    def serve_pins(self, view: SnapshotView, model: ModelState) -> None:
        """Delete unpinned versions, and pin the present one under the requested names."""
        for name in self._pinned.keys() - view.pins:
            self._unpin(name, model.meta)
        if names := view.pin_requests[: MAX_PINS - len(self._pinned)]:
            # A name that is in use keeps its version.
            snapshot = Snapshot(model.meta, model.stored_record())
            self.snapshots.pin(self.token, names, snapshot)
            self._pinned = dict.fromkeys(names, model.meta) | self._pinned

    def _unpin(self, name: str, present: Meta) -> None:
        meta = self._pinned[name]
        # The next publication deletes the previous version.
        kept = present, self._previous or present
        if not self._is_used(meta, *kept, apart_from=name):
            self.snapshots.remove(meta)
        del self._pinned[name]

    def _is_used(self, meta: Meta, *present: Meta, apart_from: str = "") -> bool:
        """Return True if a version is one of the present or pinned ones."""
        pinned = (each for name, each in self._pinned.items() if name != apart_from)
        # Its totals may have changed since.
        return any(
            (each.version, each.token) == (meta.version, meta.token) for each in (*present, *pinned)
        )
