"""A worker's model: the task's module, and its conversion to vectors and back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vcasgd.errors import MachineDiffers, SpecError, VcasgdError
from vcasgd.learning.base import BaseGuard, parameters_of
from vcasgd.learning.layout import Layout, TensorKind
from vcasgd.learning.training import build
from vcasgd.learning.vector import (
    gather,
    gather_difference,
    gather_integers,
    gather_part,
    new_vector,
    scatter,
    shift_part,
    unfrozen_parameters,
)
from vcasgd.task.task import Task, calling_user_code


class LocalModel:
    """The task's model on ``device``, built under the job's ``seed``.

    Raises :class:`~vcasgd.errors.UserCodeError` and :class:`SpecError`.
    """

    def __init__(self, task: Task, seed: int, device: torch.device | str) -> None:
        self._task, self._seed, self._device = task, seed, device
        module = build(task, seed, device)
        buffers = _base_buffers(task, module)
        # Before the model moves, because libraries quantize weights for the device then.
        self.layout = Layout.of(module, buffers)
        self.module = module.to(device)
        self._guard = BaseGuard(self.module, buffers)
        #: Number of vectors that were loaded.
        self.loads = 0

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters, in the order of the vector."""
        named = parameters_of(self.module)
        return [
            named[entry.name] for entry in self.layout.entries if entry.kind is TensorKind.PARAMETER
        ]

    def initial(self) -> tuple[Tensor, Tensor]:
        """Return the model before any training: float32 [floats] and int64 [integers]."""
        floats, integers = self._vectors()
        # A new model has a copy of the base in memory, so it is built only if necessary.
        module = self.module if not self.loads else build(self._task, self._seed, self._device)
        gather(module, self.layout, floats, integers)
        return floats, integers

    def load(self, floats: Tensor, integers: Tensor) -> None:
        """Load the vectors, float32 [floats] and int64 [integers], into the model."""
        self.loads += 1
        scatter(floats, integers, self.module, self.layout)

    def shift_part(self, floats: Tensor, start: int) -> None:
        """Add ``floats``, float32 [n], to the model's vector from an element on."""
        shift_part(floats, start, self.module, self.layout)

    def read_part(self, out: Tensor, start: int) -> None:
        """Copy the model's vector from an element on into ``out``, float32 [n]."""
        gather_part(self.module, self.layout, start, out)

    def read_integers(self) -> Tensor:
        """Return the model's counters, int64 [integers]. Raises as :meth:`check_base`."""
        self.check_base()
        return gather_integers(self.module, self.layout)

    def read(self) -> tuple[Tensor, Tensor]:
        """Return the model's state in new vectors, float32 [floats] and int64 [integers].

        Raises as :meth:`check_base`.
        """
        self.check_base()
        floats, integers = self._vectors()
        gather(self.module, self.layout, floats, integers)
        return floats, integers

    def read_into(self, out: Tensor, origin: Tensor | None) -> Tensor:
        """Copy the model's state into ``out``, float32 [floats]; return int64 [integers].

        With ``origin``, float32 [floats], parameters are differences from it; it may be ``out``
        itself. Raises as :meth:`check_base`.
        """
        self.check_base()
        integers = torch.empty(self.layout.integers, dtype=torch.int64)
        if origin is None:
            gather(self.module, self.layout, out, integers)
        else:
            gather_difference(self.module, self.layout, origin, out, integers)
        return integers

    def statistics(self) -> list[Tensor]:
        """Return the buffers that training changes and updates carry, such as running means."""
        kinds = {each.name: each.kind for each in self.layout.entries}
        named = self.module.named_buffers()
        return [tensor for name, tensor in named if kinds.get(name) is TensorKind.STATISTIC]

    def checksum(self) -> float:
        """Return a sum over all parameters, in float64."""
        sums = [each.detach().sum(dtype=torch.float64) for each in self.module.parameters()]
        return float(sum(sums, torch.zeros((), dtype=torch.float64, device=self._device)))

    def check_base(self) -> None:
        """Check that training left the base alone.

        Raises :class:`SpecError` if the base was changed.
        """
        for name in self._guard.changed():
            raise SpecError(
                f"task: {name} of the model is frozen, but training changes it",
                remedy="make it a buffer, or don't name it in base_buffers, so that updates "
                "carry it",
                field="task",
            )

    def check_frozen(self) -> None:
        """Raise :class:`SpecError` if parameters of the base are no longer frozen."""
        for name in unfrozen_parameters(self.module, self.layout):
            raise SpecError(
                f"task: {name} of the model was frozen when the job began and no longer is",
                remedy="let Task.model() set requires_grad for good",
                field="task",
            )

    def _vectors(self) -> tuple[Tensor, Tensor]:
        floats = new_vector(self.layout.floats)
        return floats, torch.empty(self.layout.integers, dtype=torch.int64)


def check_same(first: Layout, mine: Layout) -> None:
    """Raise :class:`MachineDiffers` if this machine's model differs from the ``first`` one's."""
    if first.has_frozen:
        raise SpecError(
            "task: the job began with a version of vcasgd that kept frozen parameters in the "
            "snapshots",
            remedy="submit it again",
            field="task",
        )
    name = mine.difference(first)
    if name is None:
        return
    if name in {tensor.name for tensor in mine.base} & {tensor.name for tensor in first.base}:
        raise MachineDiffers(
            f"task: {name} of the base model has other values on this machine than on the first "
            "one",
            remedy="load the base from a file, or name it as base in the job file",
            field="task",
        )
    raise MachineDiffers(
        "task: the model has other parameters on this machine than on the first one, "
        f"for example {name}",
        remedy="make Task.model independent of the machine",
        field="task",
    )


def _base_buffers(task: Task, module: nn.Module) -> list[str]:
    try:
        return list(task.base_buffers(module))
    except VcasgdError:
        raise
    except Exception as error:
        raise calling_user_code("base_buffers", error) from error
