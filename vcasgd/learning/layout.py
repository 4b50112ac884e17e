"""Order of a module's tensors in flat vectors. It is data, so using one doesn't import torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from vcasgd.errors import CheckpointDamaged, SpecError

if TYPE_CHECKING:
    from torch import Tensor, nn


class TensorKind(StrEnum):
    """Role of a tensor for update rules."""

    PARAMETER = "parameter"  #: Trained by the optimizer.
    STATISTIC = "statistic"  #: Floating-point buffer, measured and not trained.
    FROZEN = "frozen"  #: Parameter without gradient; keeps its value from the first snapshot.
    INTEGER = "integer"  #: Counters and masks, in the int64 vector.


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


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor, TensorKind]]:
    for name, parameter in module.named_parameters():
        kind = TensorKind.PARAMETER if parameter.requires_grad else TensorKind.FROZEN
        yield name, parameter, _kind(name, parameter, kind)
    persistent = module.state_dict(keep_vars=True).keys()
    for name, buffer in module.named_buffers():
        if name in persistent:
            yield name, buffer, _kind(name, buffer, TensorKind.STATISTIC)


def _kind(name: str, tensor: Tensor, if_floating: TensorKind) -> TensorKind:
    from torch.nn.parameter import is_lazy  # A caller with a module has imported torch.

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
