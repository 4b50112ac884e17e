"""State of a learner between two intervals, as bytes that another machine can load.

It consists of the state of the optimizer and of the second moments of a local batch
(:mod:`vcasgd.learning.local_moments`). The bytes have no description: their format follows from the
job's own optimizer, so that nothing in them has to be trusted. Last come the flags, a byte for each
parameter; before them, each parameter's tensors, in the order of :class:`StateFormat`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from vcasgd.learning.local_moments import LocalMoments, NoiseMoments
from vcasgd.store.tensors.bf16_split import bytes_of
from vcasgd.store.tensors.repetitions import FRESH

#: Flags of a parameter: it has a state in the optimizer, and local second moments.
HAS_STATE, HAS_MOMENTS = 1, 2
#: Names of the local second moments.
MOMENTS = ("moments.mean", "moments.own")
#: Second moments of Adam. A new optimizer can take them over from another worker.
SECOND = "exp_avg_sq"
#: Each tensor starts at a multiple of so many bytes.
ALIGNED = 16
#: Largest counter of a state; exact in every type.
LARGEST_COUNTER = 2.0**24


class NotRepeatable(Exception):
    """An interval of this learner can't be repeated from bytes. The message is the reason."""


class MalformedState(Exception):
    """Bytes that are no state of this job's learners. The message is the reason."""


@dataclass(frozen=True)
class StateEntry:
    """A tensor of each parameter's state: a counter, or one of the parameter's shape."""

    name: str
    dtype: torch.dtype
    counts: bool


@dataclass(frozen=True)
class StateTensor:
    """A tensor in the bytes of a state: that of a parameter, by its number."""

    parameter: int
    entry: StateEntry
    values: Tensor


