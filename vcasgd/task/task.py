"""``Task``: what a user writes. Plain PyTorch inside."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, default_collate

import vcasgd
from vcasgd.errors import TaskImportError, UserCodeError


class Task:
    """Model, data, loss and optimizer of a job.

    A worker constructs the task once with the job's ``args`` as keyword arguments and calls
    the methods below. Nothing here knows that the training is distributed.
    """

    #: samples in a local step
    batch_size: int = 64
    #: samples in a step of the evaluation, which needs no gradients
    evaluation_batch_size: int = 512
    #: the largest norm of all gradients together in a local step; larger ones are scaled down to it
    clip_norm: float | None = None

    def model(self) -> nn.Module:
        """A freshly initialised model. Called under the job's seed, so every call is alike."""
        raise NotImplementedError

    def dataset(self, split: str) -> Dataset[Any]:
        """The map-style data set of ``"train"`` or ``"validation"``.

        Its order must be the same on every machine: a sample is known by its index.
        """
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss of a batch, a scalar with gradient."""
        raise NotImplementedError

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """The local optimizer. A new one is made for every subtask, unless the job says
        ``optimizer_state: keep``."""
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def schedule(self, progress: float) -> float:  # noqa: ARG002 - constant unless overridden
        """The factor, at least 0, of the optimizer's learning rates in a local step.

        ``progress`` in [0, 1) is the share of the job's samples that come before the step's, in
        their order over all epochs; so it is the same whichever worker makes the step, and when.
        """
        return 1.0

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Sums over a batch, without gradients, and ``"count"``, by which they are divided.

        Return ``"accuracy"`` (the number of correct answers) if ``stop.accuracy`` is used.
        """
        raise NotImplementedError

    def collate(self, samples: list[Any]) -> Any:
        """A list of samples to a batch."""
        return default_collate(samples)


TaskFactory = Callable[[], Task]

#: where this process has loaded tasks from
_directories: set[Path] = set()


def load_task(entry: str, args: dict[str, Any], directory: Path) -> Task:
    """The task ``module:Class`` from a working directory, constructed with ``args``.

    Raises :class:`TaskImportError` with the user's traceback when the module can't be
    imported, has no such class, or the class refuses its arguments.
    """
    module_name, _, class_name = entry.partition(":")
    look_first_in(directory.resolve())
    try:
        found = getattr(importlib.import_module(module_name), class_name)
        task = found(**args)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: user code may raise anything
        raise TaskImportError(
            f"task: {entry} can't be loaded: {type(error).__name__}: {error}",
            field="task",
            traceback=user_traceback(error),
        ) from error
    if not isinstance(task, Task):
        raise TaskImportError(
            f"task: {entry} is a {type(task).__name__}, not a vcasgd.Task",
            remedy="let the class inherit from vcasgd.Task",
            field="task",
        )
    return task


def look_first_in(directory: Path) -> None:
    """Imports from ``directory`` first, and forgets what came from the directory of another
    task: each may have its own ``train.py`` and its own helpers."""
    others = _directories - {directory}
    forgotten = {name for name in sys.modules for other in others if _is_right_in(other, name)}
    for name in [name for name in sys.modules if name.partition(".")[0] in forgotten]:
        del sys.modules[name]
    sys.path[:] = [str(directory), *(path for path in sys.path if path != str(directory))]
    _directories.add(directory)
    importlib.invalidate_caches()


def _is_right_in(directory: Path, name: str) -> bool:
    """Whether a top-level module lies right in a directory; a virtual environment in it does
    not count, nor does this package when the directory is its own repository."""
    if "." in name or name == vcasgd.__name__:
        return False
    module, home = sys.modules[name], directory / name
    paths = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return f"{home}.py" in paths or str(home) in paths


def user_traceback(error: BaseException) -> str:
    """The traceback of an error in user code, without our own frames above it."""
    here = f"{Path(vcasgd.__file__).parent}{os.sep}"
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        frame_file = trace.tb_frame.f_code.co_filename
        if not frame_file.startswith((here, "<frozen ")) and "importlib" not in frame_file:
            break
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def calling_user_code(what: str, error: Exception) -> UserCodeError:
    """Wraps an exception that the user's code raised in ``what`` (a method of the task)."""
    return UserCodeError(
        f"{what} raised {type(error).__name__}: {error}", traceback=user_traceback(error)
    )
