"""Tasks that run a loop of their own, such as that of a script, driven batch by batch.

The loop runs in its own thread, and only while the trainer waits for it: it receives a batch,
computes, and submits the loss. A worker therefore trains it like any other task, and this module
contains nothing about leases, pushes, or evaluations.
"""

from __future__ import annotations

import copy
import logging
import runpy
import signal
import sqlite3
import sys
import threading
from abc import abstractmethod
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, default_collate

from vcasgd.errors import LoopEnded, SpecError, TaskImportError, UserCodeError, VcasgdError
from vcasgd.learning.beside import MAX_DEPTH, variables_of_callers
from vcasgd.learning.optimizers import saved
from vcasgd.learning.training_set import OwnBatches
from vcasgd.task.gradient_changes import find_changes, parsed, uses_clips
from vcasgd.task.loop_clips import Clip
from vcasgd.task.loop_code import code_of_loop, count_loops, loops_around, not_run
from vcasgd.task.place import Place
from vcasgd.task.task import Task, import_first_from, load_task, user_traceback

log = logging.getLogger(__name__)

#: Seconds for an ended script to clean up: close its files, finish its log.
EXIT_SECONDS = 5.0

#: Function that returns the sums over a batch, like :meth:`vcasgd.Task.evaluate`.
Evaluate = Callable[[nn.Module, Any], dict[str, Tensor]]


def load(entry: str, args: dict[str, Any], directory: Path) -> Task:
    """Load a job's ``task`` from a working directory: ``module:Class`` or the path of a script.

    A script starts at the first call of ``model``. Raises the errors of
    :func:`~vcasgd.task.task.load_task`.
    """
    if ":" in entry:
        return load_task(entry, args, directory)
    return ScriptTask(directory / entry, args)


def command_line(args: dict[str, Any]) -> list[str]:
    """Convert ``args`` to a command line: ``{depth: 20, amp: true}`` is ``--depth 20 --amp``.

    False and null are omitted; the elements of a list follow their name. Raises
    :class:`SpecError` for a mapping, which a command line can't express.
    """
    words: list[str] = []
    for name, value in args.items():
        if value is None or value is False:
            continue
        values = value if isinstance(value, list) else [] if value is True else [value]
        if any(isinstance(element, dict | list) for element in values):
            raise SpecError(
                f"args.{name}: a script's arguments are text, numbers, booleans, and lists of them",
                field=f"args.{name}",
            )
        words += [f"--{name}", *map(str, values)]
    return words


#: Place of ``check_same_thread`` among the arguments of ``sqlite3.connect``.
_THREAD = 4
_connect = sqlite3.connect


def _connect_for_threads(*args: Any, **options: Any) -> sqlite3.Connection:
    """Open a database that the worker's thread reads, and only while the loop waits for it."""
    options["check_same_thread"] = False
    if len(args) > _THREAD:
        args = (*args[:_THREAD], options.pop("check_same_thread"), *args[_THREAD + 1 :])
    connection: sqlite3.Connection = _connect(*args, **options)
    return connection


_handle = signal.signal


def _handle_in_main_thread(number: int, handler: Any) -> Any:
    """Register a handler of a signal, but not of a script: its worker has handlers of its own."""
    if threading.current_thread() is threading.main_thread():
        return _handle(number, handler)
    log.info("the handler of signal %d stays that of the worker", number)
    return signal.getsignal(number)


