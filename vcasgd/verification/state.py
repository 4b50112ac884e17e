"""State of a learner between two intervals, which another machine can load.

It consists of the state of the optimizer and of the second moments of a local batch
(:mod:`vcasgd.learning.local_moments`). It travels as a safetensors file. Which tensors that may
have follows from the job's own optimizer, so that nothing in it has to be trusted.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.optim import Optimizer

from vcasgd.learning.local_moments import LocalMoments, NoiseMoments
from vcasgd.learning.optimizers import trained_by
from vcasgd.store.tensors.chunks import bytes_of

#: Digest of the state of a new optimizer, which has no tensors.
FRESH = "0" * 64
#: Second moments of Adam, and the local ones that belong to them.
SECOND, MOMENTS = "exp_avg_sq", ("moments.mean", "moments.own")
#: Bytes of a file's header, in all and for each tensor, of which the names are short.
HEADER_BYTES, ENTRY_BYTES = 1024, 256
#: Largest counter of a state; exact in every type.
MAX_COUNTER = 2.0**24


class NotRepeatable(Exception):
    """An interval of this learner can't be repeated from its state. The message is the reason."""


class MalformedState(Exception):
    """Bytes that are no state of this job's learners. The message is the reason."""


@dataclass(frozen=True)
class Kind:
    """A tensor of each parameter's state: a counter, or one of the parameter's shape."""

    dtype: torch.dtype
    counts: bool


class StateFormat:
    """Format of the states of one job's learners. Raises :class:`NotRepeatable`.

    ``optimizer`` should have made a step; one without any state has the format of one that never
    has any.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        parameters = trained_by(optimizer)
        self._shapes = [parameter.shape for parameter in parameters]
        states = ((each, optimizer.state.get(each)) for each in parameters)
        found = {_kinds_of(parameter, state) for parameter, state in states if state}
        if len(found) > 1:
            raise NotRepeatable("the optimizer keeps different states for its parameters")
        self._kinds = dict(found.pop() if found else ())
        own = list(self._kinds)
        #: Names of the tensors that a parameter can have together.
        self._allowed = [[], own]
        if (second := self._kinds.get(SECOND)) is not None:
            self._kinds |= dict.fromkeys(MOMENTS, second)
            self._allowed.append([*own, *MOMENTS])

    @property
    def max_bytes(self) -> int:
        """Size of a file in which each parameter has all tensors."""
        sizes = (
            ENTRY_BYTES + kind.dtype.itemsize * (1 if kind.counts else shape.numel())
            for kind in self._kinds.values()
            for shape in self._shapes
        )
        return HEADER_BYTES + sum(sizes)

    def parse(self, data: Tensor) -> LearnerState:
        """Return the state in untrusted bytes, uint8 [n]. Raises :class:`MalformedState`."""
        try:
            named = load(bytes(bytes_of(data)))
        except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
            raise MalformedState(f"it can't be read: {error}") from error
        tensors: dict[tuple[int, str], Tensor] = {}
        for number, shape in enumerate(self._shapes):
            names = [name for name in self._kinds if f"{number}.{name}" in named]
            if names not in self._allowed:
                raise MalformedState(f"parameter {number} lacks some of its tensors")
            for name in names:
                tensor = named.pop(f"{number}.{name}")
                _check(tensor, name, self._kinds[name], shape)
                tensors[number, name] = tensor
        if named:
            raise MalformedState(f"{len(named)} of its tensors are not those of this model")
        return LearnerState(self, tensors)

    def counts(self, name: str) -> bool:
        """Return True if tensors of a name are counters."""
        return self._kinds[name].counts


@dataclass(frozen=True)
class LearnerState:
    """State of a learner: the CPU's copy of each tensor, by its parameter's number and its name.

    With local moments, the first moments are those of a share of 1, because the next interval may
    have another share.
    """

    format: StateFormat
    tensors: Mapping[tuple[int, str], Tensor]

    @classmethod
    def of(cls, optimizer: Optimizer, moments: LocalMoments | None) -> LearnerState:
        """Copy the state of an optimizer and its local moments. Raises :class:`NotRepeatable`."""
        state_format, copies = StateFormat(optimizer), {}
        for key, tensor in _tensors_of(optimizer, moments):
            copies[key] = tensor.detach().to("cpu", copy=True).contiguous()
            if moments is not None and key[1] in moments.first_moments:
                copies[key].mul_(moments.share)
        return cls(state_format, copies)

    def load(self, optimizer: Optimizer, moments: LocalMoments | None) -> None:
        """Give the state to a new optimizer and its local moments, whose share is still 1."""
        pairs = [(each, group) for group in optimizer.param_groups for each in group["params"]]
        second: dict[Tensor, dict[str, Tensor]] = {}
        for (number, name), tensor in self.tensors.items():
            parameter, group = pairs[number]
            if self.format.counts(name):
                # As torch.optim does.
                on_device = group.get("capturable") or group.get("fused")
                copy = tensor.clone().to(parameter.device if on_device else "cpu")
            else:
                copy = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
            if name in MOMENTS:
                second.setdefault(parameter, {})[name.removeprefix("moments.")] = copy
            else:
                optimizer.state[parameter][name] = copy
        if moments is not None:
            for parameter, both in second.items():
                moments.by_parameter[parameter] = NoiseMoments(**both)

    def to_bytes(self) -> Tensor:
        """Return the state as a file, uint8 [n], which :meth:`StateFormat.parse` reads."""
        named = {f"{number}.{name}": tensor for (number, name), tensor in self.tensors.items()}
        return torch.frombuffer(bytearray(save(named)), dtype=torch.uint8)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the tensors in hexadecimal; :data:`FRESH` if there are none."""
        if not self.tensors:
            return FRESH
        digest = hashlib.sha256()
        for (number, name), tensor in self.tensors.items():
            digest.update(f"{number}.{name}:".encode())
            digest.update(bytes_of(tensor))
        return digest.hexdigest()

    def difference(self, right: LearnerState) -> float:
        """Return the largest relative difference of a kind of tensor; infinity if counters differ.

        It is the length of the difference over all parameters, divided by that of ``right``.
        """
        if self.tensors.keys() != right.tensors.keys():
            return math.inf
        squares: dict[str, list[float]] = {}
        for key, tensor in self.tensors.items():
            other, name = right.tensors[key], key[1]
            if self.format.counts(name):
                if not torch.equal(tensor, other):
                    return math.inf
                continue
            sums = squares.setdefault(name, [0.0, 0.0])
            sums[0] += float(torch.linalg.vector_norm(tensor - other)) ** 2
            sums[1] += float(torch.linalg.vector_norm(other)) ** 2
        # Two tensors of zeros are equal.
        return max((math.sqrt(a / max(b, 1e-60)) for a, b in squares.values()), default=0.0)


