"""The base of a model: tensors that training doesn't change, which the vectors don't contain.

Every worker builds or loads the base itself. The layout has a digest of each of its tensors, so a
worker with other values notices before it trains.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import xxhash

from vcasgd.errors import SpecError

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class BaseTensor:
    """Identity of one tensor of the base.

    ``dtype`` is torch's name without a prefix, such as ``uint8``. ``digest`` is the XXH3 of the
    values' bytes, 128 bits in hexadecimal. It finds accidental differences, not intended ones.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: str

    @property
    def size(self) -> int:
        """Number of elements; 1 for a scalar."""
        return prod(self.shape)

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> BaseTensor:
        """Return the identity of a tensor on any device."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(name, tuple(tensor.shape), dtype, digest_of(tensor))

    def to_json(self) -> list[Any]:
        return [self.name, list(self.shape), self.dtype, self.digest]

    @classmethod
    def from_json(cls, value: Any) -> BaseTensor:
        """Parse JSON values. Raises :class:`TypeError` and :class:`ValueError`."""
        name, shape, dtype, digest = value
        sizes = tuple(int(length) for length in shape)
        if min(sizes, default=0) < 0:
            raise ValueError(f"base: {name} has a negative size")
        return cls(str(name), sizes, str(dtype), str(digest))


def digest_of(tensor: Tensor) -> str:
    """Return the digest of a tensor's values, whatever its type."""
    import torch  # A caller with a tensor has imported torch.

    # A scalar has no bytes to view, and a transposed tensor has them in another order.
    values = tensor.detach().cpu().contiguous().reshape(-1)
    return xxhash.xxh3_128_hexdigest(values.view(torch.uint8).numpy().data)


def as_real(tensor: Tensor) -> Tensor:
    """Return a tensor's values, detached; of a complex one [*shape, 2], real and imaginary."""
    import torch  # A caller with a tensor has imported torch.

    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


def uncompiled(name: str) -> str:
    """Return the name of a tensor as in a model that isn't compiled: torch adds a prefix."""
    return name.replace("_orig_mod.", "")


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module, compiled or not, by name; tied ones once."""
    return {uncompiled(name): each for name, each in module.named_parameters()}


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a module, compiled or not, by name; tied ones once."""
    return {uncompiled(name): each for name, each in module.named_buffers()}


def persistent_names(module: nn.Module) -> set[str]:
    """Return the names of the tensors in the ``state_dict`` of a module, compiled or not."""
    return set(map(uncompiled, module.state_dict(keep_vars=True)))


def base_tensors(module: nn.Module, buffers: Iterable[str]) -> dict[str, Tensor]:
    """Return the tensors of a module that are its base: frozen parameters, and these buffers.

    So are persistent buffers with infinite values, such as masks, which are constants. Tied tensors
    are in it once. Raises :class:`SpecError` if there is no such persistent buffer.
    """
    frozen: dict[str, Tensor] = {
        name: tensor for name, tensor in parameters_of(module).items() if not tensor.requires_grad
    }
    persistent, named = persistent_names(module), buffers_of(module)
    for name in map(uncompiled, buffers):
        if name not in named or name not in persistent:
            raise SpecError(
                f"task: base_buffers: the model has no persistent buffer {name}",
                remedy="return names of module.named_buffers()",
                field="task",
            )
        frozen[name] = named[name]
    return frozen | {name: named[name] for name in endless_buffers(module)}


def endless_buffers(module: nn.Module) -> list[str]:
    """Return the names of persistent floating-point buffers that have infinite values or NaN."""
    persistent = persistent_names(module)
    return [
        name
        for name, buffer in buffers_of(module).items()
        if name in persistent
        and buffer.is_floating_point()
        and not buffer.is_meta
        and not bool(buffer.isfinite().all())
    ]


class BaseGuard:
    """Detects changes of a base during training."""

    def __init__(
        self, module: nn.Module, buffers: Iterable[str], apart_from: Container[str] = ()
    ) -> None:
        # Libraries replace the integers of quantized layers with the same ones in another order.
        self._versions = [
            (name, tensor, tensor._version)
            for name, tensor in base_tensors(module, buffers).items()
            if tensor.is_floating_point() and not tensor.is_inference() and name not in apart_from
        ]

    def changed(self) -> Iterator[str]:
        """Yield the names of floating-point tensors that were changed in place."""
        return (name for name, tensor, version in self._versions if tensor._version != version)
