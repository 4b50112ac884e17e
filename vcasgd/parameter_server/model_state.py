"""The global model in the parameter server's memory: updates are checked and blended. No I/O."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from vcasgd.errors import InvalidUpdate
from vcasgd.learning.encodings.encoder import payload_formats
from vcasgd.learning.encodings.payload import PayloadFormat
from vcasgd.learning.rules import Context, make_rule, merge_integers
from vcasgd.learning.shards import Cut
from vcasgd.learning.subtasks import AppliedRecord, EpochPlan
from vcasgd.learning.vector import Layout
from vcasgd.spec.job import JobSpec
from vcasgd.store.ledger.job import ModelFacts
from vcasgd.store.tensors.snapshot import MOST_STALENESS, Meta, Record, Snapshot, Totals, new_meta
from vcasgd.store.tensors.updates import UNSIGNED, Header

#: updates that one publication takes at most: bounds how long a reader waits for a version
MOST_UPDATES = 32
#: the largest magnitude in an update; more would take the weights out of float32 before long
LARGEST_VALUE = 1e30
#: numbers that are decoded and blended at a time: 1 MiB of float32
PIECE_FLOATS = 1 << 18


class ShardConfig:
    """How a shard's updates look and what is done with them; nothing here ever changes."""

    def __init__(self, spec: JobSpec, facts: ModelFacts, shard: int = 0) -> None:
        layout = Layout.from_json(facts.layout)
        self.layout_digest = layout.digest()
        self.part = Cut(layout.floats, layout.parameters, facts.shards, layout.sent).parts[shard]
        self.plan = EpochPlan(facts.samples, spec.subtasks_per_epoch, spec.epochs, spec.seed)
        self.rule = make_rule(spec.update)
        self.wires = payload_formats(spec.update, layout, self.part)
        #: bytes of a payload, at most
        self.payload_size = max(wire.size for wire in self.wires.values())
        #: bytes of the weights, and of what the rule remembers
        self.snapshot_size = self.part.floats * 4 * (2 if self.rule.stateful else 1)


@dataclass
class Batch:
    """Updates that are dealt with in memory and not yet published."""

    applied: int = 0
    entries: list[str] = field(default_factory=list)
    #: names of the updates in the entries, where those could be read
    dealt: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    touched: set[int] = field(default_factory=set)
    reset: set[int] = field(default_factory=set)
    folded: list[int] = field(default_factory=list)
    #: whether its publication is to be exact where workers make do with less
    exact: bool = True
    #: keys of payloads that nobody needs any more
    payloads: list[str] = field(default_factory=list)

    @property
    def full(self) -> bool:
        # the end of an epoch gets a version of its own, so that it can be evaluated exactly
        return len(self.entries) >= MOST_UPDATES or bool(self.folded)


