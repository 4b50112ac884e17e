"""A worker's model: the task's module, and its conversion to vectors and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vcasgd.errors import MachineDiffers, SpecError
from vcasgd.learning.base import (
    BaseGuard,
    as_real,
    buffers_of,
    endless_buffers,
    parameters_of,
    persistent_names,
)
from vcasgd.learning.beside import Beside, StateSearch, WholeState
from vcasgd.learning.buffers import declared_buffers, unexplained_buffers
from vcasgd.learning.layout import BESIDE, FLOATS, Layout, TensorKind, is_double
from vcasgd.learning.training import batch_size_of, build
from vcasgd.learning.vector import (
    Floats,
    exact_parameters,
    gather,
    gather_integers,
    gather_part,
    new_vector,
    scatter,
    scatter_integers,
    scatter_part,
    shift_part,
    unfrozen_parameters,
)
from vcasgd.task.task import Task


class LocalModel:
    """The task's model on ``device``, built under the job's ``seed``.

    Raises :class:`~vcasgd.errors.UserCodeError` and :class:`SpecError`.
    """

    def __init__(self, task: Task, seed: int, device: torch.device | str) -> None:
        self._task, self._seed, self._device = task, seed, device
        module = self._build()
        self._buffers, self._kinds = declared_buffers(task, module)
        # Before the model moves, because libraries quantize weights for the device then.
        self.layout = Layout.of(module, self._buffers, kinds=self._kinds)
        self._endless = endless_buffers(module)
        self._use(self._placed(module))
        #: Names of frozen parameters and tensors beside the model that travel, and True if they are
        #: trained; and the vectors before any training if there are some.
        self._carried: dict[str, bool] = {}
        #: Names of those that are neither trained nor copies of what is.
        self._changing: list[str] = []
        self._first: tuple[Tensor, Tensor] | None = None
        #: Number of vectors that were loaded.
        self.loads = 0
        #: Values that the version has for tensors in double precision, by name, after the update.
        self._starts: dict[str, Tensor] = {}

    def _build(self) -> nn.Module:
        return build(self._task, self._seed, self._device)

    def _placed(self, module: nn.Module) -> nn.Module:
        return module.to(self._device)

    def _use(self, module: nn.Module) -> None:
        self.module = module
        self._guard = BaseGuard(module, self._buffers)
        self._whole: nn.Module = module

    def doubles(self) -> tuple[str, ...]:
        """Return the names of tensors in double precision that travel as floats."""
        named: dict[str, Tensor] = {**parameters_of(self._whole), **buffers_of(self._whole)}
        floats = (each for each in self.layout.entries if each.kind in FLOATS)
        return tuple(each.name for each in floats if is_double(named[each.name]))

    @property
    def whole(self) -> nn.Module:
        """The model, with the tensors beside it that travel with it."""
        return self._whole

    @property
    def parameters(self) -> list[Tensor]:
        """The trained parameters, in the order of the vector."""
        named: dict[str, Tensor] = {**parameters_of(self._whole), **buffers_of(self._whole)}
        return [
            named[entry.name] for entry in self.layout.entries if entry.kind is TensorKind.PARAMETER
        ]

    def find_state(
        self,
        optimizer: Callable[[], Optimizer],
        probe: Callable[[], None],
        probe_part: Callable[[], None],
    ) -> None:
        """Find out which frozen parameters and tensors beside the model have to travel, too.

        ``optimizer()`` makes an optimizer, ``probe()`` some local steps, and ``probe_part()`` one
        with a part of a batch. The effect of steps is undone. All are called only if needed.
        """
        search = StateSearch(self._task, self.module, self.layout)
        if not search.options:
            return
        self._move(search.beside)
        carried = search.trained(optimizer())
        if search.is_unclear(carried):
            self._observe(search, probe)
            task = self._task
            counts = 1, task.batches_per_step, task.gradient_accumulation_steps
            if search.has_batches({batch_size_of(task) // count for count in counts}):
                self._observe(search, probe_part)
        moved = search.moved(carried)
        others = moved.keys() - search.copies(carried)
        self._changing = sorted(name for name in others if name.startswith(BESIDE))
        self._carry(carried | moved, search.beside)

    def _observe(self, search: StateSearch, probe: Callable[[], None]) -> None:
        with self.undone():
            search.note()
            probe()
            search.undo()

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Give the model its values again at the end, whatever local steps made of them."""
        layout = replace(self.layout, doubles=self.doubles())
        vectors = gather(self._whole, layout)
        known, named = persistent_names(self.module), buffers_of(self.module)
        others = {name: each.clone() for name, each in named.items() if name not in known}
        try:
            yield
        finally:
            scatter(*vectors, self._whole, layout)
            after = buffers_of(self.module)
            with torch.no_grad():
                for name in others.keys() & after.keys():
                    if after[name].shape == others[name].shape:
                        after[name].copy_(others[name])
            self.module.zero_grad(set_to_none=True)

    def find_buffers(self, find: Callable[[nn.Module, list[str]], dict[str, TensorKind]]) -> None:
        """Let ``find`` decide how buffers, and tensors beside the model, are merged that neither
        torch nor the task explains.

        It gets the model with the tensors beside it, and the names.
        """
        explained = {*self._kinds, *(t.name for t in self.layout.base)}
        names = [*unexplained_buffers(self.module, explained), *self._changing]
        if names and (found := find(self._whole, names)):
            self._use_kinds({**self._kinds, **found})

    def _use_kinds(self, kinds: dict[str, TensorKind]) -> None:
        self._kinds = kinds
        self.layout = Layout.of(self._whole, self._buffers, self._carried, kinds)
        if self._first is not None:
            self._note_first()

    def follow_state(self, first: Layout) -> None:
        """Let the same tensors travel as in the ``first`` worker's layout."""
        named = buffers_of(self.module)
        kinds = {each.name: each.kind for each in first.entries if each.name in named}
        if any(kinds.get(e.name, e.kind) is not e.kind for e in self.layout.entries):
            self._use_kinds({name: k for name, k in kinds.items() if k is not TensorKind.PARAMETER})
        plain = {entry.name for entry in self.layout.entries} - self._carried.keys()
        entries = [entry for entry in first.entries if entry.name not in plain]
        carried = {entry.name: entry.kind is TensorKind.PARAMETER for entry in entries}
        if carried != self._carried:
            beside = Beside(self._task.variables(), self.module)
            self._move(beside)
            self._kinds |= {each.name: each.kind for each in entries if each.kind not in FLOATS}
            self._carry(carried, beside)

    def _move(self, beside: Beside) -> None:
        for module in beside.modules:
            module.to(self._device)

    def _carry(self, carried: dict[str, bool], beside: Beside) -> None:
        if not carried:
            return
        beside.keep(carried)
        self._carried = carried
        self._whole = WholeState(self.module, beside) if beside else self.module
        self.layout = Layout.of(self._whole, self._buffers, carried, self._kinds)
        self._guard = BaseGuard(self.module, self._buffers, carried)
        self._note_first()

    def _note_first(self) -> None:
        self._first = gather(self._whole, replace(self.layout, doubles=self.doubles()))

    def initial(self) -> tuple[Floats, Tensor]:
        """Return the model before any training: float32 [floats] and int64 [integers]."""
        if self._first is not None:
            floats = new_vector(self.layout.floats)
            floats[: self.layout.state_floats] = self._first[0][: self.layout.state_floats]
            # Exact tensors are its end.
            return floats, self._first[1][: self.layout.integers].clone()
        # A new model has a copy of the base in memory, so it is built only if necessary.
        module = self.module if not self.loads else build(self._task, self._seed, self._device)
        return gather(module, self.layout)

    def load(self, floats: Floats, integers: Tensor) -> None:
        """Load the vectors, float32 [floats] and int64 [integers], into the model.

        Of a sharded model, those elements that this process has.
        """
        self.load_part(floats, 0)
        self.load_integers(integers)
        pairs = exact_parameters(self._whole, self.layout)
        self._starts = {entry.name: each.clone() for entry, each in pairs}

    def load_part(self, floats: Floats, start: int) -> None:
        """Load ``floats``, float32 [n], into the model's vector from an element on."""
        scatter_part(floats, start, self._whole, self.layout)

    def load_integers(self, integers: Tensor) -> None:
        """Load the model's counters, int64 [integers], after all parts."""
        self.loads += 1
        scatter_integers(integers, self._whole, self.layout)

    def shift_part(self, floats: Floats, start: int) -> None:
        """Add ``floats``, float32 [n], to the model's vector from an element on."""
        self._starts = {}
        shift_part(floats, start, self._whole, self.layout)

    def read_part(self, out: Floats, start: int) -> None:
        """Copy the model's vector from an element on into ``out``, float32 [n].

        Of a sharded model, the vector of all processes.
        """
        self._read(out, start, None)

    def _read(self, out: Floats, start: int, origin: Floats | None) -> None:
        gather_part(self._whole, self.layout, start, out, origin)

    def read_integers(self) -> Tensor:
        """Return the model's counters, int64 [integers]. Raises as :meth:`check_base`."""
        self.check_base()
        return gather_integers(self._whole, self.layout)

    def read(self) -> tuple[Tensor, Tensor]:
        """Return the model's state in new vectors, float32 [floats] and int64 [integers].

        Raises as :meth:`check_base`.
        """
        self.check_base()
        return gather(self._whole, self.layout)

    def read_into(self, out: Floats, origin: Floats | None) -> Tensor:
        """Copy the model's state into ``out``, float32 [floats]; return int64 [integers].

        With ``origin``, float32 [floats], parameters are differences from it; it may be ``out``
        itself. Raises as :meth:`check_base`.
        """
        self.check_base()
        self._read(out, 0, origin)
        if origin is not None:
            for entry, value in exact_parameters(self._whole, self.layout):
                if (start := self._starts.get(entry.name)) is not None:
                    part = entry.part_of(out)
                    part.copy_(value - start)
                    # What was rounded is in the next update.
                    start.add_(part.to(start))
        return gather_integers(self._whole, self.layout)

    def statistics(self) -> list[Tensor]:
        """Return the buffers that training changes and updates carry, such as running means."""
        kinds = {each.name: each.kind for each in self.layout.entries}
        named = self.module.named_buffers()
        return [tensor for name, tensor in named if kinds.get(name) is TensorKind.STATISTIC]

    def checksum(self) -> float:
        """Return a sum over all parameters, in float64."""
        sums = [as_real(each).sum(dtype=torch.float64) for each in self.module.parameters()]
        return float(sum(sums, torch.zeros((), dtype=torch.float64, device=self._device)))

    def check_base(self) -> None:
        """Check that training left the base alone.

        Raises :class:`SpecError` if the base was changed.
        """
        for name in self._guard.changed():
            if name in self._endless:
                raise SpecError(
                    f"task: {name} of the model starts with values that aren't finite, so it is a "
                    "constant, but training changes it",
                    remedy="start it with finite values",
                    field="task",
                )
            raise SpecError(
                f"task: {name} of the model is frozen, but training changes it",
                remedy="let the first steps change it, make it a buffer, or don't name it in "
                "base_buffers, so that updates carry it",
                field="task",
            )

    def check_frozen(self) -> None:
        """Raise :class:`SpecError` if parameters of the base are no longer frozen."""
        for name in unfrozen_parameters(self.module, self.layout):
            raise SpecError(
                f"task: {name} of the model was frozen when the job began and no longer is",
                remedy="pass it to the optimizer from the start, also while it is frozen; it then "
                "travels with the model",
                field="task",
            )


def check_same(first: Layout, mine: Layout) -> None:
    """Raise :class:`MachineDiffers` if this machine's model differs from the ``first`` one's."""
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
