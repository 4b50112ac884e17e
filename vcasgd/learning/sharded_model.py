"""A model whose parameters, gradients, and optimizer are in several processes, by torch's FSDP2.

Each process has some rows of each parameter, a range of the vector for each. It gathers the
parameters of one block at a time, while that computes (Zhao et al. 2023, arXiv:2304.11277). The
model is built without values, and each process loads its part only.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from vcasgd.errors import SpecError, UserCodeError
from vcasgd.learning.base import buffers_of, persistent_names
from vcasgd.learning.local_model import LocalModel
from vcasgd.learning.local_moments import steps_as
from vcasgd.learning.optimizers import name_of, parts_of
from vcasgd.learning.training import build
from vcasgd.learning.vector import (
    Floats,
    MappedVector,
    gather_integers,
    gather_part,
    pieces_of,
)
from vcasgd.task.task import Task, user_code

#: Number of the parameter of ``mallopt`` with the least size of blocks that are mapped alone, and
#: its value.
_MMAP_THRESHOLD, _MAPPED_BLOCK = -3, 1 << 20
#: torch's type hints lack some of its names.
fsdp: Any = torch.distributed.fsdp

#: Bytes that a model which is built has in memory before they go to the machine's.
BUILT_BYTES = 64 << 20
_UNSHARDED = 'set parallel = "ddp"'


def is_sharded(task: Task) -> bool:
    """Return True if the processes of a worker have parts of a task's model.

    Raises :class:`SpecError` for a ``parallel`` that is unknown, or that the task can't have.
    """
    if task.parallel not in ("ddp", "fsdp"):
        raise SpecError(
            f"task: parallel is {task.parallel!r}", remedy='use "ddp" or "fsdp"', field="parallel"
        )
    if task.parallel == "fsdp" and task.mixed_precision == "fp16":
        raise _refused(
            "fp16: a process would know only of its own part whether gradients overflow",
            'set mixed_precision = "bf16"',
        )
    return task.parallel == "fsdp"


def _precision_of(module: nn.Module, task: Task) -> fsdp.MixedPrecisionPolicy:
    """Return the precision of gathered parameters.

    Autocast would keep copies of all in 16 bits until the backward pass. BatchNorm needs parameters
    of its statistics' precision.
    """
    normalizes = any(isinstance(layer, _BatchNorm) for layer in module.modules())
    if not task.mixed_precision or normalizes:
        return fsdp.MixedPrecisionPolicy()
    return fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class ShardedModel(LocalModel):
    """A model without values, and this process's part of it from :meth:`shard` on."""

    def __init__(self, task: Task, seed: int, device: torch.device | str) -> None:
        _return_large_blocks()
        self._is_new = True
        #: Lets the other processes do :meth:`read_own_part`, each with its own part.
        self.read_others: Callable[[MappedVector, int, MappedVector | None], None]
        self.read_others = lambda _out, _start, _origin: None
        super().__init__(task, seed, device)

    def _build(self) -> nn.Module:
        return build_empty(self._task, self._seed)

    def _placed(self, module: nn.Module) -> nn.Module:
        return module

    def shard(self, mesh: Any) -> None:
        """Have a part of the model in a process of ``mesh``: zeros, until values are loaded.

        Raises :class:`SpecError` and :class:`UserCodeError`.
        """
        module = self.module if self._is_new else self._build()
        self._is_new = False
        with user_code("shard"):
            self._task.shard(module, mesh)
            if not isinstance(module, fsdp.FSDPModule):
                policy = _precision_of(module, self._task)
                for block in [*blocks_of(module, self._task.fsdp_blocks), module]:
                    fsdp.fully_shard(block, mesh=mesh, mp_policy=policy)
        _check_placements(module)
        device = self._device
        # FSDP moves parameters, and leaves alone those without values.
        whole: Any = module
        whole._apply(
            lambda each: torch.zeros_like(each, device=device) if each.is_meta else each.to(device)
        )
        self._use(module)

    def initial(self) -> tuple[Floats, Tensor]:
        """Return the model before any training: float32 [floats] and int64 [integers]."""
        floats = MappedVector(self.layout.floats)
        with _mapped_parameters() as give_up:
            module = build(self._task, self._seed, "cpu")
            for start, piece in pieces_of(floats):
                gather_part(module, self.layout, start, piece)
                give_up()
            return floats, gather_integers(module, self.layout)

    def reshard(self) -> None:
        """Give up parts of others that a forward pass without a backward pass has left here."""
        for module in self.module.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()

    def _read(self, out: Floats, start: int, origin: Floats | None) -> None:
        assert isinstance(out, MappedVector)
        assert origin is None or isinstance(origin, MappedVector)
        self.read_others(out, start, origin)
        self.read_own_part(out, start, origin)

    def read_own_part(self, out: Floats, start: int, origin: Floats | None) -> None:
        """Copy what this process has of the vector from an element on into ``out``, float32 [n].

        With ``origin``, float32 [n], parameters are differences from it; it may be ``out``.
        """
        super()._read(out, start, origin)

    def checksum(self) -> float:
        """Return 0: processes have different parts."""
        return 0.0