class ModelState:
    """The parameters, applied record and totals of one shard of a job.

    ``weights`` is float32 [floats], ``integers`` int64 [k], ``state`` of the rule float32 [floats]
    or None where it needs none. They are ahead of what is published by what ``batch`` holds;
    :meth:`published` starts a new batch.
    """

    def __init__(
        self, recipe: ShardConfig, snapshot: Snapshot, weights: Tensor, state: Tensor | None = None
    ) -> None:
        self._recipe = recipe
        scratches = (wire.scratch(PIECE_FLOATS) for wire in recipe.wires.values())
        self._scratch = max(scratches, key=len)
        self._room = memoryview(bytearray(recipe.payload_size))
        self.weights = weights
        if recipe.rule.stateful and state is None:
            # the first snapshot is a worker's, who knows nothing of it
            state = torch.zeros_like(weights)
        self.state = state
        #: published versions that updates may have been made from
        self._bases: dict[int, Tensor] = {}
        self.integers = snapshot.meta.integer_vector()
        self.record = AppliedRecord(
            recipe.plan, snapshot.record.finished, dict(snapshot.record.positions)
        )
        #: subtasks that are applied in part
        self.partly = {each for each in self.record.positions if not self.record.is_done(each)}
        self.batch = Batch()
        #: of the published version; only its totals run ahead
        self.meta = snapshot.meta
        #: by which the weight of updates is multiplied
        self.factor = 1.0
        self._remember()

    # -- updates -------------------------------------------------------------------------------

    def check(self, header: Header) -> None:
        """All that can be checked without the payload. Raises :class:`InvalidUpdate`."""
        if header.shard != self._recipe.part.shard:
            raise InvalidUpdate(f"the update is of shard {header.shard}", reason="shard")
        if header.layout != self._recipe.layout_digest:
            raise InvalidUpdate("the update is of another model", reason="layout")
        if header.codec not in self._recipe.wires:
            raise InvalidUpdate(f"encoding {header.codec}", reason="codec")
        if not self._wire(header).fits(header.size):
            raise InvalidUpdate(f"payload of {header.size} bytes", reason="length")
        self.record.copy().advance(header.subtask, header.start, header.stop)

    def payload(self, header: Header) -> memoryview:
        """Where the bytes of an update are received that was checked."""
        return self._room[: header.size]

    def inspect(self, header: Header, chunk: memoryview, at: int) -> None:
        """Looks at the bytes of an update from ``at`` on before anything of it is applied. Raises
        :class:`InvalidUpdate` (``non-finite``)."""
        # NaN fails any comparison, so this refuses it together with infinity
        if not self._wire(header).max_magnitude(chunk, at) <= LARGEST_VALUE:
            raise InvalidUpdate("the update is not finite, or far too large", reason="non-finite")

    def blend(self, entry: str, header: Header, keys: list[str]) -> None:
        """Applies the update in ``payload``, which was checked and inspected.

        Raises :class:`InvalidUpdate` and has changed nothing then.
        """
        integers = _integers(header, self.integers.numel())
        self._wire(header).check(self.payload(header))
        version = self.meta.version + self.batch.applied
        staleness = max(0, version - header.base)
        self._blend_floats(
            header,
            Context(
                staleness,
                epoch=self._recipe.plan.epoch_of(header.subtask) + 1,
                parameters=self._recipe.part.parameters,
                number=version + 1,
                ends_epoch=bool(
                    self.record.copy().advance(header.subtask, header.start, header.stop)
                ),
                state=self.state,
                base=self._bases.get(header.base),
                factor=self.factor,
            ),
        )
        if integers is not None:
            merge_integers(self.integers, integers)
        self._note(entry, header, staleness, keys)

    def _blend_floats(self, header: Header, context: Context) -> None:
        """Piece by piece, so that what is decoded is still in the cache when it is blended."""
        rule, payload = self._recipe.rule, self.payload(header)
        for piece in self._wire(header).pieces(PIECE_FLOATS):
            numbers = piece.decode(payload, self._scratch)
            part = context.piece(piece.start, piece.stop)
            rule.blend(self.weights[piece.start : piece.stop], numbers, part)

    def refuse(self, entry: str, header: Header | None, reason: str, keys: list[str]) -> None:
        """Counts an update that failed a check; its worker will be told."""
        counts = self.meta.totals.rejected
        self._count(rejected={**counts, reason: counts.get(reason, 0) + 1})
        self.batch.entries.append(entry)
        self.batch.payloads += keys
        if header is not None:
            if reason != UNSIGNED:  # whom it names did not send it: its own update is elsewhere
                self.batch.dealt.append(header.update)
                self.batch.refused[header.update] = reason
            if header.subtask < self._recipe.plan.total_subtasks:
                self.batch.reset.add(header.subtask)

    def _wire(self, header: Header) -> PayloadFormat:
        return self._recipe.wires[header.codec]

    def _note(self, entry: str, header: Header, staleness: int, keys: list[str]) -> None:
        batch, totals = self.batch, self.meta.totals
        batch.folded += self.record.advance(header.subtask, header.start, header.stop)
        batch.touched.add(header.subtask)
        self.partly.add(header.subtask)
        if self.record.is_done(header.subtask):
            self.partly.remove(header.subtask)
        bucket = str(min(staleness, MOST_STALENESS))
        batch.applied += 1
        batch.entries.append(entry)
        batch.dealt.append(header.update)
        batch.payloads += keys
        self._count(
            updates=totals.updates + 1,
            samples=totals.samples + header.stop - header.start,
            staleness_sum=totals.staleness_sum + staleness,
            staleness_max=max(totals.staleness_max, staleness),
            loss_sum=totals.loss_sum + header.loss_sum,
            staleness={**totals.staleness, bucket: totals.staleness.get(bucket, 0) + 1},
        )

    def _count(self, **changed: object) -> None:
        totals: Totals = replace(self.meta.totals, **changed)  # type: ignore[arg-type]
        self.meta = replace(self.meta, totals=totals)

    # -- publication ---------------------------------------------------------------------------

    def next_meta(self, token: int) -> Meta:
        """The description of the version that the batch makes; the same where it changed none."""
        if not self.batch.applied:
            return self.meta
        version = self.meta.version + self.batch.applied
        return new_meta(
            self.meta,
            token,
            version=version,
            integers=self.integers,
            exact=self.batch.exact,
            rule_state=self.state is not None,
        )

    def changed_fields(self, meta: Meta) -> dict[str, int]:
        """What is new in the stored applied record, and the version that it belongs to."""
        if not self.batch.applied:
            return {}
        still_open = self.batch.touched - set(self.batch.folded)
        positions = {str(each): self.record.position(each) for each in still_open}
        finished = self.record.finished_epochs
        return {"version": meta.version, "token": meta.token, "finished": finished, **positions}

    def positions_to_reset(self) -> dict[str, int]:
        """Where subtasks stand whose waiting updates were dropped."""
        finished = self.record.finished_epochs
        return {
            str(each): self.record.position(each)
            for each in self.batch.reset
            if self._recipe.plan.epoch_of(each) >= finished
        }

    def newly_done(self) -> list[int]:
        return [each for each in self.batch.touched if self.record.is_done(each)]

    def stored_record(self) -> Record:
        return Record(self.record.finished_epochs, dict(self.record.positions))

    def published(self, meta: Meta) -> None:
        """What the batch held is out; a new one begins."""
        self.meta, self.batch = meta, Batch()
        self._remember()

    def _remember(self) -> None:
        """What workers train from now on, where the rule wants to know it. After a restart older
        ones are forgotten; their updates are then blended without."""
        if self._recipe.rule.history:
            self._bases[self.meta.version] = self.weights.clone()
            while len(self._bases) > self._recipe.rule.history:
                del self._bases[next(iter(self._bases))]


def _integers(header: Header, expected: int) -> Tensor | None:
    """None where they are as in the update's base. Raises :class:`InvalidUpdate`
    (``integers``)."""
    if not header.integers:
        return None
    try:
        raw = base64.b64decode(header.integers, validate=True)
        vector = np.frombuffer(raw, dtype="<i8").astype(np.int64)
    except ValueError as error:
        raise InvalidUpdate("the counters can't be decoded", reason="integers") from error
    if len(vector) != expected:
        raise InvalidUpdate(f"{len(vector)} counters, {expected} expected", reason="integers")
    return torch.from_numpy(vector)