class LoopTask(Task):
    """Task that is configured by the calls of a script's session."""

    #: The loop has variables of its own.
    repeatable = False
    repeats_loss = False

    def __init__(self) -> None:
        self.network: nn.Module | None = None
        self.user_optimizer: Optimizer | None = None
        self.user_schedule: Callable[[float], float] | None = None
        self.user_weight: Callable[[Any], Any] | None = None
        #: Options that schedulers of torch set at a place of the job, if the loop has any.
        self.scheduled: Callable[[Place], Sequence[Mapping[str, Any]] | None] | None = None
        #: Returns what changes gradients as hooks of a trainer do; None if it has no such hooks.
        self.changes_of_hooks: Callable[[], Clip] | None = None
        #: Place of the present local step.
        self.place = Place(0.0)
        #: Passes over a loader, and steps, of a loop that runs on its own.
        self.passes = self.steps_on_its_own = 0
        self._evaluation: tuple[Evaluate, Dataset[Any]] | None = None
        self._dataset: Dataset[Any] | None = None
        self._sampler: Any = None
        #: True if the present batch doesn't follow the previous one in the order of an epoch.
        self.starts_sequence = True
        self._collate: Callable[[list[Any]], Any] = default_collate
        #: That of the evaluation's loader; None for the one of training.
        self._evaluation_collate: Callable[[list[Any]], Any] | None = None
        #: Most samples of a micro-batch, and the most micro-batches of a step; None if each step
        #: has one batch.
        self._accumulation: tuple[int, int] | None = None

    def set_model(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.network = model
        self.user_optimizer = optimizer

    def set_data(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        collate: Callable[[list[Any]], Any],
        sampler: Any = None,
    ) -> None:
        self._dataset, self._sampler = dataset, sampler
        self.batch_size = batch_size
        self._collate = collate

    def accumulate(self, steps: int) -> None:
        """Make each step with the gradients of ``steps`` batches of the present size."""
        if steps > 1:
            self._accumulation = self.batch_size, steps
            self.batch_size *= steps
            self.batches_per_step = steps

    def set_evaluation(
        self,
        function: Evaluate,
        dataset: Dataset[Any],
        batch_size: int,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self._evaluation = function, dataset
        self.evaluation_batch_size, self._evaluation_collate = batch_size, collate

    @property
    def has_evaluation(self) -> bool:
        return self._evaluation is not None

    def dataset(self, split: str) -> Dataset[Any]:
        if split == "train":
            assert self._dataset is not None, "the loop has started"
            return self._dataset
        return self.evaluation[1]

    def sampler(self, dataset: Dataset[Any]) -> Any:  # noqa: ARG002 - It was given with its sampler.
        return self._sampler

    def start_sequence(self, model: nn.Module) -> None:  # noqa: ARG002 - The loop resets it.
        self.starts_sequence = True

    def schedule(self, progress: float) -> float:
        return 1.0 if self.user_schedule is None else self.user_schedule(progress)

    def step_options(self, place: Place) -> Sequence[Mapping[str, Any]] | None:
        self.place = place
        return self.scheduled(place) if self.scheduled else None

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return self.evaluation[0](model, batch)

    def collate(self, samples: list[Any]) -> Any:
        """Return a batch, or after :meth:`accumulate` a list of micro-batches with their shares of
        the samples; see :func:`vcasgd.learning.training.micro_batches`."""
        # Evaluations compute no gradients. Processes that load their batches inherit this.
        if not torch.is_grad_enabled():
            # Samples that are batches are those of the training only.
            usual = default_collate if isinstance(self._collate, OwnBatches) else self._collate
            return (self._evaluation_collate or usual)(samples)
        if self._accumulation is None:
            return self._collate(samples)
        size, most = self._accumulation
        count = max(1, min(most, -(-len(samples) // size), len(samples) // 2))
        cuts = [len(samples) * part // count for part in range(count + 1)]
        parts: list[tuple[Any, float]] = [
            (self._collate(samples[at:stop]), stop - at) for at, stop in pairwise(cuts)
        ]
        if self.user_weight is not None:
            weights = ((batch, float(self.user_weight(batch))) for batch, _ in parts)
            parts = [(batch, weight) for batch, weight in weights if weight]
        total = sum(weight for _, weight in parts)
        return [(batch, weight / total) for batch, weight in parts]

    def batch_weight(self, batch: Any) -> float | None:
        if self.user_weight is None:
            return None
        if self._accumulation is None:
            return float(self.user_weight(batch))
        return sum(float(self.user_weight(part)) for part, _ in batch)

    @property
    def evaluation(self) -> tuple[Evaluate, Dataset[Any]]:
        """Evaluation and its data. Raises :class:`SpecError` if none is set."""
        if self._evaluation is None:
            raise SpecError(
                "task: the session has no evaluation",
                remedy="decorate a function with @session.evaluation(dataset) before the loop",
                field="task",
            )
        return self._evaluation


def _copy(model: nn.Module) -> nn.Module:
    """Return a copy that shares frozen parameters, which can be most of a model, and what layers
    have computed, which can't be copied."""
    shared: list[Tensor] = [each for each in model.parameters() if not each.requires_grad]
    for module in model.modules():
        shared += _computed(vars(module))
    return copy.deepcopy(model, {id(each): each for each in shared})


def _computed(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Mapping | list | tuple) and depth < MAX_DEPTH:
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _computed(each, depth + 1)
    elif isinstance(value, Tensor) and not value.is_leaf:
        yield value


class JobEnded(BaseException):
    """Ends a loop on a worker at its present batch. ``except Exception`` doesn't catch it."""


@dataclass(frozen=True)
class _Ended:
    error: BaseException | None


#: Message of the loop: it is ready for its first batch.
_READY = object()
#: Message to the loop: the job has no more batches.
_END = object()

_running: ContextVar[LoopInThread | None] = ContextVar("vcasgd_script", default=None)


def running_script() -> LoopInThread | None:
    """Return the task whose loop this thread runs for a worker, or None if it runs on its own."""
    return _running.get()


class LoopInThread(LoopTask):
    """Task whose loop, :meth:`run_loop`, runs in a thread. It trains one model, for one learner.

    Methods that need the loop raise :class:`TaskImportError` if it doesn't reach its first batch,
    :class:`UserCodeError` once it has failed, and :class:`LoopEnded` once it has ended.
    """

    #: What the loop is called in messages, and the folder of its code.
    name, folder = "the loop", Path()
    #: File, line, and call of the first code that the job doesn't run; empty if it runs all.
    not_run = ""

    def __init__(self) -> None:
        super().__init__()
        self._thread: threading.Thread | None = None
        #: Model when the loop started, and what gives the optimizer its state of then again.
        self._first: nn.Module | None = None
        self._reset: Callable[[], None] = lambda: None
        #: Variables of the script, by name.
        self._variables: dict[str, Callable[[], Any]] = {}
        self._to_loop: SimpleQueue[Any] = SimpleQueue()
        self._to_worker: SimpleQueue[Any] = SimpleQueue()
        self._steps = 0
        #: Why the loop has ended.
        self._end: VcasgdError | None = None
        #: The batch that the worker gave last.
        self.batch: Any = None
        #: Submits the step that the worker waits for, if the loop is left after it.
        self.finish: Callable[[], None] = lambda: None

    @abstractmethod
    def run_loop(self) -> None:
        """Run the loop until it ends by itself or the job does."""

    # -- the worker's side ---------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """True if the loop was started and has ended, so the task must be loaded again."""
        return self._thread is not None and not self._thread.is_alive()

    def model(self) -> nn.Module:
        """Return the loop's model.

        The first call runs the loop up to its first batch. Later calls return a copy of the
        model at that time.
        """
        if self._thread is None:
            self._start()
            assert self.network is not None
            return self.network
        assert self._first is not None, "the loop has started"
        return _copy(self._first)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:  # noqa: ARG002 - The loop's optimizer has them.
        assert self.user_optimizer is not None, "the loop has started"
        self._reset()
        return self.user_optimizer

    def source(self) -> str:
        """Return the code of the loop; empty for a loop of another library."""
        return ""

    def variables(self) -> dict[str, Callable[[], Any]]:
        return self._variables

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Resume the loop from its last step to the next one, and return the loss."""
        if model is not self.network:
            raise UserCodeError(f"{self.name} trains one model, and this is a different one")
        if self.ended:
            # Code may have looked at what a batch does, although that failed.
            raise self._end or self._end_error(None)
        self._to_loop.put(batch)
        loss: Tensor = self._receive(self._end_error)
        return loss

    def close(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            return
        self._to_loop.put(_END)
        self._thread.join(EXIT_SECONDS)
        if self._thread.is_alive():
            log.warning("%s is still running although the job has ended", self.name)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="script", daemon=True)
        self._thread.start()
        self._receive(self._start_error)

    def _receive(self, to_error: Callable[[BaseException | None], VcasgdError]) -> Any:
        # Without a timeout: a worker that makes no step loses its leases.
        message = self._to_worker.get()
        if not isinstance(message, _Ended):
            return message
        assert self._thread is not None
        self._thread.join(EXIT_SECONDS)
        error = message.error
        if isinstance(error, VcasgdError):
            self._end = error
            raise error
        self._end = to_error(error)
        raise self._end from error

    def _start_error(self, error: BaseException | None) -> VcasgdError:
        if error is None:
            return TaskImportError(
                f"task: {self.name} ended without a batch of a vcasgd.Session",
                remedy="train in a loop: for batch in session.batches(dataset), or over "
                "session.loader(dataset); of a Trainer, name a TrainerTask or a ModuleTask as task",
                field="task",
            )
        if refused := _refused_arguments(error):
            return TaskImportError(
                f"args: {self.name}: {refused}",
                remedy="write the option --lr 0.1 as args: {lr: 0.1}",
                field="args",
            )
        return TaskImportError(
            f"task: {self.name} can't be run: {type(error).__name__}: {error}",
            remedy="vcasgd logs has what it printed" if isinstance(error, SystemExit) else None,
            field="task",
            traceback=user_traceback(error),
        )

    def _end_error(self, error: BaseException | None) -> VcasgdError:
        if error is None and not self._steps:
            return UserCodeError(
                f"{self.name} left the loop over its batches without training one",
                remedy="make a step for each batch",
            )
        if error is None:
            return LoopEnded(
                f"{self.name} left the loop over its batches in epoch {self.place.epoch + 1}"
            )
        return UserCodeError(
            f"{self.name} raised {type(error).__name__}: {error}",
            traceback=user_traceback(error),
        )

    # -- the loop's side -----------------------------------------------------------------------

    @property
    def started(self) -> bool:
        """True once the loop has asked for its first batch."""
        return self._first is not None

    def start(self) -> None:
        """Wait for the first batch. Raises :class:`JobEnded`."""
        # Checked early: without an evaluation, no epoch of a job can end.
        self.check_evaluation()
        assert self.network is not None, "a session has started"
        assert self.user_optimizer is not None, "a session has started"
        self._first = _copy(self.network)
        self._reset = saved(self.user_optimizer)
        self._send(_READY)

    def check_evaluation(self) -> None:
        _ = self.evaluation

    def submit(self, loss: Tensor) -> None:
        """Submit the loss of a step, and wait for the next batch. Raises :class:`JobEnded`."""
        self._steps += 1
        self.starts_sequence = False
        self._send(loss)

    def _send(self, message: Any) -> None:
        self._to_worker.put(message)
        self.batch = self._to_loop.get()
        if self.batch is _END:
            raise JobEnded

    def _run(self) -> None:
        _running.set(self)
        error: BaseException | None = None
        try:
            self._run_to_end()
            self.finish()
        except JobEnded:
            return
        except BaseException as raised:  # noqa: BLE001 - User code may raise anything, even SystemExit.
            error = raised
        self._to_worker.put(_Ended(error))

    def _run_to_end(self) -> None:
        try:
            self.run_loop()
        except SystemExit as left:
            # Scripts end with sys.exit(main()).
            if left.code:
                raise


def _refused_arguments(error: BaseException) -> str:
    """Return what :mod:`argparse` printed if it has ended a script; else an empty text."""
    frames = (frame for frame, _ in walk_tb(error.__traceback__))
    called = (each.f_locals for each in frames if each.f_code is ArgumentParser.error.__code__)
    return next((str(each["message"]) for each in called), "")


class ScriptTask(LoopInThread):
    """Task that runs the script at ``path``."""

    def __init__(self, path: Path, args: dict[str, Any]) -> None:
        super().__init__()
        self._path, self.name, self.folder = path, path.name, path.parent.resolve()
        self._arguments = command_line(args)
        self._source = ""
        #: Loops that the script ran when it made its session.
        self._outer_loops = 0

    def set_model(self, model: nn.Module, optimizer: Optimizer) -> None:
        if self.network is not None:
            raise UserCodeError(
                f"{self.name} created a second vcasgd.Session",
                remedy="a job trains one model: put several networks into one module",
            )
        self._outer_loops = count_loops(sys._getframe(), self.folder)
        super().set_model(model, optimizer)

    def _start(self) -> None:
        # As Python does for a script.
        import_first_from(self._path.parent.resolve())
        super()._start()

    def source(self) -> str:
        return self._source

    def start(self) -> None:
        self.check_evaluation()
        self._variables = variables_of_callers(self.evaluation[0])
        self._source = code_of_loop(sys._getframe())
        self.loops = loops_around(sys._getframe(), self.folder)
        self.not_run = not_run(sys._getframe(), self.folder, self._outer_loops)
        tree = parsed(self._source)
        self.clips_itself = uses_clips(tree) or bool(find_changes(tree))
        super().start()

    def run_loop(self) -> None:
        # From here on, the process belongs to the script.
        sys.argv = [str(self._path), *self._arguments]
        sqlite3.connect = _connect_for_threads  # type: ignore[assignment]
        signal.signal = _handle_in_main_thread  # type: ignore[assignment]
        runpy.run_path(str(self._path), run_name="__main__")
