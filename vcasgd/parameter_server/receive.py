"""Takes updates from the stream: receives and checks each, and blends it into the model."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from dataclasses import dataclass, field

from vcasgd.errors import Cause, InvalidUpdate, fault_of
from vcasgd.parameter_server.blend import MAX_UPDATES, ModelState
from vcasgd.parameter_server.reports import Reports
from vcasgd.parameter_server.verification import ServerVerification
from vcasgd.store.acl import worker_key
from vcasgd.store.keys import TensorKeys
from vcasgd.store.ledger.job import Failure
from vcasgd.store.ledger.leases import WorkKind
from vcasgd.store.tensors.header import Header
from vcasgd.store.tensors.snapshot_store import SnapshotStore
from vcasgd.store.tensors.updates import Arrivals, StreamEntry, UpdateReader, payload_keys

#: Times that an update may fail for no known reason. The first may be accidents, but without a
#: limit, one update would hold up the whole job.
UPDATE_ATTEMPTS = 3
#: Reason for the rejection of an update that failed so often.
POISON = "poison"


@dataclass
class Collector:
    """Collector of one shard's updates. ``secret`` derives the keys of workers, if they have any.

    Methods raise as :meth:`~vcasgd.parameter_server.shard.Shard.turn` does.
    """

    keys: TensorKeys
    secret: str | None
    snapshots: SnapshotStore
    reader: UpdateReader
    reports: Reports
    verification: ServerVerification
    #: How often updates failed for no known reason, by their entries in the stream.
    _attempts: Counter[str] = field(default_factory=Counter, init=False)
    #: The last of these failures, and its traceback.
    _failure: tuple[str, str] = field(default=("", ""), init=False)

    def collect(self, model: ModelState, arrivals: Arrivals | None) -> int:
        """Blend new updates until the batch is full; return the number of processed ones."""
        processed, last_read = 0, model.batch.last_read
        # A publication or rollback since then has moved the cursor.
        if arrivals is None or arrivals.after != last_read:
            arrivals = Arrivals(last_read, self.reader.read(MAX_UPDATES, last_read))
        for entry in arrivals.entries:
            if model.full:
                break
            processed += self._take(model, entry)
        return processed

    def published(self) -> None:
        """Forget the failures of a batch that is published."""
        self._attempts.clear()

    def _take(self, model: ModelState, entry: StreamEntry) -> bool:
        """Process an update; return False if it is left to the next round.

        After any error but :class:`InvalidUpdate`, the next turn processes it again. If it is not
        the store's, it does so at most :data:`UPDATE_ATTEMPTS` times.
        """
        header: Header | None = None
        keys: list[str] = []
        try:
            header = Header.parse(entry.header)
            self._check_author(header)
            if model.belongs_to_next(header):
                model.batch.last_read = entry.id
                return False
            keys = payload_keys(self.keys, header, model.payload_size)
            if self._attempts[entry.id] >= UPDATE_ATTEMPTS:
                raise self._poison(entry, header)
            model.check(header)
            at = 0
            for chunk in self.reader.receive(header, model.payload(header)):
                model.inspect(header, chunk, at)
                at += chunk.nbytes
            self.verification.check(header, model)
            version = model.meta.version
            model.blend(entry.id, header, keys)
            model.members.arrive(header, time.monotonic())
        except InvalidUpdate as error:
            if error.reason == "missing":
                # Raises SnapshotMissing if the server came back empty; the worker is innocent.
                self.snapshots.version()
            model.refuse(entry.id, header, error.reason, keys)
            model.batch.last_read = entry.id
            self.reports.rejected(header, error)
        except Exception as error:
            if fault_of(error) is Cause.WORK:
                self._attempts[entry.id] += 1
                self._failure = f"{type(error).__name__}: {error}", traceback.format_exc()
            raise
        else:
            # At once: an error below must not have the entry processed again.
            model.batch.last_read = entry.id
            self.reports.applied(header.worker)
            self.verification.applied(header, version)
        return True

    def _poison(self, entry: StreamEntry, header: Header) -> InvalidUpdate:
        """Return why an update is refused that failed too often, and report it to the job once."""
        why, trace = self._failure
        text = (
            f"update {header.update}, samples {header.start} to {header.stop} of subtask "
            f"{header.subtask}, failed {UPDATE_ATTEMPTS} times: {why}"
        )
        if self._attempts[entry.id] == UPDATE_ATTEMPTS:
            self._attempts[entry.id] += 1
            piece = f"{WorkKind.TRAIN}:{header.subtask}"
            self.reports.failed(Failure(header.worker, piece, text, trace, Cause.WORK))
        return InvalidUpdate(text, reason=POISON)

    def _check_author(self, header: Header) -> None:
        """Check the signature, if workers have keys. Raises :class:`InvalidUpdate`."""
        if self.secret is not None:
            key = worker_key(self.secret, self.keys.job, header.worker)
            header.check_signature(key, self.keys)
