"""Base class of a user's task, written in plain PyTorch, its loader, and the path of its base."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from operator import getitem
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, default_collate

import vcasgd
from vcasgd.errors import SpecError, TaskImportError, UserCodeError, VcasgdError
from vcasgd.spec.job import JobSpec
from vcasgd.task.loop_clips import LoopClips
from vcasgd.task.place import Place


class Task:
    """Model, data, loss, and optimizer of a job.

    A worker constructs the task once with the job's ``args`` as keyword arguments and calls
    the methods below. A task contains nothing about distributed training.
    """

    #: Samples in a local step.
    batch_size: int = 64
    #: Least samples of a worker's part of a batch, for a loss or a model that depends on the other
    #: samples of its batch. None: 16 if the model has BatchNorm, otherwise 2.
    min_local_batch: int | None = None
    #: Samples in an evaluation step, which needs no gradients.
    evaluation_batch_size: int = 512
    #: Micro-batches of a local step, whose gradients are accumulated. Each has about
    #: ``batch_size / gradient_accumulation_steps`` samples, so a step needs less memory.
    gradient_accumulation_steps: int = 1
    #: Type that :meth:`loss` and :meth:`evaluate` compute in where it is safe: ``"bf16"``,
    #: ``"fp16"`` with a scaler of gradients, or None for that of the model.
    mixed_precision: str | None = None
    #: Processes that load batches, as ``num_workers`` of a ``DataLoader``. With 0, the worker does.
    loader_workers: int = 0
    #: Batches that each of them loads ahead.
    prefetch_factor: int = 2
    #: True if they put batches into pinned memory for a GPU.
    pin_memory: bool = True
    #: Function that each of them calls first, with its number.
    worker_init_fn: Callable[[int], None] | None = None
    #: What the processes of a worker with several share (``workers.gpus``): ``"ddp"``, each has the
    #: whole model, or ``"fsdp"``, each has a part of parameters, gradients, and optimizer.
    parallel: str = "ddp"
    #: Types of the modules, or their names, that ``"fsdp"`` gathers one at a time. By default,
    #: those in the list of equal modules that has the most parameters.
    fsdp_blocks: Sequence[type[nn.Module] | str] = ()
    #: Largest norm of all gradients together in a local step; larger ones are scaled down to it.
    clip_norm: float | None = None
    #: Floating-point operations of the model for one training sample, forward and backward, from
    #: which workers report how much of a GPU's peak they use. They don't affect training.
    flops_per_sample: float | None = None
    #: Batches of a batch sampler in a local step.
    batches_per_step: int = 1
    #: True if :meth:`loss` also makes the optimizer's step, as the loop of a script can do.
    makes_steps: bool = False
    #: Code of the loops that train, the innermost first, and of statements between epochs that have
    #: the job's count of them.
    loops: Sequence[str] = ()
    repeated_code: Sequence[str] = ()
    #: True if the code has never had a last batch of another size, because a loader drops it.
    drops_last: bool = False
    #: True if the job skips bad samples; ``on_bad_sample`` in the job file sets it.
    skips_bad_samples: bool = False
    #: True if the loop may set rates itself, as a function of the job's step. They stay until the
    #: schedule changes.
    sets_rates: bool = False
    #: Factor of ``clip_norm`` in the present local step, for a loop that clips itself: the gradient
    #: of a part of the job's batch has more noise, so it is longer.
    clip_factor: float = 1.0
    #: Factor of the loss in the present local step: that of a part of the job's batch is smaller if
    #: it is a sum over samples.
    loss_factor: float = 1.0
    #: True if the loop clips gradients itself.
    clips_itself: bool = False
    #: Records the loop's clipping, to repeat it on the mean gradient of the whole batch; or None.
    loop_clips: LoopClips | None = None
    #: Names of hooks and callbacks that run with a worker's own steps.
    hooks: Sequence[str] = ()
    #: Names of those that run again with the mean gradient of the whole batch.
    gradient_hooks: Sequence[str] = ()
    #: True if training depends on nothing but the model, the batches, the optimizer, and torch's
    #: random numbers, so that another worker can repeat a push interval.
    repeatable: bool = True

    #: True if :meth:`loss` can be called again for the same batch, as some optimizers need it.
    repeats_loss: bool = True

    #: How versions merge what workers' buffers become, by name or by a pattern such as
    #: ``"*.queue"``: ``mean`` by samples, ``sum`` of what is added, ``max``, ``min``, ``latest``,
    #: or ``constant``. The first batches of a job show it for others.
    buffers: Mapping[str, str] = MappingProxyType({})

    def model(self) -> nn.Module:
        """Return a newly initialized model.

        It is called under the job's seed, so each call returns the same values. Parameters
        without ``requires_grad`` are its base: every worker builds or loads the same values, and
        updates and snapshots don't contain them.
        """
        raise NotImplementedError("the task has to define it")

    def shard(self, model: nn.Module, mesh: Any) -> None:
        """Call ``fully_shard`` of ``torch.distributed.fsdp`` for parts of the model and for itself.

        ``mesh`` is that of the worker's processes. A model that is left alone is sharded by
        :attr:`fsdp_blocks`. Called in each process if :attr:`parallel` is ``"fsdp"``; parameters
        can be on the ``meta`` device.
        """

    def base_buffers(self, model: nn.Module) -> Iterable[str]:  # noqa: ARG002 - none by default
        """Return the names of persistent buffers that are part of the base, too.

        Training must not change them. Name those of quantized layers, for example. All other
        persistent buffers travel with the model.
        """
        return ()

    def dataset(self, split: str) -> Dataset[Any]:
        """Return the data set of the split ``"train"`` or ``"validation"``.

        Its order must be the same on every machine, because an index identifies a sample. Of data
        that can only be iterated over, a sample is an offset in a shard. ``set_epoch`` of the data
        set, if it has one, is called with the epoch, counted from 0, of the next samples.
        """
        raise NotImplementedError("the task has to define it")

    def sampler(self, dataset: Dataset[Any]) -> Iterable[Any] | None:  # noqa: ARG002 - shuffled by default
        """Return a sampler of the training set, as for a ``DataLoader``; None shuffles all samples.

        It yields indices, or lists of them as a batch sampler does. An epoch is one pass over it,
        drawn under a seed of the job and the epoch, so all machines have the same draws.
        ``range(len(dataset))`` keeps the order of the data set.
        """
        return None

    def start_sequence(self, model: nn.Module) -> None:
        """Reset what the model carries from batch to batch, such as a hidden state.

        It is called before each batch that doesn't follow the previous one in the order of an
        epoch: usually the first one of a subtask.
        """

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss of a batch or micro-batch, a scalar with gradient."""
        raise NotImplementedError("the task has to define it")

    def batch_weight(self, batch: Any) -> float | Tensor | None:  # noqa: ARG002 - samples by default
        """Return how many numbers the loss of a batch or micro-batch is the mean of.

        For example, the number of labels that count. A batch of weight 0 is skipped. None: the
        number of its samples. The batch is that of :meth:`collate`, on the CPU.
        """
        return None

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer | Sequence[Optimizer]:
        """Return the local optimizer, or several in a list, for different parameters.

        It is called once in a worker whose job keeps the optimizer's state, as with the rule
        ``rounds``, and otherwise for each subtask.
        """
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def schedule(self, progress: float) -> float:  # noqa: ARG002 - constant unless overridden
        """Return the factor, at least 0, for the optimizer's learning rates in a local step.

        ``progress`` in [0, 1) is the share of the job's samples that precede those of the step in
        the order over all epochs. It doesn't depend on which worker makes the step, or when.
        """
        return 1.0

    def follow_job(self, spec: JobSpec) -> None:
        """Read what the task needs to know of its job. Called before :meth:`model`."""

    def step_options(self, place: Place) -> Sequence[Mapping[str, Any]] | None:  # noqa: ARG002 - none by default
        """Return the options that schedulers set for each group of the optimizer in a local step.

        Called before each local step. A rate among them is multiplied by the factor of
        :meth:`schedule`. None if no scheduler sets any.
        """
        return None

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return sums over a batch, without gradients, and their divisor ``"count"``.

        Each value is a scalar tensor. If the job uses ``stop.accuracy``, include ``"accuracy"``,
        the number of correct answers.
        """
        raise NotImplementedError("the task has to define it")

    def evaluate_set(
        self,
        model: nn.Module,  # noqa: ARG002 - see evaluate
        batches: Iterable[Any],  # noqa: ARG002
    ) -> Mapping[str, float] | None:
        """Return the metrics of the whole validation split, from its batches on the model's device.

        None, the default, if :meth:`evaluate` returns sums over each batch instead.
        """
        return None

    def end_after(self, metrics: Sequence[Mapping[str, float]]) -> str | None:  # noqa: ARG002 - see the job file
        """Return why the job should end after evaluations with these metrics, in their order.

        None if it should go on.
        """
        return None

    def collate(self, samples: list[Any]) -> Any:
        """Combine a list of samples into a batch."""
        return default_collate(samples)

    def source(self) -> str:
        """Return the code of the task's class, without that of its base classes."""
        return source_of([self])

    def loop_code(self) -> tuple[str, Container[str]]:
        """Return the code of the loop that makes the steps, and the classes of it that train, if
        not all of the code does."""
        return self.source(), ()

    def variables(self) -> dict[str, Callable[[], Any]]:
        """Return what may have tensors beside the model, by name: the task's attributes.

        Those of a task that vcasgd makes of another library's objects are the library's.
        """
        if type(self).__module__.partition(".")[0] == vcasgd.__name__:
            return {}
        return {name: partial(getitem, vars(self), name) for name in vars(self)}

    def use_loader_settings(self, loader: DataLoader[Any]) -> None:
        """Load batches with the processes that a ``DataLoader`` would use."""
        self.drops_last = getattr(loader.batch_sampler, "drop_last", False)
        self.loader_workers = loader.num_workers
        self.prefetch_factor = loader.prefetch_factor or self.prefetch_factor
        self.pin_memory = loader.pin_memory or self.pin_memory
        self.worker_init_fn = loader.worker_init_fn


