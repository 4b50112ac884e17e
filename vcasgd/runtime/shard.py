"""One shard of one job in the parameter server's memory: check, blend, publish, account.

Every step can be cut off at any line. What was blended but not published is published at the
next turn; what was published but not told to the ledger is told at the next turn; and a new
process finds in the tensors server all that it needs.
"""

from __future__ import annotations

import base64
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vcasgd.errors import (
    CheckpointDamaged,
    Fenced,
    InvalidUpdate,
    NotFound,
    SnapshotMissing,
    StoreUnavailable,
)
from vcasgd.learning.codecs import Codec, make_codec
from vcasgd.learning.rules import Context, Rule, make_rule, merge_integers
from vcasgd.learning.subtasks import AppliedRecord, EpochPlan
from vcasgd.learning.vector import Layout
from vcasgd.runtime.checkpoints import Checkpoints
from vcasgd.runtime.names import epoch_pin
from vcasgd.store.connection import Client
from vcasgd.store.jobs import Facts, Job, Jobs
from vcasgd.store.keys import TensorKeys
from vcasgd.store.leases import Accounts
from vcasgd.store.snapshots import (
    MOST_PINS,
    Change,
    Look,
    Meta,
    Record,
    Snapshot,
    Snapshots,
    Totals,
    new_meta,
    pin_text,
)
from vcasgd.store.updates import Entry, Header, UpdateReader

log = logging.getLogger(__name__)

#: updates that one publication takes at most: bounds how long a reader waits for a version
BATCH = 32
#: rejected updates after which a worker is not asked again
REJECTIONS_BEFORE_QUARANTINE = 5
#: seconds between two points of the metrics
METRICS_SECONDS = 1.0
#: events kept while the ledger is away
EVENTS_KEPT = 1000
#: rejections that say nothing bad of a worker: another one was faster, or an earlier update
#: of the same subtask was lost
INNOCENT = frozenset({"duplicate", "out-of-place"})


@dataclass
class Batch:
    """Updates that are dealt with in memory and not yet published."""

    applied: int = 0
    entries: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    touched: set[int] = field(default_factory=set)
    reset: set[int] = field(default_factory=set)
    folded: list[int] = field(default_factory=list)
    payloads: list[str] = field(default_factory=list)

    @property
    def full(self) -> bool:
        # the end of an epoch gets a version of its own, so that it can be evaluated exactly
        return len(self.entries) >= BATCH or bool(self.folded)