def _return_large_blocks() -> None:
    """Let the C library give blocks back to the system as soon as they are freed.

    It would keep those of gathered parameters, and can't use them for others, because torch asks
    for aligned ones.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _MAPPED_BLOCK)


# -- building without values -----------------------------------------------------------------------


def build_empty(task: Task, seed: int) -> nn.Module:
    """Return the task's model on the CPU, with parameters on the ``meta`` device if possible.

    Buffers have their values. A model has the values of its parameters if it is built in a way that
    needs them, or if some of them are frozen, which no vector has. Raises :class:`UserCodeError`.
    """
    try:
        with _empty_parameters():
            module, other = build(task, seed, "cpu"), build(task, seed + 1, "cpu")
    except (UserCodeError, RuntimeError, NotImplementedError):
        module = None
    frozen = module and any(not each.requires_grad for each in module.parameters())
    if module is None or frozen or not _same_constants(module, other):
        with _mapped_parameters():
            return build(task, seed, "cpu")
    return module


@contextmanager
def _mapped_parameters() -> Iterator[Callable[[], None]]:
    """Let modules keep parameters in the machine's memory, whose pages this process doesn't keep.

    Yields a function that gives up those that it used last.
    """
    mapped: list[mmap.mmap] = []
    moved: Any = WeakTensorKeyDictionary()

    def give_up() -> None:
        for memory in mapped:
            # It isn't lost: others could map it.
            memory.madvise(mmap.MADV_DONTNEED)

    def moved_to_memory(parameter: nn.Parameter) -> nn.Parameter:
        data = parameter.detach()
        # Not a part of another tensor.
        whole = data.untyped_storage().nbytes() == data.nbytes > 0
        if whole and data.device.type == "cpu" and parameter not in moved:
            memory = mmap.mmap(-1, data.nbytes)
            mapped.append(memory)
            numbers = torch.frombuffer(memory, dtype=data.dtype, count=data.numel())
            parameter.data = numbers.as_strided(data.shape, data.stride()).copy_(data)
            moved[parameter] = True
        return parameter

    with _registered(moved_to_memory), _WatchedWrites(give_up):
        yield give_up


class _WatchedWrites(TorchDispatchMode):
    """Calls a function whenever operations have had :data:`BUILT_BYTES` of results."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._call, self._bytes = call, 0

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self._bytes += result.nbytes
            if self._bytes > BUILT_BYTES:
                self._bytes = 0
                self._call()
        return result


@contextmanager
def _registered(convert: Callable[[nn.Parameter], nn.Parameter]) -> Iterator[None]:
    """Let modules keep what ``convert`` returns for each parameter, as it is made."""
    modules: Any = nn.Module
    register = modules.register_parameter

    def register_converted(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter if parameter is None else convert(parameter))

    modules.register_parameter = register_converted
    try:
        yield
    finally:
        modules.register_parameter = register