def source_of(objects: Iterable[object]) -> str:
    """Return the code of the classes of objects, without that of libraries."""
    found = []
    for each in objects:
        if is_own(each):
            with suppress(OSError, TypeError):
                found.append(inspect.getsource(type(each)))
    return "\n".join(found)


def variables_of(objects: Iterable[object]) -> dict[str, Callable[[], Any]]:
    """Return functions that return the objects, by the names of their classes, the second one of
    a class with a 2."""
    found: dict[str, Callable[[], Any]] = {}
    count: Counter[str] = Counter()
    for each in objects:
        name = type(each).__name__
        count[name] += 1
        number = count[name] if count[name] > 1 else ""
        found[f"{name}{number}"] = partial(_itself, each)
    return found


def _itself(value: object) -> object:
    return value


#: Libraries whose objects have no state or code of the user's.
_LIBRARIES = ("torch", "vcasgd", "builtins", "lightning", "pytorch_lightning", "transformers")


def is_own(value: object) -> bool:
    """Return True for an object with attributes whose class isn't one of a library, nor a metric,
    whose numbers are those of a worker."""
    own, *bases = (each.__module__.partition(".")[0] for each in type(value).__mro__)
    is_metric = "torchmetrics" in (own, *bases)
    return hasattr(value, "__dict__") and own not in _LIBRARIES and not is_metric


