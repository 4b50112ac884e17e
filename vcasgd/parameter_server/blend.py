"""The global model in the parameter server's memory: checks and blends updates. No I/O."""

from __future__ import annotations

import base64
import time
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from vcasgd.errors import InvalidUpdate
from vcasgd.learning.encodings.encoder import payload_formats, step_format
from vcasgd.learning.encodings.payload import PayloadFormat
from vcasgd.learning.encodings.steps import PIECE_FLOATS, StepFormat, checksum
from vcasgd.learning.layout import Layout
from vcasgd.learning.rules import (
    MAX_HEAVIER,
    Context,
    Payload,
    Rounds,
    average_coefficients,
    make_rule,
    merge_integers,
    round_weight,
)
from vcasgd.learning.shards import Cut
from vcasgd.learning.vector import LARGEST_VALUE
from vcasgd.parameter_server.round_members import RoundMembers
from vcasgd.spec.job import JobSpec
from vcasgd.store.ledger.job import MAX_STALENESS, ModelFacts
from vcasgd.store.tensors.chunks import extended
from vcasgd.store.tensors.header import UNSIGNED, Header
from vcasgd.store.tensors.snapshot import (
    Meta,
    Record,
    RoundFacts,
    Snapshot,
    UpdateTotals,
    encode_integers,
)

#: Updates in one publication; bounds how long a reader waits for a version.
MAX_UPDATES = 32
#: The same for a rule with rounds, which contain one update of each worker.
MAX_IN_ROUND = 1024


class ShardConfig:
    """Constants of one shard: its updates' formats, its rule, and its part of the model."""

    def __init__(self, spec: JobSpec, facts: ModelFacts, shard: int = 0) -> None:
        layout = Layout.from_json(facts.layout)
        self.layout_digest = layout.digest()
        #: Kinds of the integer state.
        self.counters = layout.counters
        #: Numbers of it that updates have, and exact tensors with their part of it.
        self.counted, self.exact = layout.counted, layout.exact
        self.part = Cut(layout.floats, layout.parameters, facts.shards).parts[shard]
        #: True if workers may exchange the shards of a store node in turn.
        self.in_turn = facts.takes_turns
        self.plan, self.points = facts.plan(spec), facts.points(spec)
        update = facts.update(spec)
        self.rule = make_rule(update)
        self.formats = payload_formats(update, layout, self.part)
        #: Largest size of a payload in bytes.
        self.payload_size = max(each.size for each in self.formats.values())
        #: Format of steps of the published model; None if workers fetch the exact one.
        self.steps = step_format(update, layout, self.part)
        #: Decay of the model's average in each step, which is kept as the state; None without one.
        self.decay = None if spec.ema is None else spec.ema.decay
        self.batch_size = facts.batch_size or 1
        # The weights, the state, the published model and its steps.
        vectors = 1 + (self.rule.stateful or spec.ema is not None) + 2 * (self.steps is not None)
        #: Most bytes of a version.
        self.snapshot_size = self.part.floats * 4 * vectors


@dataclass
class Batch:
    """Updates that are applied or refused in memory and not yet published."""

    applied: int = 0
    entries: list[str] = field(default_factory=list)
    #: Last entry that was read for the batch: one of its own, or one that the next batch takes.
    last_read: str = "0-0"
    #: Names of the updates in the entries with a valid header.
    processed: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    touched: set[int] = field(default_factory=set)
    reset: set[int] = field(default_factory=set)
    #: Subtasks that it completes.
    done: list[int] = field(default_factory=list)
    #: First subtask of the first unfinished epoch before it.
    first_open: int = 0
    #: Number of the evaluation point that the batch reaches, if any.
    point: int | None = None
    #: True if its publication must be exact even if workers need only bfloat16.
    exact: bool = True
    #: Keys of payloads that are no longer needed.
    payloads: list[str] = field(default_factory=list)
    #: Samples of its updates.
    samples: int = 0
    #: Sum of the weights of the round's updates, in samples.
    weight: float = 0.0
    #: Facts for the job's workers, set when the batch is closed.
    facts: RoundFacts = field(default_factory=RoundFacts)
    #: True if it waits for no further update.
    final: bool = False
    #: True if it goes back to an earlier model, to which no step leads.
    jumps: bool = False
    #: The step to its published model, if there is one.
    step: memoryview | None = None
    #: True once it is decided what is published; the batch takes no further update.
    closed: bool = False

    @property
    def pending(self) -> bool:
        return bool(self.entries) or self.applied > 0


