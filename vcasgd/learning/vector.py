"""Conversion of a module's state to flat vectors, and back.

All floating-point state is in one float32 vector: first the parameters, then the buffers
(BatchNorm's running statistics), so that a rule can distinguish the two by a single index. Integer
and boolean state (``num_batches_tracked``) is in a separate int64 vector, and so are buffers that
aren't averaged. The base, such as frozen parameters, is in neither (:mod:`vcasgd.learning.base`).
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from vcasgd.errors import SpecError
from vcasgd.learning.base import as_real, buffers_of, parameters_of
from vcasgd.learning.layout import FLOATS, Layout, TensorEntry, TensorKind, as_kind

#: Largest magnitude in an update; larger values would soon overflow float32 weights.
LARGEST_VALUE = 1e30
#: Elements of a mapped vector that are in a process at a time.
PIECE_FLOATS = 1 << 19
_FLOAT_BYTES = 4


def new_vector(floats: int) -> Tensor:
    """Return float32 [floats], zeros, in memory that goes back to the system when it is freed.

    An allocator may keep such a block, and a later vector may not fit into it.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(1, floats) * np.float32().nbytes, flags=flags)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, np.float32, floats))


class MappedVector:
    """A vector, float32 [floats], zeros at first, of which a process has only parts.

    It's in the machine's memory, as a file without a name. A slice is a tensor that shares this
    memory, and that is mapped as long as the tensor exists.
    """

    def __init__(self, floats: int) -> None:
        self._open(os.memfd_create("vcasgd-vector"), 0, floats)
        os.ftruncate(self._file, max(1, floats) * _FLOAT_BYTES)

    @classmethod
    def of_file(cls, file: int, start: int, floats: int) -> MappedVector:
        """Return elements from ``start`` on of another process's vector, given a descriptor of its
        file, which this one closes."""
        vector = object.__new__(cls)
        vector._open(file, start, floats)
        return vector

    def _open(self, file: int, start: int, floats: int) -> None:
        self._file, self._start, self._floats = file, start, floats
        weakref.finalize(self, os.close, file)
        #: Keeps the file open.
        self._whole: MappedVector | None = None

    @property
    def place(self) -> tuple[int, int, int]:
        """The descriptor of its file, and what :meth:`of_file` needs in another process."""
        return self._file, self._start, self._floats

    def __len__(self) -> int:
        return self._floats

    def __getitem__(self, piece: slice) -> Tensor:
        start, stop, _ = piece.indices(self._floats)
        if start >= stop:
            return torch.empty(0)
        at = (self._start + start) * _FLOAT_BYTES
        skipped = at % mmap.ALLOCATIONGRANULARITY
        size = skipped + (stop - start) * _FLOAT_BYTES
        memory = mmap.mmap(self._file, size, offset=at - skipped)
        return torch.from_numpy(np.frombuffer(memory, np.float32, stop - start, skipped))

    def between(self, start: int, stop: int) -> MappedVector:
        """Return the elements ``[start, stop)``, in the same memory, none of which is mapped."""
        part = object.__new__(MappedVector)
        part._file, part._whole = self._file, self if self._whole is None else self._whole
        part._start, part._floats = self._start + start, stop - start
        return part

    def give_back(self) -> None:
        """Give its whole pages back to the system, which makes their elements zeros."""
        page = mmap.ALLOCATIONGRANULARITY
        first = -(-self._start * _FLOAT_BYTES // page) * page
        last = (self._start + self._floats) * _FLOAT_BYTES // page * page
        for start in range(first, last, PIECE_FLOATS * _FLOAT_BYTES):
            size = min(PIECE_FLOATS * _FLOAT_BYTES, last - start)
            with mmap.mmap(self._file, size, offset=start) as memory:
                memory.madvise(mmap.MADV_REMOVE)

    def clone(self) -> MappedVector:
        """Return a copy in other memory."""
        copy = MappedVector(self._floats)
        copy_floats(self, copy)
        return copy


#: A vector, float32 [n]: slices of both are tensors.
Floats = Tensor | MappedVector


def within(vector: Floats, start: int, stop: int) -> Floats:
    """Return elements ``[start, stop)`` of a vector, in the same memory; it maps none of them."""
    if isinstance(vector, MappedVector):
        return vector.between(start, stop)
    return vector[start:stop]


def pieces_of(vector: Floats) -> Iterator[tuple[int, Tensor]]:
    """Yield a vector in pieces that a process may have at a time, each with its first element."""
    if isinstance(vector, Tensor):
        yield 0, vector
        return
    for start in range(0, len(vector), PIECE_FLOATS):
        yield start, vector[start : start + PIECE_FLOATS]


def copy_floats(source: Floats, out: Floats) -> None:
    """Copy a vector, float32 [n], to the beginning of another one."""
    both = isinstance(source, Tensor) and isinstance(out, Tensor)
    size = max(1, len(source)) if both else PIECE_FLOATS
    for start in range(0, len(source), size):
        piece = source[start : start + size]
        out[start : start + len(piece)].copy_(piece)


def is_sound(vector: Floats) -> bool:
    """Return True if all numbers of a float32 [n] are finite and at most :data:`LARGEST_VALUE`."""
    for _, piece in pieces_of(vector):
        if not len(piece):
            continue
        low, high = torch.aminmax(piece)  # both are NaN if any number is
        if not max(-float(low), float(high)) <= LARGEST_VALUE:
            return False
    return True


def gather(module: nn.Module, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return a module's state in new CPU vectors.

    They are float32 ``[layout.floats]`` and int64 ``[layout.integers]``. The module can be on any
    device and of any floating-point type. Raises :class:`SpecError` if it has another layout.
    """
    floats = new_vector(layout.floats)
    gather_part(module, layout, 0, floats)
    return floats, gather_integers(module, layout)


def scatter(floats: Floats, integers: Tensor, module: nn.Module, layout: Layout) -> None:
    """Copy the vectors into a module's state, in place and without autograd.

    This is the inverse of :func:`gather` and raises the same error. Tied tensors stay tied.
    """
    scatter_part(floats, 0, module, layout)
    scatter_integers(integers, module, layout)


def read_tensors(
    layout: Layout, tensors: Mapping[str, Tensor], floats: Floats, start: int = 0
) -> Tensor:
    """Copy named tensors into elements of the vector from ``start`` on, float32 [n].

    Returns int64 [integers]. Raises :class:`KeyError` for a missing tensor, and
    :class:`ValueError` for one of another shape.
    """
    integers = torch.empty(layout.integers, dtype=torch.int64)
    for entry in layout.entries:
        tensor = as_real(tensors[entry.name])
        # copy_ would broadcast a single number over a whole layer.
        if tuple(tensor.shape) != entry.shape:
            raise ValueError(f"{entry.name} has shape {list(tensor.shape)}")
        if entry.kind not in FLOATS:
            entry.part_of(integers).copy_(tensor)
            continue
        first = max(start, entry.offset)
        last = min(start + len(floats), entry.offset + entry.size)
        if first < last:
            part = tensor.reshape(-1)[first - entry.offset : last - entry.offset]
            floats[first - start : last - start].copy_(part)
    for entry, at in layout.exact:
        doubles_of(integers, at, entry).copy_(as_real(tensors[entry.name]))
    return integers


def gather_part(
    module: nn.Module, layout: Layout, start: int, out: Floats, origin: Floats | None = None
) -> None:
    """Copy elements of a module's vector from ``start`` on into ``out``, float32 [n].

    With ``origin``, float32 [n], parameters are differences from it; it may be ``out`` itself. Of a
    sharded module (:mod:`vcasgd.learning.sharded_model`), those elements that this process has.
    Raises :class:`SpecError` as :func:`gather` does.
    """
    for piece, at in _pieces(module, layout, start, len(out)):
        part = out[at].view(piece.shape)
        if origin is not None and start + at.stop <= layout.parameters:
            torch.sub(piece.to(part), origin[at].view(piece.shape), out=part)
        elif _is_plain(piece) and _is_plain(part):
            np.copyto(part.numpy(), piece.numpy())
        else:
            part.copy_(piece)


def scatter_part(floats: Floats, start: int, module: nn.Module, layout: Layout) -> None:
    """Copy ``floats``, float32 [n], into elements of a module's vector from ``start`` on.

    This is the inverse of :func:`gather_part`.
    """
    for piece, at in _pieces(module, layout, start, len(floats), writes=True):
        piece.copy_(floats[at].view(piece.shape))


def scatter_integers(integers: Tensor, module: nn.Module, layout: Layout) -> None:
    """Copy int64 ``[layout.integers]`` into a module's integer state."""
    tensors = _tensors(module)
    for entry in layout.entries:
        if entry.kind not in FLOATS:
            _tensor_of(entry, tensors).copy_(entry.part_of(integers))
    for entry, at in layout.exact:
        tensor = tensors[entry.name]
        tensor.copy_(refined(tensor, doubles_of(integers, at, entry).to(tensor.device)))


def shift_part(floats: Floats, start: int, module: nn.Module, layout: Layout) -> None:
    """Add ``floats``, float32 [n], to elements of a module's vector from ``start`` on.

    It does so in place and without autograd. Raises :class:`SpecError` as :func:`gather` does.
    """
    for piece, at in _pieces(module, layout, start, len(floats), writes=True):
        added = floats[at].view(piece.shape).to(piece.device)
        if _is_plain(piece):
            np.add(piece.numpy(), added.numpy(), out=piece.numpy())
        else:
            piece.add_(added)


def _is_plain(tensor: Tensor) -> bool:
    """Return True if NumPy can handle a tensor in place. It uses one thread: several would wait for
    the slowest one, beside the threads of an exchange, and are hardly faster."""
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32


def _pieces(
    module: nn.Module, layout: Layout, start: int, length: int, *, writes: bool = False
) -> Iterator[tuple[Tensor, slice]]:
    """Yield the pieces of the module's tensors that are in ``length`` elements of its vector from
    ``start`` on, each with its place among them. A tensor that is sharded over processes is the
    part of this one. A whole one has its shape, and others have one dimension; what the caller
    ``writes`` into a piece is in the tensor."""
    tensors, stop = _tensors(module), start + length
    for entry in layout.entries:
        if entry.kind not in FLOATS or not (
            start < entry.offset + entry.size and entry.offset < stop
        ):
            continue
        tensor, skipped = local_part(_tensor_of(entry, tensors))
        offset = entry.offset + skipped
        first, last = max(start, offset), min(stop, offset + tensor.numel())
        if first >= last:
            continue
        at = slice(first - start, last - start)
        if last - first == tensor.numel():
            yield tensor, at
        else:
            flat = tensor.reshape(-1)
            yield flat[first - offset : last - offset], at
            if writes and not tensor.is_contiguous():
                # It is a copy then, of a convolution's weight in channels_last for example.
                tensor.copy_(flat.view(tensor.shape))


def local_part(tensor: Tensor) -> tuple[Tensor, int]:
    """Return this process's part of a tensor, without its gradient, and the index of its first
    element: all of it unless it is a ``DTensor`` with rows in several processes."""
    tensor = tensor.detach()
    if not hasattr(tensor, "to_local"):
        return tensor, 0
    part: Tensor = tensor.to_local()
    (placement,), mesh = tensor.placements, tensor.device_mesh  # type: ignore[attr-defined]
    if not placement.is_shard():
        return part, 0
    rows = -(-tensor.shape[0] // mesh.size())
    before = min(mesh.get_local_rank() * rows, tensor.shape[0])
    return part, before * (tensor.numel() // tensor.shape[0])


def gather_integers(module: nn.Module, layout: Layout) -> Tensor:
    """Return a module's integer state, int64 ``[layout.integers]``.

    Raises :class:`SpecError` as :func:`gather` does.
    """
    out = torch.empty(layout.integers, dtype=torch.int64)
    tensors = _tensors(module)
    for entry in layout.entries:
        if entry.kind not in FLOATS:
            entry.part_of(out).copy_(_tensor_of(entry, tensors))
    for entry, at in layout.exact:
        doubles_of(out, at, entry).copy_(tensors[entry.name])
    return out


def counted(layout: Layout, before: Tensor, after: Tensor) -> Tensor | None:
    """Return what an update has about integer state, int64 ``[layout.counted]``.

    Those are increments for kinds that are added, and otherwise the values ``after``. ``before``
    are the values of the base, both int64 ``[layout.integers]``. Returns None if nothing has
    changed.
    """
    before, after = before[: layout.counted], after[: layout.counted]
    if torch.equal(before, after):
        return None
    out = after.clone()
    for kind, part in layout.counters:
        if kind in (TensorKind.COUNT, TensorKind.SUM):
            as_kind(out[part], kind).sub_(as_kind(before[part], kind))
    return out


def unfrozen_parameters(module: nn.Module, layout: Layout) -> list[str]:
    """Return the names of parameters of the base that require a gradient."""
    frozen = {tensor.name for tensor in layout.base}
    return [
        name
        for name, parameter in parameters_of(module).items()
        if name in frozen and parameter.requires_grad
    ]


# -- tensors in double precision -------------------------------------------------------------------

#: Largest relative difference of a float64 and what it is as float32, and the same of the smallest.
_ROUNDING = 2.0**-23, 1e-37


def doubles_of(integers: Tensor, at: slice, entry: TensorEntry) -> Tensor:
    """Return a view of the exact values of a tensor, float64, in the int64 vector."""
    return integers[at].view(torch.float64).view(entry.shape)


def refined(rounded: Tensor, exact: Tensor) -> Tensor:
    """Return the ``exact`` numbers, float64, where they are those that were ``rounded`` to float32.

    Elsewhere, the vectors are of different models, such as an average.
    """
    rounded = rounded.double()
    relative, least = _ROUNDING
    near = (exact - rounded).abs() <= relative * rounded.abs() + least
    return torch.where(near, exact, rounded)


def exact_parameters(module: nn.Module, layout: Layout) -> list[tuple[TensorEntry, Tensor]]:
    """Return the trained tensors that are exact in the vectors, without their gradients."""
    tensors = _tensors(module) if layout.doubles else {}
    found = [entry for entry, _ in layout.exact if entry.kind is TensorKind.PARAMETER]
    return [(entry, tensors[entry.name]) for entry in found]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the values of a module's tensors by name, complex ones as real numbers."""
    named: dict[str, Tensor] = {**parameters_of(module), **buffers_of(module)}
    return {name: as_real(tensor) for name, tensor in named.items()}


def _tensor_of(entry: TensorEntry, tensors: Mapping[str, Tensor]) -> Tensor:
    tensor = tensors.get(entry.name)
    # another shape could be broadcast and silently fill a layer with one number
    if tensor is None or tuple(tensor.shape) != entry.shape:
        raise SpecError(
            f"task: the model has no {entry.name} of shape {list(entry.shape)}",
            remedy="make Task.model() build the same model every time, and change its tensors, as "
            "pruning does, before the first batch",
            field="task",
        )
    return tensor
