"""A worker's own copy of the model, whose training continues during exchanges.

The copy is never replaced. At the end of an interval, its state is noted, and the difference to the
state at the interval's start becomes an update, beside the training. When a new version W of the
model is there, the copy moves by ``W + own updates that W lacks − start``, and so does the start of
the interval in progress: what was trained since stays, and is what the next update has. Statistics
stay those of the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from vcasgd.errors import NonFiniteLoss
from vcasgd.learning.shards import ShardRange
from vcasgd.learning.vector import is_sound
from vcasgd.worker.interval import add
from vcasgd.worker.vectors import Vector, VectorPool, beside_training, single_threaded


@dataclass(frozen=True)
class PendingUpdate:
    """An update that some shards' versions may lack, with its number in each of them."""

    vector: Vector
    numbers: Sequence[int]


@dataclass(frozen=True)
class Difference:
    """The update of an interval, which is computed shard by shard. It holds its vectors."""

    parts: Sequence[ShardRange]
    end: Vector
    start: Vector
    update: Vector

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """All vectors, first the one that the update is written into."""
        return self.update, self.end, self.start

    def compute(self, shard: int) -> Tensor:
        """Write a shard's part; return the vector. Raises :class:`NonFiniteLoss`."""
        with beside_training(self.end.tensor.device):
            subtract(self.parts[shard], self.end.tensor, self.start.tensor, self.update.tensor)
        return self.update.tensor

    def release(self) -> None:
        """Release the vectors."""
        for vector in self.vectors:
            vector.release()


class OwnCopy:
    """Owned by the training thread.

    ``start`` is the point from which the progress of the present interval counts, in memory of the
    training's device, as ``copies``. Updates are in memory of ``updates``, on the CPU.
    """

    def __init__(
        self, parts: Sequence[ShardRange], copies: VectorPool, updates: VectorPool, start: Vector
    ) -> None:
        self._parts = parts
        self._copies, self._updates = copies, updates
        self._on_cpu = copies is updates
        if self._on_cpu:
            self.start = start.hold()
        else:
            self.start = copies.take()
            self.start.tensor.copy_(start.tensor)
        self._pending: list[PendingUpdate] = []
        self._merging: Future[tuple[Vector, Vector]] | None = None

    def close(self) -> None:
        """Release all vectors."""
        if self._merging is not None:
            for vector in self._merging.result():
                vector.release()
        for pending in self._pending:
            pending.vector.release()
        self.start.release()
        self._pending, self._merging = [], None

    def advance(self, end: Vector, numbers: Sequence[int]) -> Difference:
        """Start the next interval at ``end``, the state of the copy.

        Returns the update, whose vectors the caller has to hold until it is computed. ``numbers``
        are those that it will have in each shard.
        """
        assert not self.merging
        start, self.start = self.start, end.hold()
        # Its memory is that of the update, unless it is still read.
        reuses = self._on_cpu and not start.shared
        update = start.hold() if reuses else self._updates.take()
        self._pending.append(PendingUpdate(update.hold(), numbers))
        return Difference(self._parts, end.hold(), start, update)

    # -- a newer version ---------------------------------------------------------------------------

    @property
    def merging(self) -> bool:
        """True from :meth:`merge` until :meth:`take_shift` has returned its result."""
        return self._merging is not None

    def settle(self, settled: Sequence[int]) -> None:
        """Forget the updates that the present version of each shard contains.

        ``settled`` are their numbers of contained updates.
        """
        for pending in list(self._pending):
            if all(number <= done for number, done in zip(pending.numbers, settled, strict=True)):
                pending.vector.release()
                self._pending.remove(pending)

    def merge(self, version: Vector, newer: Sequence[ShardRange], settled: Sequence[int]) -> None:
        """Start to compute the shift to a ``version``, which has ``newer`` shards.

        It must not change until :meth:`take_shift` returns the result.
        """
        assert not self.merging
        pending = [
            (update.vector.tensor, part)
            for update in self._pending
            for part in newer
            if update.numbers[part.shard] > settled[part.shard]
        ]
        moved, start = self._copies.take(), self.start
        shift = self._copies.take() if start.shared else start.hold()

        def compute() -> tuple[Vector, Vector]:
            with beside_training(self._copies.device):
                if len(newer) < len(self._parts):
                    moved.tensor.copy_(start.tensor)
                for part in newer:
                    part.of(moved.tensor).copy_(part.of(version.tensor))
                for update, part in pending:
                    add(part, moved.tensor, update)
                torch.sub(moved.tensor, start.tensor, out=shift.tensor)
                for part in self._parts:
                    # Sums of statistics, such as variances, can be impossible.
                    part.of(shift.tensor)[part.parameters :] = 0.0
            return moved, shift

        merging: Future[tuple[Vector, Vector]] = Future()
        self._merging = merging

        def run() -> None:
            try:
                merging.set_result(compute())
            except BaseException as error:  # noqa: BLE001 - take_shift() raises it
                merging.set_exception(error)

        single_threaded(run, "merge")

    def take_shift(self, *, wait: bool) -> Vector | None:
        """Return what the copy has to move by, which the caller releases; None if it isn't there.

        From then on, the start has moved, too.
        """
        if self._merging is None or not (wait or self._merging.done()):
            return None
        moved, shift = self._merging.result()
        self._merging = None
        self.start.release()
        self.start = moved
        return shift


def subtract(part: ShardRange, end: Tensor, start: Tensor, out: Tensor) -> None:
    """Write a shard's part of an update, float32 [floats]: differences of parameters, and
    statistics as they are. Raises :class:`NonFiniteLoss`.

    ``out`` may be one of the others, or on another device.
    """
    ends, starts, outs = part.of(end), part.of(start), part.of(out)
    if outs.device == ends.device:
        torch.sub(ends[: part.parameters], starts[: part.parameters], out=outs[: part.parameters])
        outs[part.parameters :] = ends[part.parameters :]
        sound = is_sound(outs)
    else:
        difference = ends.clone()
        difference[: part.parameters] -= starts[: part.parameters]
        sound = is_sound(difference)
        outs.copy_(difference)
    if not sound:
        raise NonFiniteLoss(
            "the model's parameters are no longer finite after a push interval",
            remedy="lower the learning rate or clip gradients",
        )
