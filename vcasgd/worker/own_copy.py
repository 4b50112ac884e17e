"""A worker's own copy of the model, whose training continues during exchanges.

The copy is never replaced. It has a part for each shard (:mod:`vcasgd.worker.own_part`). The
training calls :meth:`OwnCopy.follow` after each local step, :meth:`OwnCopy.take_shifts` for what
the model has to move by, and :meth:`OwnCopy.push` at the end of an interval, and waits for nothing.
With other workers, it pushes one or a few shards at a time, in turn, as soon as the last ones are
back: :meth:`OwnCopy.next_turn`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vcasgd.learning.encodings.encoder import Encoder
from vcasgd.learning.encodings.payload import EncodedVector
from vcasgd.learning.layout import Layout
from vcasgd.learning.shards import ShardRange
from vcasgd.learning.vector import Floats, copy_floats, counted, within
from vcasgd.worker.base_vectors import BaseVectors
from vcasgd.worker.interval import Base, encoded_counters
from vcasgd.worker.own_part import Difference, OwnPart
from vcasgd.worker.shard_link import ShardLink
from vcasgd.worker.vectors import Vector, await_device

#: Seconds between two looks for a newer version of a shard that has no update of this worker under
#: way.
LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Turn:
    """Shards that were pushed together at a moment of :func:`time.monotonic`."""

    shards: Sequence[int]
    started_at: float


class OwnCopy:
    """Owned by the training thread, which must call :meth:`close`."""

    def __init__(
        self,
        base: Base,
        links: Sequence[ShardLink],
        bases: BaseVectors,
        encoders: Sequence[Encoder],
        layout: Layout,
        device: torch.device,
        *,
        adopts: bool = False,
        mapped: bool = False,
    ) -> None:
        """Start at a ``base``; ``bases`` can be older than the links' versions from then on.

        ``device`` is that of the model. If the worker ``adopts`` its copy, it doesn't fetch a
        version that has only its own updates. Vectors may be ``mapped``.
        """
        self._links, self._bases, self._encoders = links, bases, encoders
        #: Held while a part is encoded: several at a time would take the processors from training.
        self._encoding = threading.Lock()
        self._layout, self._device = layout, device
        self._rollbacks, self._adopts = base.rollbacks, adopts
        self._parts = [OwnPart(link.part, base.floats, device, mapped=mapped) for link in links]
        #: Updates of this worker before the copy, which it may lack until a version has them.
        self._before = [link.updates.added for link in links]
        #: Updates of this worker in each shard's version, and whether one had more of them before.
        self._settled, self._fell_back = [link.settled for link in links], False
        #: Its counters, int64 [k], now and when shard 0 was pushed last.
        self.integers = self._pushed_integers = base.integers
        #: True if the last push was one of all parts.
        self.is_even = True
        #: True if the model is where the last interval ended.
        self.is_loaded = False
        #: The exchange under way, if it is measured.
        self._turn: Turn | None = None
        #: Seconds of the last exchange, until they are taken.
        self._exchanged: float | None = None

    def close(self) -> None:
        for part in self._parts:
            part.close()

    @property
    def merging(self) -> bool:
        """True while what the copy has to move by isn't taken."""
        return any(part.merging for part in self._parts)

    @property
    def went_back(self) -> bool:
        """True if the copy has to be given up, because the model went back: to an earlier one, or
        to a server that lacks updates which it had."""
        return self._fell_back or min(link.rollbacks for link in self._links) != self._rollbacks

    def read_start(self, out: Floats) -> None:
        """Copy the state at the last push, and what has moved it since, into ``out``, float32
        [floats]. What was trained since must be pushed."""
        assert self.is_even, "what it has learned would be lost"
        self.skip_shifts(wait=range(len(self._links)))
        for link, own in zip(self._links, self._parts, strict=True):
            copy_floats(own.start.memory, within(out, link.part.start, link.part.stop))

    # -- newer versions ----------------------------------------------------------------------------

    def follow(self) -> None:
        """Continue the exchange beside the training.

        Never waits. Raises errors that don't pass by themselves.
        """
        for link, own in zip(self._links, self._parts, strict=True):
            if own.merging:
                continue
            if link.fetched:
                if link.updates.encoded:
                    self._merge(link)
            elif link.idle:
                self._ask(link)
        self._end_turn()

    def _ask(self, link: ShardLink) -> None:
        """Continue with a link that waits for nothing."""
        link.check()
        adopts = self._adopts and link.settled >= self._before[link.part.shard]
        # At once: once the copy is dropped, a version that waits here could be taken for a base.
        if adopts and (meta := link.adopt()):
            self._bases.pass_by(link, meta)
            self._settle(link)
            self._bases.release_outdated()
        elif link.sees_newer:
            link.fetch(*self._bases.parts(link.part))
        elif link.lacks_last:
            link.watch(*self._bases.parts(link.part), adopts=adopts)
        elif time.monotonic() - link.asked_at >= LOOK_SECONDS:
            link.poll(newer=True)

    def _merge(self, link: ShardLink) -> None:
        """Start to move a part to the version that was fetched."""
        own, (version, base) = self._parts[link.part.shard], self._bases.parts(link.part)
        before = link.version or (0,)
        self._bases.pass_by(link, meta := link.take())
        self._settle(link)
        # The parameters would follow, but not the statistics and counters.
        self._fell_back |= meta.version < before[0]
        if self.went_back:
            return
        if link.steps is not None:
            # The next steps lead from it.
            self._bases.keep_part(link.part.shard)
            own.merge(version, link.settled, link.run, keep=base)
        else:
            self._bases.release_outdated()
            own.merge(version, link.settled, link.run)

    def _settle(self, link: ShardLink) -> None:
        """Record how many updates a shard's version contains."""
        shard = link.part.shard
        self._fell_back |= link.settled < self._settled[shard] or link.overtaken
        self._settled[shard] = link.settled
        self._parts[shard].settle(link.settled)

    def take_shifts(self, *, wait: Collection[int] = ()) -> list[tuple[ShardRange, Vector]]:
        """Return what parts of the copy have to move by, which the caller releases.

        Waits for the shards to ``wait`` for if their shifts are being computed.
        """
        shifts = []
        for link, own in zip(self._links, self._parts, strict=True):
            shift = own.take_shift(wait=link.part.shard in wait)
            if shift is not None:
                shifts.append((link.part, shift))
        return shifts

    def skip_shifts(self, *, wait: Collection[int] = ()) -> None:
        """Let the next interval load the state at the last push, which the shifts have moved."""
        for _, shift in self.take_shifts(wait=wait):
            shift.release()
            self.is_loaded = False

    # -- pushes ------------------------------------------------------------------------------------

    def next_turn(self, count: int) -> tuple[int, ...]:
        """Return the ``count`` shards to push next; none while others are under way.

        They are those that were published the longest ago, so all workers push the same ones,
        however they began.
        """
        if any(link.lacks_last for link in self._links):
            return ()
        order = sorted(self._links, key=lambda link: (link.published_at, link.part.shard))
        turn = sorted(link.part.shard for link in order[:count])
        return () if any(self._parts[shard].merging for shard in turn) else tuple(turn)

    def push(
        self,
        fields: Mapping[int, Mapping[str, Any]],
        epoch: int,
        read: Callable[[ShardRange, Floats], None],
        integers: Tensor,
        *,
        last: bool,
    ) -> None:
        """Push what the copy has more in some shards than at their last push.

        ``fields`` are those of each shard's header. ``read(part, out)`` copies a part of the model
        into memory on its device, float32 [part.floats]; ``integers``, int64 [k], are its counters.
        The ``last`` update carries what encodings have kept back.
        """
        self.integers = integers
        pushed = {}
        for shard in fields:
            end = self._parts[shard].lend()
            read(self._links[shard].part, end.memory)
            pushed[shard] = end
        await_device(self._device)
        for shard, end in pushed.items():
            link, counters = self._links[shard], ""
            if shard == 0:
                before, self._pushed_integers = self._pushed_integers, integers
                counters = encoded_counters(counted(self._layout, before, integers))
            difference = self._parts[shard].advance(end, link.updates.added + 1)
            end.release()
            header = link.header({**fields[shard], "integers": counters}, self._rollbacks)
            encode = partial(self._encode, link, difference, last=last)
            link.push(header, epoch, encode, *difference.vectors)
            difference.release()
        self.is_even, self.is_loaded = len(fields) == len(self._links), True
        # Another one under way would be measured, too.
        if fields and self._turn is None:
            self._turn = Turn(tuple(fields), time.monotonic())
        # At once: the next step may take much longer than the exchange.
        self.follow()

    def _encode(self, link: ShardLink, difference: Difference, *, last: bool) -> EncodedVector:
        vector = link.with_vector_slot(difference.compute)
        with self._encoding:
            return self._encoders[link.part.shard].encode_part(vector, self._rollbacks, last=last)

    def _end_turn(self) -> None:
        turn = self._turn
        if turn is None or any(self._links[shard].lacks_last for shard in turn.shards):
            return
        answered_at = max(self._links[shard].answered_at for shard in turn.shards)
        seconds = max(0.0, answered_at - turn.started_at)
        self._exchanged, self._turn = seconds * len(self._links) / len(turn.shards), None

    def take_exchange_seconds(self) -> float | None:
        """Return how long an exchange of the whole copy takes, once after each exchange."""
        seconds, self._exchanged = self._exchanged, None
        return seconds