class ModelState:
    """Parameters, applied record and totals of one shard of a job.

    ``weights`` is float32 [floats], ``integers`` int64 [k], and ``state``, the rule's state
    or the model's average, float32 [floats] or None if there is neither. They are ahead of the
    published version by the updates in ``batch``; :meth:`published` starts a new batch.

    ``followed`` is what workers train from, float32 [floats]: the weights themselves or, if workers
    fetch steps, a vector that :meth:`close` moves towards them by an encoded step.
    """

    def __init__(
        self,
        config: ShardConfig,
        snapshot: Snapshot,
        weights: Tensor,
        state: Tensor | None = None,
        followed: Tensor | None = None,
    ) -> None:
        self._config = config
        scratches = (each.scratch(PIECE_FLOATS) for each in config.formats.values())
        self._scratch = max(scratches, key=len)
        self._payload = memoryview(bytearray(config.payload_size))
        self.weights = self.followed = weights
        if config.steps is not None:
            self.followed = weights.clone() if followed is None else followed
        if config.rule.stateful and state is None:
            # The first snapshot comes from a worker, which does not have the rule's state.
            state = torch.zeros_like(weights)
        elif config.decay is not None and state is None:
            state = weights.clone()
        self.state = state
        #: Weighted sum of the round's differences, float32 [floats]; None without rounds.
        self._sum = torch.zeros_like(weights) if config.rule.rounds else None
        #: Workers of the round, and of those before.
        self.members = RoundMembers(in_turn=config.in_turn)
        self.integers = snapshot.meta.integer_vector()
        self.record = snapshot.record.applied(config.plan)
        self.batch = Batch(first_open=self.record.first_open)
        #: Description of the published version; only its totals and rollbacks are ahead of it.
        self.meta = snapshot.meta
        #: Factor by which the weight of updates is multiplied.
        self.factor = 1.0
        #: True if an error left a part of an update in it.
        self.torn = False

    @property
    def point(self) -> int:
        """Number of the newest evaluation point that the model has reached; 0 before the first."""
        record = self.record
        return self._config.points.reached(record.finished_epochs, record.samples_applied)

    @property
    def full(self) -> bool:
        """True if the batch takes no further update."""
        if self._config.rule.rounds:
            return self.batch.closed or self.batch.final or len(self.batch.entries) >= MAX_IN_ROUND
        # An evaluation point gets a version of its own, so that it can be evaluated exactly.
        return len(self.batch.entries) >= MAX_UPDATES or self.batch.point is not None

    # -- updates -------------------------------------------------------------------------------

    def check(self, header: Header) -> None:
        """Check everything that does not need the payload. Raises :class:`InvalidUpdate`."""
        if header.shard != self._config.part.shard:
            raise InvalidUpdate(f"the update is of shard {header.shard}", reason="shard")
        if header.layout != self._config.layout_digest:
            raise InvalidUpdate("the update is of another model", reason="layout")
        if header.rollbacks < self.meta.rollbacks:
            raise InvalidUpdate("trained from a model that diverged", reason="rolled-back")
        if header.codec not in self._config.formats:
            raise InvalidUpdate(f"encoding {header.codec}", reason="codec")
        if not self._format(header).fits(header.size):
            raise InvalidUpdate(f"payload of {header.size} bytes", reason="length")
        self.record.check(header.subtask, header.start, header.stop)
        if header.trained < 0:
            raise InvalidUpdate(f"{header.skipped} samples are skipped", reason="range")

    @property
    def payload_size(self) -> int:
        """Largest size of a payload in bytes."""
        return len(self._payload)

    def payload(self, header: Header) -> memoryview:
        """Return the memory that receives the payload of a checked update."""
        return self._payload[: header.size]

    def inspect(self, header: Header, chunk: memoryview, at: int) -> None:
        """Check the values of a chunk, which starts at byte ``at`` of the payload.

        Raises :class:`InvalidUpdate` (``non-finite``).
        """
        # NaN fails any comparison, so this refuses it together with infinity.
        if not self._format(header).max_magnitude(chunk, at) <= LARGEST_VALUE:
            raise InvalidUpdate("the update is not finite, or far too large", reason="non-finite")

    def belongs_to_next(self, header: Header) -> bool:
        """Return True if an update must wait for the next round.

        A worker that doesn't wait for its last update may push one more before the round ends. A
        mean of both would move the model by half of their sum.
        """
        return self._config.rule.rounds and header.worker in self.members.present

    def blend(self, entry: str, header: Header, keys: list[str]) -> None:
        """Apply the update in :meth:`payload`, which was checked and inspected.

        Raises :class:`InvalidUpdate`; the model is then unchanged.
        """
        integers = _integers(header, self._config.counted)
        payload = self._format(header).unpack(self.payload(header))
        staleness = self._staleness(header)
        weight = self._round_weight(header, staleness)
        context = Context(
            staleness,
            epoch=self._config.plan.epoch_of(header.subtask) + 1,
            parameters=self._config.part.parameters,
            state=self.state if self._sum is None else self._sum,
            factor=self.factor,
            samples=weight,
        )
        if integers is not None:
            # It may refuse the update, whose numbers have been inspected.
            counted = self.integers[: self._config.counted]
            merge_integers(counted, integers, self._config.counters)
        self.torn = True
        self._blend_floats(self._format(header), payload, context)
        self.batch.weight += weight
        self._count_applied(entry, header, staleness, keys)
        self.torn = False

    @property
    def parameters(self) -> int:
        """Index in the vector where the running statistics start."""
        return max(self._config.part.parameters, 0)

    def step_of(self, header: Header) -> Tensor:
        """Return how the update in :meth:`payload` wants to change the model, float32 [floats].

        Raises :class:`InvalidUpdate`.
        """
        payload = self._format(header).unpack(self.payload(header))
        out = torch.empty_like(self.weights)
        for piece in self._format(header).pieces(PIECE_FLOATS):
            out[piece.start : piece.stop] = piece.decode(payload, self._scratch)
        start = self.parameters if self._config.rule.payload is Payload.DELTA else 0
        out[start:] -= self.weights[start:]
        return out

    def _blend_floats(
        self, payload_format: PayloadFormat, payload: memoryview, context: Context
    ) -> None:
        """Decode and blend piece by piece, so that decoded numbers are still in the cache."""
        rule = self._config.rule
        for piece in payload_format.pieces(PIECE_FLOATS):
            numbers = piece.decode(payload, self._scratch)
            part = context.piece(piece.start, piece.stop)
            rule.blend(self.weights[piece.start : piece.stop], numbers, part)

    def roll_back(
        self,
        weights: Tensor,
        integers: Tensor,
        rollbacks: int,
        restorations: int,
        average: Tensor | None = None,
    ) -> None:
        """Continue from an earlier model, float32 [floats] and int64 [k], as a new version.

        ``average`` is that of the earlier model. The applied record stays. The rule's state starts
        again, because it is the momentum of updates that diverged.
        """
        self.weights.copy_(weights)
        self.integers = integers
        for memory in (self.state, self._sum):
            if memory is not None:
                memory.zero_()
        if self.state is not None and self._config.decay is not None:
            self.state.copy_(weights if average is None else average)
        self.meta = replace(self.meta, rollbacks=rollbacks, restorations=restorations)
        self.batch.applied += 1
        self.batch.jumps = True
        self.batch.weight, self.batch.final = 0.0, True

    def _staleness(self, header: Header) -> int:
        """Return the versions between an update's base and the model that it is blended into.

        Updates of one round have the same base, and the versions between are those of the rounds
        that the update missed.
        """
        pending = 0 if self._config.rule.rounds else self.batch.applied
        return max(0, self.meta.version + pending - header.base)

    def _round_weight(self, header: Header, staleness: int) -> float:
        """Return the weight of an update in its round, in samples.

        What a worker claims about its batches counts only within :data:`MAX_HEAVIER`.
        """
        weight = float(header.trained)
        if header.weight is not None:
            weight = min(header.weight, MAX_HEAVIER * weight)
        return round_weight(weight, staleness / max(1, self.meta.round.workers))

    def end_batch(self) -> None:
        """Decide what the batch publishes; with rounds, add the mean of the round to the weights.

        From now on, the batch stays the same.
        """
        if self.batch.closed:
            return
        self.batch.closed = True
        self.batch.facts = replace(self.members.facts(), samples=self.meta.totals.samples)
        factor = 0.0
        if self._sum is not None and self.batch.weight:
            factor = self.factor * self.members.share()
        self._average(factor)
        if self._sum is not None and factor:
            Rounds.finish(self.weights, self._sum, self.batch.weight, factor)
            for entry, at in self._config.exact:
                # Layouts with exact tensors have one shard.
                part = slice(entry.offset, entry.offset + entry.size)
                exact = self.integers[at].view(torch.float64)
                Rounds.finish(exact, self._sum[part], self.batch.weight, factor)
                self.weights[part] = exact
            self._sum.zero_()
        if self.state is not None and self._config.decay is not None:
            self.state[self.parameters :] = self.weights[self.parameters :]
        if self._config.steps is not None and self.batch.applied:
            self._follow(self._config.steps)

    def _average(self, factor: float) -> None:
        """Add the batch's steps to the average, before the sum of a round is added to the weights.

        ``factor`` is that of the round's mean. With other rules, the weights have the batch.
        """
        if self.state is None or self._config.decay is None or not self.batch.samples:
            return
        steps = self.batch.samples / self._config.batch_size
        kept, share = average_coefficients(self._config.decay, steps)
        self.state.lerp_(self.weights, 1 - kept)
        if self._sum is not None and factor:
            self.state.add_(self._sum, alpha=share * factor / self.batch.weight)

    def _follow(self, steps: StepFormat) -> None:
        """Move the model that workers train from by a step towards the weights, or all the way."""
        if not self.batch.jumps:
            self.batch.step = steps.advance(self.weights, self.followed)
        if self.batch.step is None:
            self.followed.copy_(self.weights)

    def refuse(self, entry: str, header: Header | None, reason: str, keys: list[str]) -> None:
        """Count an update that failed a check, and report it to its worker with the batch."""
        counts = self.meta.totals.rejected
        self._count(rejected={**counts, reason: counts.get(reason, 0) + 1})
        self.batch.entries.append(entry)
        self.batch.payloads += keys
        if header is not None:
            if reason != UNSIGNED:  # A worker's own update of this name is another one.
                self.batch.processed.append(header.update)
                self.batch.refused[header.update] = reason
            if header.subtask < self._config.plan.total_subtasks:
                self.batch.reset.add(header.subtask)

    def _format(self, header: Header) -> PayloadFormat:
        return self._config.formats[header.codec]

    def _count_applied(self, entry: str, header: Header, staleness: int, keys: list[str]) -> None:
        batch, totals, before = self.batch, self.meta.totals, self.point
        self.record.advance(header.subtask, header.start, header.stop)
        if self.point > before:
            batch.point = self.point
        batch.touched.add(header.subtask)
        if self.record.is_done(header.subtask):
            batch.done.append(header.subtask)
        bucket = str(min(staleness, MAX_STALENESS))
        batch.applied += 1
        batch.samples += header.stop - header.start
        batch.entries.append(entry)
        batch.processed.append(header.update)
        batch.payloads += keys
        self._count(
            updates=totals.updates + 1,
            samples=totals.samples + header.stop - header.start,
            skipped=totals.skipped + header.skipped,
            staleness_sum=totals.staleness_sum + staleness,
            staleness_max=max(totals.staleness_max, staleness),
            loss_sum=totals.loss_sum + header.loss_sum,
            logged=totals.with_logged(header.logged),
            staleness={**totals.staleness, bucket: totals.staleness.get(bucket, 0) + 1},
        )

    def _count(self, **changes: object) -> None:
        totals: UpdateTotals = replace(self.meta.totals, **changes)  # type: ignore[arg-type]
        self.meta = replace(self.meta, totals=totals)

    # -- publication ---------------------------------------------------------------------------

    def next_meta(self, token: int) -> Meta:
        """Return the description of the batch's version; the present one if it applied nothing."""
        if not self.batch.applied:
            return self.meta
        version, step = self.meta.version + self.batch.applied, self.batch.step
        stepped = self._config.steps is not None
        return replace(
            self.meta,
            version=version,
            token=token,
            integers=encode_integers(self.integers),
            created_at=time.time(),
            exact=self.batch.exact or not self.meta.halves,
            rule_state=self.state is not None,
            round=self.batch.facts,
            stepped=stepped,
            checksum=checksum(self.followed) if stepped else 0,
            steps=() if step is None else extended(self.meta, len(step)),
        )

    def changed_fields(self, meta: Meta) -> dict[str, int]:
        """Return the changes of the stored applied record, with the version they belong to."""
        if not self.batch.applied:
            return {}
        partly = self.batch.touched.difference(self.batch.done)
        positions = {str(each): self.record.position(each) for each in partly}
        finished = self.record.finished_epochs
        return {"version": meta.version, "token": meta.token, "finished": finished, **positions}

    def positions_to_reset(self) -> dict[str, int]:
        """Return the positions of the subtasks whose waiting updates were dropped."""
        return {
            str(each): self.record.position(each)
            for each in self.batch.reset
            if not self.record.is_done(each)
        }

    @property
    def forgotten(self) -> tuple[int, int]:
        """The subtasks ``[first, stop)`` of the epochs that the batch finished."""
        return self.batch.first_open, self.record.first_open

    def stored_record(self) -> Record:
        record = self.record
        return Record(record.finished_epochs, dict(record.positions), record.done.blocks)

    def published(self, meta: Meta) -> None:
        """Start a new batch after the present one was published as ``meta``."""
        self.members.end()
        self.meta, self.batch = meta, Batch(first_open=self.record.first_open)


def _integers(header: Header, expected: int) -> Tensor | None:
    """Decode the counters; None if they are unchanged since the base.

    Raises :class:`InvalidUpdate` (``integers``).
    """
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
