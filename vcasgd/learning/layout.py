"""Order of a module's tensors in flat vectors, and its base, which the vectors don't contain.

A layout is data, so using one doesn't import torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vcasgd.errors import CheckpointDamaged, SpecError
from vcasgd.learning.base import (
    BaseTensor,
    base_tensors,
    buffers_of,
    parameters_of,
    persistent_names,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vcasgd.learning.vector import Floats


#: Start of the names of tensors that a task keeps beside its model
#: (:mod:`vcasgd.learning.beside`).
BESIDE = "beside:"
#: Bytes of a number in double precision, real and complex.
_BYTES = {False: 8, True: 16}
#: Version of the stored form of layouts with a base. One without a base has no version.
FORMAT = 2


class TensorKind(StrEnum):
    """Role of a tensor for update rules."""

    PARAMETER = "parameter"  #: Trained by the optimizer.
    STATISTIC = "statistic"  #: Floating-point buffer: the mean of the workers' values.
    INTEGER = "integer"  #: Integers: the largest of the workers' values.
    COUNT = "count"  #: Integers whose increments are added.
    LATEST = "latest"  #: Integers: the value that arrives last.
    SUM = "sum"  #: Numbers whose increments are added, as float64.
    MAX = "max"  #: Numbers: the largest of the workers' values, as float64.
    MIN = "min"  #: Numbers: the smallest of the workers' values, as float64.
    LATEST_FLOAT = "latest-float"  #: Numbers: the values that arrive last, as float64.


#: Kinds in the float32 vector. The others have 64 bits for each number, in the int64 vector.
FLOATS = (TensorKind.PARAMETER, TensorKind.STATISTIC)
#: Kinds whose 64 bits are those of a float64.
DOUBLES = (TensorKind.SUM, TensorKind.MAX, TensorKind.MIN, TensorKind.LATEST_FLOAT)


@dataclass(frozen=True)
class TensorEntry:
    """Position of one tensor in the vectors.

    ``offset`` counts elements of the float32 vector for kinds in :data:`FLOATS`, and otherwise of
    the int64 vector.
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
        return self.part_of(floats if self.kind in FLOATS else integers)

    def part_of(self, vector: Floats) -> Tensor:
        """Return a view of this tensor in the vector that has it, in its own shape."""
        part = vector[self.offset : self.offset + self.size]
        return as_kind(part, self.kind).view(self.shape)


def is_double(tensor: Tensor) -> bool:
    """Return True for a tensor in double precision, real or complex."""
    floating = tensor.is_floating_point() or tensor.is_complex()
    return floating and tensor.dtype.itemsize == _BYTES[tensor.is_complex()]


def as_kind(part: Tensor, kind: TensorKind) -> Tensor:
    """Return a part of a vector, [n], as the numbers that tensors of this kind have there."""
    if kind not in DOUBLES:
        return part
    import torch  # A caller with a tensor has imported torch.

    return part.view(torch.float64)


