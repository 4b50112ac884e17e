"""Conversion of a module's state to flat vectors, and back.

All floating-point state is in one float32 vector: first the parameters, then the buffers
(BatchNorm's running statistics), so that a rule can distinguish the two by a single index, and
last the frozen parameters, which no update carries. Integer and boolean state
(``num_batches_tracked``) is in a separate int64 vector.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from vcasgd.errors import CheckpointDamaged, InvalidUpdate, SpecError

#: Largest magnitude in an update; larger values would soon overflow float32 weights.
LARGEST_VALUE = 1e30


class TensorKind(StrEnum):
    """Role of a tensor for update rules."""

    PARAMETER = "parameter"  #: Trained by the optimizer.
    STATISTIC = "statistic"  #: Floating-point buffer, measured and not trained.
    FROZEN = "frozen"  #: Parameter without gradient; keeps its value from the first snapshot.
    INTEGER = "integer"  #: Counters and masks, in the int64 vector.


def is_sound(vector: Tensor) -> bool:
    """Return True if all numbers of a float32 [n] are finite and at most :data:`LARGEST_VALUE`."""
    if not len(vector):
        return True
    low, high = torch.aminmax(vector)  # both are NaN if any number is
    return max(-float(low), float(high)) <= LARGEST_VALUE


@dataclass(frozen=True)
class TensorEntry:
    """Position of one tensor in the vectors.

    ``offset`` counts elements of the float32 vector, or of the int64 vector for kind INTEGER.
    """

    name: str
    shape: tuple[int, ...]
    kind: TensorKind
    offset: int

    @property
    def size(self) -> int:
        """Number of elements; 1 for a scalar."""
        return prod(self.shape)

    def view(self, floats: Tensor, integers: Tensor) -> Tensor:
        """Return a view of this tensor in the vectors, in its own shape."""
        vector = integers if self.kind is TensorKind.INTEGER else floats
        return vector[self.offset : self.offset + self.size].view(self.shape)


@dataclass(frozen=True)
class Layout:
    """Order of a module's tensors in the vectors; equal layouts have interchangeable vectors."""

    entries: tuple[TensorEntry, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """Return the layout of a module's parameters and persistent buffers, tied ones once.

        Non-persistent buffers are left out, as in a ``state_dict``: they can be recomputed. Raises
        :class:`SpecError` for complex tensors and uninitialized lazy ones.
        """
        state = list(_state(module))
        floats = [part for part in state if part[2] is TensorKind.PARAMETER]
        floats += [part for part in state if part[2] is TensorKind.STATISTIC]
        floats += [part for part in state if part[2] is TensorKind.FROZEN]
        integers = [part for part in state if part[2] is TensorKind.INTEGER]
        return cls((*_placed(floats), *_placed(integers)))

    @cached_property
    def parameters(self) -> int:
        """Number of trained parameters; the index where the statistics start."""
        return self._count(TensorKind.PARAMETER)

    @cached_property
    def sent(self) -> int:
        """Number of floats that updates carry: parameters and statistics."""
        return self._count(TensorKind.PARAMETER, TensorKind.STATISTIC)

    @cached_property
    def floats(self) -> int:
        """Length of the float32 vector."""
        return self._count(TensorKind.PARAMETER, TensorKind.STATISTIC, TensorKind.FROZEN)

    @cached_property
    def integers(self) -> int:
        """Length of the int64 vector."""
        return self._count(TensorKind.INTEGER)

    def _count(self, *kinds: TensorKind) -> int:
        return sum(entry.size for entry in self.entries if entry.kind in kinds)

    def to_json(self) -> str:
        """Return canonical JSON: equal layouts give equal text."""
        entries = [asdict(entry) for entry in self.entries]
        return json.dumps(entries, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """Return the layout with this JSON. Raises :class:`CheckpointDamaged`."""
        try:
            return cls(tuple(_entry(value) for value in json.loads(text)))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointDamaged(f"not a layout: {error!r}") from error

    def digest(self) -> str:
        """Return the SHA-256 of the canonical JSON, in hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def gather(module: nn.Module, layout: Layout, floats: Tensor, integers: Tensor) -> None:
    """Copy a module's state into preallocated CPU vectors.

    They are float32 ``[layout.floats]`` and int64 ``[layout.integers]``. The module can be on any
    device and of any floating-point type. Raises :class:`SpecError` if the module has another
    layout, and :class:`InvalidUpdate` if a vector has the wrong length.
    """
    for tensor, part in _pairs(module, layout, floats, integers):
        part.copy_(tensor.detach())


def scatter(floats: Tensor, integers: Tensor, module: nn.Module, layout: Layout) -> None:
    """Copy the vectors into a module's state, in place and without autograd.

    This is the inverse of :func:`gather` and raises the same errors. Tied tensors stay tied.
    """
    with torch.no_grad():
        for tensor, part in _pairs(module, layout, floats, integers):
            tensor.copy_(part)


def unfrozen_parameters(module: nn.Module, layout: Layout) -> list[str]:
    """Return the names of parameters that are frozen in the layout but require a gradient."""
    frozen = {entry.name for entry in layout.entries if entry.kind is TensorKind.FROZEN}
    return [
        name
        for name, parameter in module.named_parameters()
        if name in frozen and parameter.requires_grad
    ]


def named_tensors(layout: Layout, floats: Tensor, integers: Tensor) -> dict[str, Tensor]:
    """Return views of the vectors as the tensors of a ``state_dict``, tied ones once.

    Integer state is always int64; ``load_state_dict`` converts it back. Raises
    :class:`InvalidUpdate` if a vector has the wrong length.
    """
    _check_lengths(layout, floats, integers)
    return {entry.name: entry.view(floats, integers) for entry in layout.entries}


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor, TensorKind]]:
    for name, parameter in module.named_parameters():
        kind = TensorKind.PARAMETER if parameter.requires_grad else TensorKind.FROZEN
        yield name, parameter, _kind(name, parameter, kind)
    persistent = module.state_dict(keep_vars=True).keys()
    for name, buffer in module.named_buffers():
        if name in persistent:
            yield name, buffer, _kind(name, buffer, TensorKind.STATISTIC)


def _kind(name: str, tensor: Tensor, if_floating: TensorKind) -> TensorKind:
    if is_lazy(tensor):
        raise SpecError(
            f"task: {name} of the model has no shape yet",
            remedy="pass one batch through the lazy modules in Task.model()",
            field="task",
        )
    if tensor.is_complex():
        raise SpecError(
            f"task: {name} of the model is complex ({tensor.dtype})",
            remedy="store its real and imaginary parts, as torch.view_as_real returns them",
            field="task",
        )
    return if_floating if tensor.is_floating_point() else TensorKind.INTEGER


def _placed(state: Iterable[tuple[str, Tensor, TensorKind]]) -> Iterator[TensorEntry]:
    offset = 0
    for name, tensor, kind in state:
        yield TensorEntry(name, tuple(tensor.shape), kind, offset)
        offset += tensor.numel()


def _entry(value: dict[str, Any]) -> TensorEntry:
    shape = tuple(int(length) for length in value["shape"])
    return TensorEntry(str(value["name"]), shape, TensorKind(value["kind"]), int(value["offset"]))


def _pairs(
    module: nn.Module, layout: Layout, floats: Tensor, integers: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each tensor of the module with the view of the same shape in the vectors."""
    _check_lengths(layout, floats, integers)
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for entry in layout.entries:
        tensor = tensors.get(entry.name)
        # another shape could be broadcast and silently fill a layer with one number
        if tensor is None or tuple(tensor.shape) != entry.shape:
            raise SpecError(
                f"task: the model has no {entry.name} of shape {list(entry.shape)}",
                remedy="make Task.model() build the same model every time",
                field="task",
            )
        yield tensor, entry.view(floats, integers)


def _check_lengths(layout: Layout, floats: Tensor, integers: Tensor) -> None:
    for vector, expected in ((floats, layout.floats), (integers, layout.integers)):
        if vector.shape != (expected,):
            raise InvalidUpdate(
                f"a vector has shape {list(vector.shape)} instead of [{expected}]",
                reason="length",
            )
