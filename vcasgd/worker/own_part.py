"""A shard's part of a worker's own copy of the model: its updates, and its moves.

When the part is pushed, its state is noted, and the difference to the state at the last push
becomes an update, beside the training. When a new version W of the shard is there, the part moves
by ``W + own updates that W lacks − start``, and so does the start, from which the next update
counts: what was trained since stays, and is what the next update has. Statistics stay those of the
copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch

from vcasgd.errors import NonFiniteLoss
from vcasgd.learning.shards import ShardRange
from vcasgd.learning.vector import (
    PIECE_FLOATS,
    Floats,
    MappedVector,
    copy_floats,
    is_sound,
    within,
)
from vcasgd.worker.interval import add
from vcasgd.worker.vectors import Vector, VectorPool, beside_training

#: Runs a function in another thread.
Run = Callable[[Callable[[], "Moved"]], "Future[Moved]"]


@dataclass(frozen=True)
class Difference:
    """The update of a part, which is computed later. It holds its vectors, float32 [floats]."""

    part: ShardRange
    end: Vector
    start: Vector
    update: Vector

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """All vectors, first the one that the update is written into."""
        return self.update, self.end, self.start

    def compute(self) -> Floats:
        """Write the update, and return it. Raises :class:`NonFiniteLoss`."""
        end, start, update = self.end.memory, self.start.memory, self.update.memory
        with beside_training(self.end.device):
            for piece in _pieces(self.part, update):
                subtract(piece, end, start, update)
        return update

    def release(self) -> None:
        for vector in self.vectors:
            vector.release()


@dataclass(frozen=True)
class Moved:
    """The start of a part after a merge, and the shift to it, float32 [floats] each."""

    start: Vector
    shift: Vector


class OwnPart:
    """A shard's part of the copy. Owned by the training thread.

    ``start`` is the point from which the progress since the last push counts, in memory of the
    training's device. Updates are in memory on the CPU.
    """

    def __init__(
        self, part: ShardRange, base: Floats, device: torch.device, *, mapped: bool = False
    ) -> None:
        """Start at a ``base``, float32 [floats of the job]. Vectors may be ``mapped``."""
        #: As a vector of its own.
        self._part = replace(part, start=0, stop=part.floats)
        self._copies = self._updates = VectorPool(part.floats, mapped=mapped)
        self._on_cpu = device.type == "cpu"
        if not self._on_cpu:
            self._copies = VectorPool(part.floats, device)
        self.start = self._copies.take()
        copy_floats(within(base, part.start, part.stop), self.start.memory)
        #: Updates that the shard's version may lack, with their numbers.
        self._pending: list[tuple[int, Vector]] = []
        self._merging: Future[Moved] | None = None

    def close(self) -> None:
        if self._merging is not None:
            moved = self._merging.result()
            moved.start.release()
            moved.shift.release()
        for _, update in self._pending:
            update.release()
        self.start.release()
        self._pending, self._merging = [], None

    def lend(self) -> Vector:
        """Return memory for the state of the part, which the caller releases."""
        return self._copies.take()

    def advance(self, end: Vector, number: int) -> Difference:
        """Let the next update start at ``end``, the state of the part, in lent memory.

        Returns the update, whose vectors the caller has to hold until it is computed. ``number``
        is the one that it will have.
        """
        assert not self.merging
        start, self.start = self.start, end.hold()
        # Its memory is that of the update, unless it is still read.
        reuses = self._on_cpu and not start.shared
        update = start.hold() if reuses else self._updates.take()
        self._pending.append((number, update.hold()))
        return Difference(self._part, end.hold(), start, update)

    # -- a newer version ---------------------------------------------------------------------------

    @property
    def merging(self) -> bool:
        """True from :meth:`merge` until :meth:`take_shift` has returned its result."""
        return self._merging is not None

    def settle(self, settled: int) -> None:
        """Forget the updates up to the number ``settled``, which the present version contains."""
        for number, update in list(self._pending):
            if number <= settled:
                update.release()
                self._pending.remove((number, update))

    def merge(self, version: Floats, settled: int, run: Run, *, keep: Floats | None = None) -> None:
        """Start to compute the shift to a ``version``, float32 [floats], by ``run``.

        It contains the updates up to the number ``settled``, and must not change until
        :meth:`take_shift` returns the result. It is also copied to ``keep``.
        """
        assert not self.merging
        self.settle(settled)
        pending, part = [update.memory for _, update in self._pending], self._part
        start, moved = self.start, self._copies.take()
        shift = self._copies.take() if start.shared else start.hold()

        def compute() -> Moved:
            if keep is not None:
                copy_floats(version, keep)
            with beside_training(self._copies.device):
                copy_floats(version, moved.memory)
                for piece in _pieces(part, moved.memory):
                    for update in pending:
                        add(piece, moved.memory, update)
                    difference = piece.of(shift.memory)
                    torch.sub(piece.of(moved.memory), piece.of(start.memory), out=difference)
                    # Sums of statistics, such as variances, can be impossible.
                    difference[piece.parameters :] = 0.0
            return Moved(moved, shift)

        self._merging = run(compute)

    def take_shift(self, *, wait: bool) -> Vector | None:
        """Return what the part has to move by, which the caller releases; None if it isn't there.

        From then on, the start has moved, too.
        """
        if self._merging is None or not (wait or self._merging.done()):
            return None
        moved = self._merging.result()
        self._merging = None
        self.start.release()
        self.start = moved.start
        return moved.shift


def _pieces(part: ShardRange, vector: Floats) -> Iterator[ShardRange]:
    """Yield the pieces of a part that a process may have at a time."""
    return part.pieces(PIECE_FLOATS if isinstance(vector, MappedVector) else max(1, part.floats))


def subtract(part: ShardRange, end: Floats, start: Floats, out: Floats) -> None:
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
