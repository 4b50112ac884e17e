"""Publication of a shard's batches as new versions of its snapshot."""

from __future__ import annotations

import time

from vcasgd.learning.evaluation import EvaluationPoints
from vcasgd.parameter_server.model_state import ModelState
from vcasgd.parameter_server.pins import Pins
from vcasgd.parameter_server.reports import Reports
from vcasgd.store.tensors.snapshot import Change, Meta, Snapshot, pin_text
from vcasgd.store.tensors.snapshot_store import REMOVED_CHUNKS, SnapshotStore

#: Longest time for which a version has no low halves if workers need only bfloat16.
EXACT_SECONDS = 1.0


class Publisher:
    """Publisher of one shard under one fencing token."""

    def __init__(
        self,
        points: EvaluationPoints,
        snapshots: SnapshotStore,
        pins: Pins,
        reports: Reports,
        token: int,
    ) -> None:
        self._points = points
        self._snapshots = snapshots
        self._pins = pins
        self._reports = reports
        self._token = token
        self._exact_at = float("-inf")
        #: Versions that this process has published.
        self.publications = 0

    def publish(self, model: ModelState, *, committed: bool = False) -> None:
        """Publish the model's batch. With ``committed``, only the last answer was lost.

        Raises as :meth:`SnapshotStore.commit` does; the same batch may then be published again.
        """
        meta, changed = model.next_meta(self._token), model.batch.applied > 0
        name, point = None, model.batch.point
        if point is not None and not self._pins.full:
            name = self._points.pin(point)
        elif point != self._points.last:
            # Evaluations don't keep up, so this one is left out.
            point = None
        if not committed:
            self._commit(model, meta, name)
        if changed and meta.exact:
            self._exact_at = time.monotonic()
        self._pins.published(model.meta if changed else None, {name: meta} if name else {})
        self._reports.published(model.batch.done, point)
        self.publications += changed
        model.published(meta)

    @property
    def exact_is_due(self) -> bool:
        """True if :data:`EXACT_SECONDS` have passed since the last exact version."""
        return time.monotonic() - self._exact_at >= EXACT_SECONDS

    def complete(self, model: ModelState) -> None:
        """Add the low halves to the present version if they are missing."""
        if not model.meta.exact:
            meta = self._snapshots.complete(model.meta, model.weights)
            self._snapshots.commit(self._token, meta, Change(base=meta.version))
            model.meta, self._exact_at = meta, time.monotonic()

    def _commit(self, model: ModelState, meta: Meta, pin: str | None) -> None:
        batch = model.batch
        unused: list[str] = []
        if batch.applied:
            followed = model.followed if meta.stepped else None
            unused = self._pins.unused_chunks(model.meta)
            # A smaller version needs little room, and would cost one more exchange.
            large = len(unused) > REMOVED_CHUNKS
            self._snapshots.write(
                *(meta, model.weights, model.state, followed, batch.step),
                base=model.meta.version,
                instead_of=unused if large else (),
            )
            listed = set(self._snapshots.step_keys(meta))
            unused = [] if large else unused
            unused += [key for key in self._snapshots.step_keys(model.meta) if key not in listed]
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
        self._snapshots.commit(self._token, meta, change, [*batch.payloads, *unused])