class Shard:
    """Owns the parameters of one job on one store node, under one fencing token.

    :meth:`turn` raises :class:`~vcasgd.errors.StoreUnavailable` while a server is away,
    :class:`~vcasgd.errors.StoreFull` while it has no room,
    :class:`~vcasgd.errors.SnapshotMissing` where it came back empty in the middle of the turn,
    and :class:`~vcasgd.errors.StorageUnavailable` while a checkpoint is needed and can't be
    read; it may then simply be called again. It raises :class:`~vcasgd.errors.Fenced` when a
    newer parameter server has taken over.
    """

    def __init__(
        self,
        job: Job,
        token: int,
        *,
        tensors: Client,
        ledger: Client,
        checkpoints: Checkpoints,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if job.facts is None:
            raise ValueError(f"{job.id} has no facts yet")
        self.job = job.id
        self._spec = job.spec
        self._token = token
        self._clock = clock
        self._jobs = Jobs(ledger)
        self._accounts = Accounts(ledger, job.id)
        self._checkpoints = checkpoints
        keys = TensorKeys(job.id)
        self._snapshots = Snapshots(tensors, keys)
        self._reader = UpdateReader(tensors, keys)
        self._keys = keys
        self._configure(job.facts)

        self._weights = torch.empty(0)
        self._integers = torch.empty(0, dtype=torch.int64)
        self._record = AppliedRecord(self._plan)
        self._loaded = False
        self._meta: Meta | None = None
        self._previous: Meta | None = None
        self._pinned: dict[str, Meta] = {}
        self._batch = Batch()
        self._unaccounted: list[int] = []
        self._behind = False
        self._unsaid: deque[tuple[str, str, dict[str, Any]]] = deque(maxlen=EVENTS_KEPT)
        self._rejections: Counter[str] = Counter()
        self._reported: tuple[float, Totals] = (clock(), Totals())
        self._asked_for_initial = False

    def _configure(self, facts: Facts) -> None:
        self._layout = Layout.from_json(facts.layout)
        self._layout_digest = self._layout.digest()
        self._plan = EpochPlan(
            facts.samples, self._spec.subtasks_per_epoch, self._spec.epochs, self._spec.seed
        )
        self._rule: Rule = make_rule(self._spec.update)
        self._codec: Codec = make_codec(self._spec.update.codec)
        self._scratch = torch.empty(self._layout.floats)
        self._payload_size = self._codec.encoded_size(self._layout.floats)

    @property
    def stream(self) -> str:
        return self._reader.stream

    @property
    def version(self) -> int:
        return self._meta.version if self._meta else 0

    # -- one turn of the loop ------------------------------------------------------------------

    def turn(self) -> int:
        """Does what there is to do; returns how many updates it dealt with."""
        if not self._loaded and not self._load():
            return 0
        look = self._snapshots.look()
        if look.version is None:
            self._republish()
            return 0
        self._check_version(look.version)
        if self._batch.entries:
            self._publish(committed=self._batch.applied > 0 and look.version != self.version)
        self._serve_pins(look)
        dealt = self._collect()
        if self._batch.entries:
            self._publish()
        self._tell_ledger()
        self._add_metrics()
        return dealt

    def close(self) -> None:
        """The job is no longer active. Raises :class:`StoreUnavailable`."""
        # it may have been published again after the controller had removed it
        if self._is_over():
            self._snapshots.forget()

    def _is_over(self) -> bool:
        try:
            return self._jobs.get(self.job).state.over
        except (StoreUnavailable, NotFound):
            return False

    def _check_version(self, stored: int) -> None:
        assert self._meta is not None
        published = self._meta.version
        # an unpublished batch may have been committed although its answer was lost
        if stored not in (published, published + self._batch.applied):
            raise Fenced(f"version {stored} of {self.job} was not written by this server")

    # -- taking over, coming back --------------------------------------------------------------

    def _load(self) -> bool:
        self._snapshots.takeover(self._token)
        try:
            self._weights = torch.empty(self._layout.floats)
            self._adopt(self._snapshots.fetch(self._weights))
        except SnapshotMissing:
            if not self._restore():
                return False
        assert self._meta is not None
        self._pinned = {name: pin.meta for name, pin in self._snapshots.pins().items()}
        self._snapshots.forget_orphans([self._meta, *self._pinned.values()])
        self._reconcile()
        self._loaded = True
        return True

    def _adopt(self, snapshot: Snapshot) -> None:
        self._meta, self._previous = snapshot.meta, None
        self._integers = snapshot.meta.integer_vector()
        self._record = AppliedRecord(
            self._plan, snapshot.record.finished, dict(snapshot.record.positions)
        )
        self._batch = Batch()
        self._reported = (self._clock(), snapshot.meta.totals)

    def _restore(self) -> bool:
        """Neither the tensors server nor this process has the model: back to a checkpoint."""
        loaded = self._checkpoints.newest(self._say_damaged)
        if loaded is None:
            self._ask_for_initial()
            return False
        meta = replace(loaded.snapshot.meta, token=self._token)
        self._weights = loaded.floats
        self._adopt(Snapshot(meta, loaded.snapshot.record))
        self._snapshots.install(self._token, meta, self._stored_record(), self._weights)
        self._say(
            "restored",
            f"the tensors server and its parameter server were both lost; the model is back at "
            f"version {meta.version} from checkpoint {loaded.name}",
            version=meta.version,
        )
        return True

    def _ask_for_initial(self) -> None:
        if self._asked_for_initial:
            return
        self._accounts.reconcile(self._token, 0, 0, "{}", [], initialise=True)
        self._jobs.event(
            self.job, "restarted", "the model was lost before its first checkpoint; it starts anew"
        )
        self._asked_for_initial = True

    def _say_damaged(self, error: CheckpointDamaged) -> None:
        log.warning("%s", error)
        self._say("checkpoint-damaged", f"{error.message}; the one before is used")

    def _republish(self) -> None:
        """The tensors server came back empty, but the model is still in this memory."""
        assert self._meta is not None
        if self._is_over():
            return
        self._check_newest()
        batch = self._batch
        meta = self._next_meta(batch)
        self._snapshots.install(self._token, meta, self._stored_record(), self._weights)
        self._unaccounted += self._newly_done(batch)
        self._meta, self._previous, self._pinned = meta, None, {}
        self._batch = Batch()
        self._behind = True
        self._say(
            "republished",
            f"the tensors server came back empty; version {meta.version} was published again",
            version=meta.version,
        )

    def _check_newest(self) -> None:
        """The fence went with the tensors server; the ledger still knows who has taken over."""
        try:
            newest = self._jobs.work(self.job).get("server_token", 0)
        except StoreUnavailable:
            return  # the ledger's absence stops no training
        if newest > self._token:
            raise Fenced(f"a parameter server with token {newest} has taken over")

    def _reconcile(self) -> None:
        assert self._meta is not None
        reopened = self._accounts.reconcile(
            self._token,
            self._meta.version,
            self._record.finished_epochs,
            self._totals_text(self._meta.totals),
            self._record.done_subtasks(),
        )
        log.info("%s: version %d, %d subtasks open again", self.job, self.version, reopened)

    # -- claim, check, blend -------------------------------------------------------------------

    def _collect(self) -> int:
        seen = set(self._batch.entries)
        entries = [each for each in self._reader.read(BATCH) if each.id not in seen]
        dealt = 0
        for entry in entries:
            if self._batch.full:
                break
            self._take(entry)
            dealt += 1
        return dealt

    def _take(self, entry: Entry) -> None:
        header: Header | None = None
        try:
            header = Header.parse(entry.header)
            self._check(header)
            self._decode(header)
        except InvalidUpdate as error:
            if error.reason == "missing":
                # no fault of the worker's where the server has just come back empty
                self._snapshots.version()
            self._refuse(entry, header, error)
            return
        self._blend(entry, header)

    def _check(self, header: Header) -> None:
        """Everything that can be checked without the payload. Raises :class:`InvalidUpdate`."""
        assert self._meta is not None
        if header.layout != self._layout_digest:
            raise InvalidUpdate("the update is of another model", reason="layout")
        if header.codec != self._codec.name:
            raise InvalidUpdate(f"encoding {header.codec}", reason="codec")
        self._record.copy().advance(header.subtask, header.start, header.stop)

    def _decode(self, header: Header) -> None:
        payload = self._reader.payload(header, self._payload_size)
        self._codec.decode(memoryview(payload), self._scratch)
        # a sum is finite only if all its terms are; the exact test is needed only if it is not
        if not torch.isfinite(self._scratch.sum()) and not torch.isfinite(self._scratch).all():
            raise InvalidUpdate("the update is not finite", reason="non-finite")
        self._arrived_integers = _integers(header, self._integers.numel())

    def _blend(self, entry: Entry, header: Header) -> None:
        assert self._meta is not None
        batch, totals = self._batch, self._meta.totals
        staleness = max(0, self._meta.version + batch.applied - header.base)
        context = Context(
            staleness, self._plan.epoch_of(header.subtask) + 1, self._layout.parameters
        )
        self._rule.blend(self._weights, self._scratch, context)
        merge_integers(self._integers, self._arrived_integers)
        batch.folded += self._record.advance(header.subtask, header.start, header.stop)
        batch.touched.add(header.subtask)
        batch.applied += 1
        batch.entries.append(entry.id)
        batch.payloads += self._reader.payload_keys(header, self._payload_size)
        self._rejections.pop(header.worker, None)
        self._meta = replace(
            self._meta,
            totals=replace(
                totals,
                updates=totals.updates + 1,
                samples=totals.samples + header.stop - header.start,
                staleness_sum=totals.staleness_sum + staleness,
                staleness_max=max(totals.staleness_max, staleness),
                loss_sum=totals.loss_sum + header.loss_sum,
            ),
        )

    def _refuse(self, entry: Entry, header: Header | None, error: InvalidUpdate) -> None:
        assert self._meta is not None
        batch, totals = self._batch, self._meta.totals
        counts = {**totals.rejected, error.reason: totals.rejected.get(error.reason, 0) + 1}
        self._meta = replace(self._meta, totals=replace(totals, rejected=counts))
        batch.entries.append(entry.id)
        if header is not None:
            batch.refused[header.update] = error.reason
            batch.payloads += self._reader.payload_keys(header, self._payload_size)
            if 0 <= header.subtask < self._plan.total_subtasks:
                batch.reset.add(header.subtask)
        if error.reason not in INNOCENT:
            self._say_rejected(header, error)

    def _say_rejected(self, header: Header | None, error: InvalidUpdate) -> None:
        worker = header.worker if header else "unknown"
        self._rejections[worker] += 1
        log.warning("%s: update of %s rejected: %s", self.job, worker, error)
        self._say(
            "update-rejected",
            f"an update of {worker} was rejected: {error.message}",
            worker=worker,
            reason=error.reason,
        )
        if header and self._rejections[worker] >= REJECTIONS_BEFORE_QUARANTINE:
            why = f"{self._rejections[worker]} updates in a row were rejected, last: {error.reason}"
            if self._jobs.quarantine(self.job, worker, why):
                self._say("worker-quarantined", f"{worker}: {why}", worker=worker)

    # -- publish, account ----------------------------------------------------------------------

    def _publish(self, *, committed: bool = False) -> None:
        """``committed``: it already happened, only the answer to the last turn was lost."""
        assert self._meta is not None
        batch, meta = self._batch, self._next_meta(self._batch)
        name, pinned = self._epoch_pin(batch, meta)
        if not committed:
            self._commit(batch, meta, name, pinned)
        if name is not None:
            self._pinned[name] = meta
        if batch.applied:
            self._previous = self._meta
        self._unaccounted += self._newly_done(batch)
        self._meta, self._batch, self._behind = meta, Batch(), True

    def _commit(self, batch: Batch, meta: Meta, name: str | None, pinned: str) -> None:
        if batch.applied:
            self._snapshots.write(meta, self._weights)
        change = Change(
            fields=self._changed_fields(batch, meta),
            forget=tuple(batch.folded),
            entries=tuple(batch.entries),
            refused=batch.refused,
            reset={
                str(each): self._record.position(each)
                for each in batch.reset
                if self._plan.epoch_of(each) >= self._record.finished_epochs
            },
            pin=name,
            pinned=pinned,
        )
        spare = self._spare(self._previous) if batch.applied else []
        # totals count what was refused too, so the description is written in either case
        self._snapshots.commit(self._token, meta, change, [*batch.payloads, *spare])

    def _next_meta(self, batch: Batch) -> Meta:
        assert self._meta is not None
        if not batch.applied:
            return self._meta
        version = self._meta.version + batch.applied
        return new_meta(self._meta, self._token, version=version, integers=self._integers)

    def _changed_fields(self, batch: Batch, meta: Meta) -> dict[str, int]:
        if not batch.applied:
            return {}
        finished = self._record.finished_epochs
        open_subtasks = batch.touched - set(batch.folded)
        positions = {str(each): self._record.position(each) for each in open_subtasks}
        head = {"version": meta.version, "token": meta.token, "finished": finished}
        return {**head, **positions}

    def _newly_done(self, batch: Batch) -> list[int]:
        return [each for each in batch.touched if self._record.is_done(each)]

    def _epoch_pin(self, batch: Batch, meta: Meta) -> tuple[str | None, str]:
        if not batch.folded or len(self._pinned) >= MOST_PINS:
            return None, ""
        name = epoch_pin(self._record.finished_epochs)
        return name, pin_text(Snapshot(meta, self._stored_record()))

    def _stored_record(self) -> Record:
        return Record(self._record.finished_epochs, dict(self._record.positions))

    def _spare(self, meta: Meta | None) -> list[str]:
        """The chunks of a version that nobody may need any more."""
        if meta is None or self._meta is None:
            return []
        used = map(_chunks_of, (self._meta, *self._pinned.values()))
        return [] if _chunks_of(meta) in used else self._snapshots.chunk_keys(meta)

    def _serve_pins(self, look: Look) -> None:
        assert self._meta is not None
        for name in self._pinned.keys() - look.pins:
            meta, kept = self._pinned[name], {**self._pinned}
            del kept[name]
            # the version before this one goes with the next publication
            used = [self._meta, self._previous or self._meta, *kept.values()]
            if _chunks_of(meta) not in map(_chunks_of, used):
                self._snapshots.remove([meta])
            self._pinned = kept
        room = MOST_PINS - len(self._pinned)
        names = look.wanted[:room]
        # while a batch is unpublished the memory is ahead of what readers can get
        if names and not self._batch.entries:
            self._snapshots.pin(self._token, names, Snapshot(self._meta, self._stored_record()))
            # one that is kept already stays what it is
            self._pinned = dict.fromkeys(names, self._meta) | self._pinned

    def _say(self, kind: str, text: str, **details: Any) -> None:
        """An event for the job's history; the ledger hears of it at the end of a turn."""
        self._unsaid.append((kind, text, details))

    def _tell_ledger(self) -> None:
        while self._unsaid:
            kind, text, details = self._unsaid[0]
            self._jobs.event(self.job, kind, text, **details)
            self._unsaid.popleft()
        if not self._behind or self._meta is None:
            return
        self._accounts.account(
            self._token,
            self._meta.version,
            self._record.finished_epochs,
            self._totals_text(self._meta.totals),
            self._unaccounted,
        )
        self._unaccounted, self._behind = [], False

    def _totals_text(self, totals: Totals) -> str:
        expected = self._record.samples_applied
        return totals.to_json(applied=expected, repeated=totals.samples - expected)

    def _add_metrics(self) -> None:
        assert self._meta is not None
        now, totals = self._clock(), self._meta.totals
        since, before = self._reported
        updates, samples = totals.updates - before.updates, totals.samples - before.samples
        if now - since < METRICS_SECONDS or not updates:
            return
        self._jobs.add_metrics(
            self.job,
            {
                "at": now,
                "version": self._meta.version,
                "updates": totals.updates,
                "samples": totals.samples,
                "finished_epochs": self._record.finished_epochs,
                "updates_per_second": updates / (now - since),
                "samples_per_second": samples / (now - since),
                "loss": (totals.loss_sum - before.loss_sum) / samples,
                "staleness_mean": (totals.staleness_sum - before.staleness_sum) / updates,
                "staleness_max": totals.staleness_max,
                "rejected": sum(totals.rejected.values()),
                "waiting": self._reader.waiting(),
            },
        )
        self._reported = (now, totals)


def _chunks_of(meta: Meta) -> tuple[int, int]:
    """What names a snapshot's chunks; the totals beside them may change."""
    return meta.version, meta.token


def _integers(header: Header, expected: int) -> Tensor:
    """Raises :class:`InvalidUpdate` (``integers``)."""
    try:
        raw = base64.b64decode(header.integers, validate=True)
        vector = np.frombuffer(raw, dtype="<i8").astype(np.int64)
    except ValueError as error:
        raise InvalidUpdate("the counters can't be decoded", reason="integers") from error
    if len(vector) != expected:
        raise InvalidUpdate(f"{len(vector)} counters, {expected} expected", reason="integers")
    return torch.from_numpy(vector)