#: Folders from which this process has loaded tasks.
_directories: set[Path] = set()


def load_task(entry: str, args: dict[str, Any], directory: Path) -> Task:
    """Import the task ``module:Class`` from a working directory and construct it with ``args``.

    Raises :class:`TaskImportError` with the user's traceback if the module can't be imported or
    doesn't have the class, or the class raises or isn't a task.
    """
    module_name, _, class_name = entry.partition(":")
    import_first_from(directory.resolve())
    try:
        factory = getattr(importlib.import_module(module_name), class_name)
        task = factory(**args)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # User code may raise anything, even SystemExit.
        raise TaskImportError(
            f"task: {entry} can't be loaded: {type(error).__name__}: {error}",
            field="task",
            traceback=user_traceback(error),
        ) from error
    if not isinstance(task, Task):
        raise TaskImportError(
            f"task: {entry} is a {type(task).__name__}, not a vcasgd.Task",
            remedy="make the class inherit from vcasgd.Task",
            field="task",
        )
    return task


def import_first_from(directory: Path) -> None:
    """Import from ``directory`` first, and unload the modules of other tasks' directories.

    Each task may have its own ``train.py`` and its own helpers.
    """
    others = _directories - {directory}
    unloaded = {name for name in sys.modules for other in others if _is_directly_in(other, name)}
    for name in [name for name in sys.modules if name.partition(".")[0] in unloaded]:
        del sys.modules[name]
    sys.path[:] = [str(directory), *(path for path in sys.path if path != str(directory))]
    _directories.add(directory)
    importlib.invalidate_caches()


def _is_directly_in(directory: Path, name: str) -> bool:
    """Return True if a top-level module lies directly in a directory.

    Modules of a virtual environment in it don't count, nor does this package if the directory is
    its own repository.
    """
    if "." in name or name == vcasgd.__name__:
        return False
    module, home = sys.modules[name], directory / name
    paths = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return f"{home}.py" in paths or str(home) in paths


def user_traceback(error: BaseException) -> str:
    """Format the traceback of an error in user code, without our frames above it."""
    here = f"{Path(vcasgd.__file__).parent}{os.sep}"
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        frame_file = trace.tb_frame.f_code.co_filename
        if not frame_file.startswith((here, "<frozen ")) and "importlib" not in frame_file:
            break
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def calling_user_code(what: str, error: Exception) -> UserCodeError:
    """Wrap an exception that the user's code raised in ``what``, a method of the task."""
    # Some exceptions have no text, such as NotImplementedError.
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    return UserCodeError(f"{what} raised {text}", traceback=user_traceback(error))


@contextmanager
def user_code(name: str) -> Iterator[None]:
    """Convert exceptions of the user's code to :class:`UserCodeError` with their traceback."""
    try:
        yield
    except VcasgdError:
        raise
    except Exception as error:
        raise calling_user_code(name, error) from error


#: The job's base on this machine.
_base_path: Path | None = None


def use_base(path: Path | None) -> None:
    """Set the base of the job that this process works for; None if it has none."""
    global _base_path
    _base_path = path


def base_path() -> Path | None:
    """Return what :func:`use_base` set."""
    return _base_path


def base(default: str | Path | None = None) -> Path:
    """Return the file or folder that ``base`` in the job file names, on this machine.

    Its digest is verified. Outside a job, and in a job without a base, this is ``default``. Raises
    :class:`SpecError` if there is neither.
    """
    if _base_path is not None:
        return _base_path
    if default is None:
        raise SpecError(
            "base: there is none",
            remedy="name its location and sha256 under base in the job file",
            field="base",
        )
    return Path(default)