class StateFormat:
    """Format of the states of one job's learners. Raises :class:`NotRepeatable`.

    ``optimizer`` should have made a step; one without any state has the format of one that never
    has any.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        parameters = _parameters(optimizer)
        self._shapes = [each.shape for each in parameters]
        found = {_entries_of(each, optimizer.state[each]) for each in parameters
                 if optimizer.state.get(each)}  # fmt: skip
        if len(found) > 1:
            raise NotRepeatable("the optimizer keeps different states for its parameters")
        self.entries: tuple[StateEntry, ...] = found.pop() if found else ()
        second = next((each for each in self.entries if each.name == SECOND), None)
        self._moments = tuple(StateEntry(name, second.dtype, False) for name in MOMENTS
                              ) if second else ()  # fmt: skip

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return len(self._shapes)

    @property
    def max_bytes(self) -> int:
        """Size of a state in which each parameter has all tensors."""
        flags = HAS_STATE | (HAS_MOMENTS if self._moments else 0)
        return self._size(bytes([flags]) * len(self._shapes))

    def parse(self, data: Tensor) -> LearnerState:
        """Return the state in untrusted bytes, uint8 [n], which it shares.

        Raises :class:`MalformedState`.
        """
        flags = bytes(data[max(len(data) - len(self._shapes), 0) :].tolist())
        allowed = {0, HAS_STATE} if self.entries else {0}
        if self._moments:
            allowed.add(HAS_STATE | HAS_MOMENTS)
        if len(flags) != len(self._shapes) or not set(flags) <= allowed:
            raise MalformedState("its flags are not those of this model's parameters")
        if self._size(flags) != len(data):
            raise MalformedState(f"{len(data)} bytes, {self._size(flags)} expected")
        state = LearnerState(self, flags, data)
        for each in state.tensors():
            _check(each)
        return state

    def new(self, flags: bytes) -> LearnerState:
        """Return a state with memory of its own, which is zero."""
        data = torch.zeros(self._size(flags), dtype=torch.uint8)
        if flags:
            data[-len(flags) :] = torch.frombuffer(bytearray(flags), dtype=torch.uint8)
        return LearnerState(self, flags, data)

    def places(self, flags: bytes) -> Iterator[tuple[int, StateEntry, torch.Size, int]]:
        """Yield the number, the entry, the shape, and the first byte of each tensor."""
        at = 0
        for number, (flag, shape) in enumerate(zip(flags, self._shapes, strict=True)):
            entries = self.entries if flag & HAS_STATE else ()
            for entry in (*entries, *(self._moments if flag & HAS_MOMENTS else ())):
                size = torch.Size() if entry.counts else shape
                yield number, entry, size, at
                at += _aligned(size.numel() * entry.dtype.itemsize)

    def _size(self, flags: bytes) -> int:
        sizes = (
            _aligned(shape.numel() * entry.dtype.itemsize)
            for _, entry, shape, _ in self.places(flags)
        )
        return sum(sizes) + len(flags)


@dataclass(frozen=True)
class LearnerState:
    """State of a learner: ``data``, uint8 [n] on the CPU, in the format of its job.

    With local moments, the first moments are those of a share of 1, because the next interval may
    have another share.
    """

    format: StateFormat
    flags: bytes
    data: Tensor

    @classmethod
    def of(cls, optimizer: Optimizer, moments: LocalMoments | None) -> LearnerState:
        """Copy the state of an optimizer and its local moments. Raises :class:`NotRepeatable`."""
        known, corrected = optimizer.state, moments.by_parameter if moments else {}
        parameters = _parameters(optimizer)
        flags = bytes(
            (HAS_STATE if known.get(each) else 0) | (HAS_MOMENTS if each in corrected else 0)
            for each in parameters
        )
        state = StateFormat(optimizer).new(flags)
        for each in state.tensors():
            parameter, name = parameters[each.parameter], each.entry.name
            if name in MOMENTS:
                source = getattr(corrected[parameter], name.removeprefix("moments."))
            else:
                source = known[parameter][name]
            each.values.copy_(source)
            if moments is not None and name in moments.first_moments:
                each.values.mul_(moments.share)
        return state

    def load(self, optimizer: Optimizer, moments: LocalMoments | None) -> None:
        """Give the state to a new optimizer and its local moments, whose share is still 1."""
        parameters = _parameters(optimizer)
        groups = {each: group for group in optimizer.param_groups for each in group["params"]}
        loaded: dict[tuple[int, str], Tensor] = {}
        for each in self.tensors():
            parameter = parameters[each.parameter]
            value = _like(parameter, groups[parameter], each)
            loaded[each.parameter, each.entry.name] = value
            if each.entry.name not in MOMENTS:
                optimizer.state[parameter][each.entry.name] = value
        for number, flag in enumerate(self.flags):
            if moments is not None and flag & HAS_MOMENTS:
                mean, own = (loaded[number, name] for name in MOMENTS)
                moments.by_parameter[parameters[number]] = NoiseMoments(own, mean)

    def tensors(self) -> Iterator[StateTensor]:
        """Yield the tensors, which share the memory of :attr:`data`."""
        for number, entry, shape, at in self.format.places(self.flags):
            size = shape.numel() * entry.dtype.itemsize
            values = self.data[at : at + size].view(entry.dtype).view(shape)
            yield StateTensor(number, entry, values)

    @property
    def is_fresh(self) -> bool:
        """True if it can be that of a new optimizer: only second moments may be taken over."""
        if any(flag & HAS_MOMENTS for flag in self.flags):
            return False
        firsts = (each for each in self.tensors() if not each.entry.counts)
        return not any(bool(each.values.any()) for each in firsts if each.entry.name != SECOND)

    @property
    def digest(self) -> str:
        """SHA-256 of the bytes in hexadecimal; :data:`FRESH` if no parameter has a state."""
        return hashlib.sha256(bytes_of(self.data)).hexdigest() if any(self.flags) else FRESH

    def difference(self, right: LearnerState) -> float:
        """Return the largest relative difference of a kind of tensor; infinity if counters differ.

        It is the length of the difference over all parameters, divided by that of ``right``.
        """
        if self.flags != right.flags:
            return float("inf")
        squares: dict[str, list[float]] = {}
        for mine, other in zip(self.tensors(), right.tensors(), strict=True):
            if mine.entry.counts:
                if not torch.equal(mine.values, other.values):
                    return float("inf")
                continue
            sums = squares.setdefault(mine.entry.name, [0.0, 0.0])
            sums[0] += float(torch.linalg.vector_norm(mine.values - other.values)) ** 2
            sums[1] += float(torch.linalg.vector_norm(other.values)) ** 2
        return max((_ratio(*each) for each in squares.values()), default=0.0)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _entries_of(parameter: Tensor, state: dict[str, Any]) -> tuple[StateEntry, ...]:
    entries = []
    for name, value in sorted(state.items()):
        if value is None:
            continue
        if not isinstance(value, Tensor) or not value.dtype.is_floating_point:
            raise NotRepeatable(f"the optimizer's {name} is not a floating-point tensor")
        if value.shape not in (torch.Size(), parameter.shape):
            raise NotRepeatable(f"the optimizer's {name} has another shape than its parameter")
        # A parameter can be a scalar, too; counters have names of their own in PyTorch.
        entries.append(StateEntry(name, value.dtype, value.shape != parameter.shape
                                  or name == "step"))  # fmt: skip
    return tuple(entries)


def _check(each: StateTensor) -> None:
    """Raise :class:`MalformedState` for a value that training doesn't make."""
    # NaN fails the comparison, too.
    if not bool((each.values.abs() < float("inf")).all()):
        raise MalformedState(f"{each.entry.name} is not finite")
    if each.entry.counts and not 0 <= float(each.values) <= LARGEST_COUNTER:
        raise MalformedState(f"{each.entry.name} is not a number of steps")


def _like(parameter: Tensor, group: dict[str, Any], each: StateTensor) -> Tensor:
    """Return a copy of a tensor where the optimizer of a parameter keeps it."""
    if each.entry.counts:
        # As torch.optim does.
        on_device = group.get("capturable") or group.get("fused")
        return each.values.clone().to(parameter.device if on_device else "cpu")
    return torch.empty_like(parameter, dtype=each.entry.dtype).copy_(each.values)


def _ratio(difference: float, whole: float) -> float:
    # Both are squares; two tensors of zeros are equal.
    return math.sqrt(difference / max(whole, 1e-60))


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