def _tensors_of(
    optimizer: Optimizer, moments: LocalMoments | None
) -> Iterator[tuple[tuple[int, str], Tensor]]:
    """Yield the tensors of a state, with the keys of :attr:`LearnerState.tensors`, in order."""
    corrected = moments.by_parameter if moments else {}
    for number, parameter in enumerate(trained_by(optimizer)):
        for name, tensor in sorted(optimizer.state.get(parameter, {}).items()):
            if tensor is not None:
                yield (number, name), tensor
        if (noise := corrected.get(parameter)) is not None:
            yield from (((number, MOMENTS[0]), noise.mean), ((number, MOMENTS[1]), noise.own))


def _kinds_of(parameter: Tensor, state: dict[str, Any]) -> tuple[tuple[str, Kind], ...]:
    kinds = []
    for name, value in sorted(state.items()):
        if value is None:
            continue
        if not isinstance(value, Tensor) or not value.dtype.is_floating_point:
            raise NotRepeatable(f"the optimizer's {name} is not a floating-point tensor")
        if value.shape not in (torch.Size(), parameter.shape):
            raise NotRepeatable(f"the optimizer's {name} has another shape than its parameter")
        # A parameter can be a scalar, too; counters have names of their own in PyTorch.
        kinds.append((name, Kind(value.dtype, value.shape != parameter.shape or name == "step")))
    return tuple(kinds)


def _check(tensor: Tensor, name: str, kind: Kind, shape: torch.Size) -> None:
    """Raise :class:`MalformedState` for a tensor that training doesn't make."""
    expected = torch.Size() if kind.counts else shape
    if tensor.dtype != kind.dtype or tensor.shape != expected:
        raise MalformedState(f"{name} has another type or shape")
    # NaN fails the comparison, too.
    if not bool((tensor.abs() < math.inf).all()):
        raise MalformedState(f"{name} is not finite")
    if kind.counts and not 0 <= float(tensor) <= MAX_COUNTER:
        raise MalformedState(f"{name} is not a number of steps")