@dataclass(frozen=True)
class Layout:
    """Order of a module's tensors in the vectors; equal layouts have interchangeable vectors.

    Tensors of the ``base`` are in no vector. With ``gradients``, those of the parameters and a mark
    are at the end of the float32 vector (:mod:`vcasgd.learning.mean_gradients`). Tensors that are
    named in ``doubles`` are also exact, as float64, at the end of the int64 vector. The parameter
    server adds up the updates there, and updates don't have them.
    """

    entries: tuple[TensorEntry, ...]
    base: tuple[BaseTensor, ...] = ()
    gradients: bool = False
    #: Name of a float64 tensor, which the vector has as float32; empty without one.
    rounded: str = ""
    #: Names of complex tensors, which the vector has as [*shape, 2]: real and imaginary parts.
    complexes: tuple[str, ...] = ()
    doubles: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        module: nn.Module,
        base_buffers: Iterable[str] = (),
        carried: Mapping[str, bool] = MappingProxyType({}),
        kinds: Mapping[str, TensorKind] = MappingProxyType({}),
    ) -> Layout:
        """Return the layout of a module's parameters and persistent buffers, tied ones once.

        Frozen parameters and ``base_buffers`` are the base, apart from those that are ``carried``:
        as parameters if True, else as statistics. Buffers have the ``kinds`` of their names, or
        those of their types. Non-persistent ones are left out, as in a ``state_dict``: they can be
        recomputed. Raises :class:`SpecError` for uninitialized
        lazy tensors.
        """
        for name, parameter in parameters_of(module).items():
            _check_shape(name, parameter)
        named = base_tensors(module, base_buffers).items()
        base = {name: tensor for name, tensor in named if name not in carried}
        state = [
            (name, tensor, kinds.get(name, kind))
            for name, tensor, kind in _state(module, carried)
            if name not in base
        ]
        floats = [part for part in state if part[2] is TensorKind.PARAMETER]
        floats += [part for part in state if part[2] is TensorKind.STATISTIC]
        integers = [part for part in state if part[2] not in FLOATS]
        fixed = (BaseTensor.of(name, tensor) for name, tensor in base.items())
        doubles = [name for name, each, _ in floats if is_double(each)]
        complexes = tuple(name for name, each, _ in state if each.is_complex())
        placed = (*_placed(floats), *_placed(integers))
        return cls(placed, tuple(fixed), rounded=doubles[0] if doubles else "", complexes=complexes)

    @cached_property
    def parameters(self) -> int:
        """Number of trained parameters; the index where the statistics start."""
        return self._count(TensorKind.PARAMETER)

    @cached_property
    def floats(self) -> int:
        """Length of the float32 vector."""
        return self.state_floats + (self.parameters + 1 if self.gradients else 0)

    @cached_property
    def state_floats(self) -> int:
        """Number of floats in the module's state; the index where gradients start."""
        return self._count(*FLOATS)

    @cached_property
    def counted(self) -> int:
        """Numbers of the int64 vector that updates have; the index where exact ones start."""
        return sum(entry.size for entry in self.entries if entry.kind not in FLOATS)

    @cached_property
    def integers(self) -> int:
        """Length of the int64 vector."""
        return self.counted + sum(
            entry.size for entry in self.entries if entry.name in self.doubles
        )

    @cached_property
    def exact(self) -> tuple[tuple[TensorEntry, slice], ...]:
        """The :attr:`doubles`, each with its part of the int64 vector."""
        found, start = [], self.counted
        for entry in self.entries:
            if entry.name in self.doubles:
                found.append((entry, slice(start, start + entry.size)))
                start += entry.size
        return tuple(found)

    @cached_property
    def counters(self) -> tuple[tuple[TensorKind, slice], ...]:
        """The parts of the int64 vector, each with the kind of its tensors.

        Raises :class:`CheckpointDamaged` if its tensors aren't one after another.
        """
        found: list[tuple[TensorKind, slice]] = []
        end = 0
        for entry in self.entries:
            if entry.kind in FLOATS:
                continue
            if entry.offset != end:
                raise CheckpointDamaged(f"layout: {entry.name} isn't where the previous one ends")
            end += entry.size
            if found and found[-1][0] is entry.kind:
                found[-1] = entry.kind, slice(found[-1][1].start, end)
            else:
                found.append((entry.kind, slice(entry.offset, end)))
        return tuple(found)

    def _count(self, *kinds: TensorKind) -> int:
        return sum(entry.size for entry in self.entries if entry.kind in kinds)

    @property
    def beside(self) -> list[str]:
        """The names, in the task or script, of what travels beside the model."""
        names = [each.name.removeprefix(BESIDE) for each in self.entries if BESIDE in each.name]
        return sorted({name.partition(".")[0] for name in names})

    def difference(self, other: Layout) -> str | None:
        """Return the name of a tensor that another layout lacks or has differently; None if equal.

        Differences of shapes and kinds come before those of the base's values.
        """
        mine, theirs = ({entry.name: entry for entry in of.entries} for of in (self, other))
        for name in {**mine, **theirs}:
            if _role(mine.get(name)) != _role(theirs.get(name)):
                return name
        present = set(other.base) ^ set(self.base)
        for part in (*self.base, *other.base, *self.entries):
            if part in present or (isinstance(part, TensorEntry) and part != theirs[part.name]):
                return part.name
        return None

    def to_json(self) -> str:
        """Return canonical JSON: equal layouts give equal text."""
        value: Any = [asdict(entry) for entry in self.entries]
        more = {"gradients": self.gradients, "rounded": self.rounded,
                "complex": self.complexes, "doubles": self.doubles}  # fmt: skip
        if self.base or any(more.values()):
            base = [tensor.to_json() for tensor in self.base]
            value = {"version": FORMAT, "entries": value, "base": base}
            value |= {name: part for name, part in more.items() if part}
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """Return the layout with this JSON. Raises :class:`CheckpointDamaged`."""
        try:
            value = json.loads(text)
            if not isinstance(value, dict):
                return cls(tuple(_entry(entry) for entry in value))
            if value["version"] != FORMAT:
                raise ValueError(f"version {value['version']} of the format is not supported")
            base = tuple(BaseTensor.from_json(tensor) for tensor in value["base"])
            entries = tuple(_entry(entry) for entry in value["entries"])
            gradients = value.get("gradients") is True
            complexes, doubles = (
                tuple(map(str, value.get(name, ()))) for name in ("complex", "doubles")
            )
            rounded = str(value.get("rounded", ""))
            return cls(entries, base, gradients, rounded, complexes, doubles)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointDamaged(f"not a layout: {error!r}") from error

    def digest(self) -> str:
        """Return the SHA-256 of the canonical JSON, in hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def _state(
    module: nn.Module, carried: Mapping[str, bool]
) -> Iterator[tuple[str, Tensor, TensorKind]]:
    def kind(name: str, tensor: Tensor, usual: TensorKind) -> TensorKind:
        known = {True: TensorKind.PARAMETER, False: TensorKind.STATISTIC}
        return _kind(name, tensor, known[carried[name]] if name in carried else usual)

    for name, parameter in parameters_of(module).items():
        if parameter.requires_grad or name in carried:
            yield name, parameter, kind(name, parameter, TensorKind.PARAMETER)
    persistent = persistent_names(module)
    for name, buffer in buffers_of(module).items():
        if name in persistent or name in carried:
            yield name, buffer, kind(name, buffer, TensorKind.STATISTIC)


def _role(entry: TensorEntry | None) -> tuple[Any, ...]:
    return (entry.shape, entry.kind) if entry else ()


def _check_shape(name: str, tensor: Tensor) -> None:
    from torch.nn.parameter import is_lazy  # A caller with a module has imported torch.

    if is_lazy(tensor):
        raise SpecError(
            f"task: {name} of the model has no shape yet",
            remedy="pass one batch through the lazy modules in Task.model()",
            field="task",
        )


def _kind(name: str, tensor: Tensor, if_floating: TensorKind) -> TensorKind:
    _check_shape(name, tensor)
    floating = tensor.is_floating_point() or tensor.is_complex()
    return if_floating if floating else TensorKind.INTEGER


def _placed(state: Iterable[tuple[str, Tensor, TensorKind]]) -> Iterator[TensorEntry]:
    offset = 0
    for name, tensor, kind in state:
        shape = (*tensor.shape, 2) if tensor.is_complex() else tuple(tensor.shape)
        yield TensorEntry(name, shape, kind, offset)
        offset += prod(shape)


def _entry(value: dict[str, Any]) -> TensorEntry:
    shape = tuple(int(length) for length in value["shape"])
    return TensorEntry(str(value["name"]), shape, TensorKind(value["kind"]), int(value["offset"]))