@contextmanager
def _empty_parameters() -> Iterator[None]:
    """Let modules keep parameters without values, one at a time as they are made."""
    # Tied parameters stay one.
    empty: Any = WeakTensorKeyDictionary()

    def emptied(parameter: nn.Parameter) -> nn.Parameter:
        if parameter.is_meta:
            return parameter
        if parameter not in empty:
            found = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            empty[parameter] = found
        made: nn.Parameter = empty[parameter]
        return made

    with _registered(emptied):
        yield


def _same_constants(module: nn.Module, other: nn.Module) -> bool:
    """Return True if buffers that no vector has are the same with another seed.

    Random numbers of the parameters come before those of a buffer, and they aren't drawn.
    """
    persistent, others = persistent_names(module), buffers_of(other)
    return all(
        name in others and torch.equal(each, others[name])
        for name, each in buffers_of(module).items()
        if name not in persistent
    )


# -- what is gathered together ---------------------------------------------------------------------


def blocks_of(module: nn.Module, names: Sequence[type[nn.Module] | str] = ()) -> list[nn.Module]:
    """Return the modules whose parameters are gathered together, inner ones first.

    They are those of the given types, or of the types with these names. Raises :class:`SpecError`
    for a type that no module has.
    """
    if not names:
        return _longest_row(module)
    found: list[nn.Module] = []
    for name in names:
        matching = [
            each
            for each in module.modules()
            if type(each).__name__ == name or (isinstance(name, type) and isinstance(each, name))
        ]
        if not matching:
            raise SpecError(
                f"task: fsdp_blocks: the model has no {getattr(name, '__name__', name)}",
                remedy=f"name types of its modules, such as {_some_type(module)}",
                field="fsdp_blocks",
            )
        found += matching
    wanted = {id(each) for each in found}
    return [each for each in reversed(list(module.modules())) if id(each) in wanted]


def _longest_row(module: nn.Module) -> list[nn.Module]:
    """Return the children of the list with the most parameters, of those with equal children."""
    rows = [
        list(each)
        for each in module.modules()
        if isinstance(each, nn.ModuleList | nn.Sequential) and len({*map(type, each)}) == 1
    ]
    return max((row for row in rows if len(row) > 1), key=_size, default=[])


def _size(row: Sequence[nn.Module]) -> int:
    return sum(each.numel() for block in row for each in block.parameters())


def _some_type(module: nn.Module) -> str:
    row = _longest_row(module) or [module]
    return type(row[0]).__name__


def _check_placements(module: nn.Module) -> None:
    """Raise :class:`SpecError` for a parameter that isn't one range of the vector in a process."""
    for name, each in module.named_parameters():
        placements = getattr(each, "placements", ())
        if len(placements) > 1 or any(one.is_shard() and one.dim != 0 for one in placements):
            raise _refused(
                f"{name}, which is sharded as {placements}",
                "shard it by its first dimension over the one mesh that Task.shard gets",
            )


# -- what can't be sharded -------------------------------------------------------------------------


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise :class:`SpecError` for an optimizer that may need more than a part of a tensor."""
    for part in parts_of(optimizer):
        if not steps_as(part, SGD, Adam, AdamW):
            raise _refused(
                f"{name_of(optimizer)}: it may need whole tensors, and a process has some rows",
                f"use SGD, Adam, or AdamW, or {_UNSHARDED}",
            )


def check_task(task: Task) -> None:
    """Raise :class:`SpecError` for a task whose steps can't be made in parts."""
    if task.makes_steps:
        raise _refused("a loop of its own", f"write the training as a vcasgd.Task, or {_UNSHARDED}")


def _refused(what: str, remedy: str) -> SpecError:
    return SpecError(
        f"task: a model in several parts can't be trained with {what}",
        remedy=remedy,
        field="task",
    )
