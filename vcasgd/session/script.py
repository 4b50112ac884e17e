"""A script as a task: the user's own loop, driven batch by batch by whoever trains a task.

The script runs in a thread of its own, and only while it is waited for: it is given a batch, and
given back control of the model once it has handed in the loss (:class:`vcasgd.Session`). So a
worker trains it as it trains any task, and nothing that it knows of leases, pushes and
evaluations is known here.
"""

from __future__ import annotations

import copy
import logging
import runpy
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, default_collate

from vcasgd.errors import SpecError, TaskImportError, UserCodeError, VcasgdError
from vcasgd.task.task import Task, load_task, look_first_in, user_traceback

log = logging.getLogger(__name__)

#: a script that is over may do so much more: close its files, say good-bye to whoever it logs to
LAST_WORDS_SECONDS = 5.0

#: the sums of a batch, as :meth:`vcasgd.Task.evaluate` returns them
Evaluate = Callable[[nn.Module, Any], dict[str, Tensor]]


def load(entry: str, args: dict[str, Any], directory: Path) -> Task:
    """What a job's ``task`` names: ``module:Class`` or the path of a script, from a working
    directory.

    A script is run with the first call of ``model``. Raises as
    :func:`~vcasgd.task.task.load_task`.
    """
    if ":" in entry:
        return load_task(entry, args, directory)
    return ScriptTask(directory / entry, args)


def arguments_of(args: dict[str, Any]) -> list[str]:
    """A job's ``args`` as a command line: ``{depth: 20, amp: true}`` is ``--depth 20 --amp``.

    What is false or null is left out, of a list each element follows. Raises :class:`SpecError`
    for a mapping, which a command line can't carry.
    """
    words: list[str] = []
    for name, value in args.items():
        if value is None or value is False:
            continue
        values = value if isinstance(value, list) else [] if value is True else [value]
        if any(isinstance(each, dict | list) for each in values):
            raise SpecError(
                f"args.{name}: a script's arguments are text, numbers, booleans and lists of them",
                field=f"args.{name}",
            )
        words += [f"--{name}", *map(str, values)]
    return words


class LoopTask(Task):
    """What a script has told its session, as a task."""

    def __init__(self) -> None:
        self.network: nn.Module | None = None
        self.descends_by: Optimizer | None = None
        self.schedule_of: Callable[[float], float] | None = None
        self._judge: tuple[Evaluate, Dataset[Any]] | None = None
        self._dataset: Dataset[Any] | None = None
        self._collate: Callable[[list[Any]], Any] = default_collate

    def learns(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.network = model
        self.descends_by = optimizer

    def reads(
        self, dataset: Dataset[Any], batch_size: int, collate: Callable[[list[Any]], Any]
    ) -> None:
        self._dataset = dataset
        self.batch_size = batch_size
        self._collate = collate

    def is_judged(self, function: Evaluate, dataset: Dataset[Any], batch_size: int) -> None:
        self._judge = function, dataset
        self.evaluation_batch_size = batch_size

    @property
    def judged(self) -> bool:
        return self._judge is not None

    def dataset(self, split: str) -> Dataset[Any]:
        if split == "train":
            assert self._dataset is not None, "the loop has begun"
            return self._dataset
        return self.judge[1]

    def schedule(self, progress: float) -> float:
        return 1.0 if self.schedule_of is None else self.schedule_of(progress)

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return self.judge[0](model, batch)

    def collate(self, samples: list[Any]) -> Any:
        return self._collate(samples)

    @property
    def judge(self) -> tuple[Evaluate, Dataset[Any]]:
        """Raises :class:`SpecError` where there is none."""
        if self._judge is None:
            raise SpecError(
                "task: the session has no evaluation",
                remedy="decorate a function with @session.evaluation(dataset) before the loop",
                field="task",
            )
        return self._judge


class JobOver(BaseException):
    """Ends a script on a worker, in its loop. No Exception: ``except Exception`` is no way out."""


@dataclass(frozen=True)
class _Ended:
    error: BaseException | None


#: said by the script: it stands before its first batch
_READY = object()
#: said to the script: there are no more batches
_OVER = object()

_running: ContextVar[ScriptTask | None] = ContextVar("vcasgd_script", default=None)


def running_script() -> ScriptTask | None:
    """The script that this thread runs for a worker; None where it runs on its own."""
    return _running.get()


class ScriptTask(LoopTask):
    """The script at ``path``. It trains one model: a task for one learner.

    Raises :class:`TaskImportError` where the script does not come as far as its first batch, and
    :class:`UserCodeError` once it has ended, from each method that needs it.
    """

    def __init__(self, path: Path, args: dict[str, Any]) -> None:
        super().__init__()
        self._path = path
        self._arguments = arguments_of(args)
        self._thread: threading.Thread | None = None
        #: as they were when the loop began
        self._first: nn.Module | None = None
        self._first_state: dict[str, Any] = {}
        self._to_script: SimpleQueue[Any] = SimpleQueue()
        self._to_worker: SimpleQueue[Any] = SimpleQueue()
        self._batch: Any = None
        self._began = False

    # -- the worker's side ---------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Whether the script was run and can't go on: it has to be loaded anew."""
        return self._thread is not None and not self._thread.is_alive()

    def model(self) -> nn.Module:
        """The script's own model, for which it is run up to its first batch; from the second call
        on, a copy of what that was then."""
        if self._thread is None:
            self._start()
            assert self.network is not None
            return self.network
        return copy.deepcopy(self._first)  # type: ignore[return-value]  # it has begun

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:  # noqa: ARG002 - it has them
        """The script's own, as it was given."""
        assert self.descends_by is not None, "the loop has begun"
        self.descends_by.load_state_dict(self._first_state)
        return self.descends_by

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Lets the script go on from its last step to the next one."""
        if model is not self.network:
            raise UserCodeError(f"{self._path.name} trains one model; this is another one")
        if self.ended:
            raise self._stopped(None)
        self._to_script.put(batch)
        loss: Tensor = self._hear(self._stopped)
        return loss

    def close(self) -> None:
        """Ends the script where it waits."""
        if self._thread is None or not self._thread.is_alive():
            return
        self._to_script.put(_OVER)
        self._thread.join(LAST_WORDS_SECONDS)
        if self._thread.is_alive():
            log.warning("%s goes on although the job is over", self._path.name)

    def _start(self) -> None:
        # as Python does for a script
        look_first_in(self._path.parent.resolve())
        self._thread = threading.Thread(target=self._run, name="script", daemon=True)
        self._thread.start()
        self._hear(self._never_began)

    def _hear(self, explained: Callable[[BaseException | None], VcasgdError]) -> Any:
        # as long as the user's code takes; a worker that makes no step loses its leases
        said = self._to_worker.get()
        if not isinstance(said, _Ended):
            return said
        assert self._thread is not None
        self._thread.join(LAST_WORDS_SECONDS)
        if isinstance(said.error, VcasgdError):
            raise said.error
        raise explained(said.error) from said.error

    def _never_began(self, error: BaseException | None) -> VcasgdError:
        if error is None:
            return TaskImportError(
                f"task: {self._path.name} ended without a batch of a vcasgd.Session",
                remedy="let it train in: for batch in session.batches(dataset)",
                field="task",
            )
        return TaskImportError(
            f"task: {self._path.name} can't be run: {type(error).__name__}: {error}",
            field="task",
            traceback=user_traceback(error),
        )

    def _stopped(self, error: BaseException | None) -> VcasgdError:
        if error is None:
            return UserCodeError(
                f"{self._path.name} left the loop over session.batches before the job was over",
                remedy="let job.yaml say when to stop",
            )
        return UserCodeError(
            f"{self._path.name} raised {type(error).__name__}: {error}",
            traceback=user_traceback(error),
        )

    # -- the script's side ---------------------------------------------------------------------

    def learns(self, model: nn.Module, optimizer: Optimizer) -> None:
        if self.network is not None:
            raise UserCodeError(
                f"{self._path.name} began a second vcasgd.Session",
                remedy="a job trains one model: put several networks into one module",
            )
        super().learns(model, optimizer)

    def batches(self) -> Iterator[Any]:
        """Without an end: :class:`JobOver` ends it."""
        if self._began:
            raise self._stopped(None)
        self._began = True
        # without one no epoch of a job can end
        _ = self.judge
        assert self.descends_by is not None, "a session has begun"
        self._first = copy.deepcopy(self.network)
        self._first_state = copy.deepcopy(self.descends_by.state_dict())
        self._say(_READY)
        while True:
            yield self._batch

    def hand_in(self, loss: Tensor) -> None:
        """Returns when the step was made and there is another batch."""
        self._say(loss)

    def _say(self, what: Any) -> None:
        self._to_worker.put(what)
        self._batch = self._to_script.get()
        if self._batch is _OVER:
            raise JobOver

    def _run(self) -> None:
        _running.set(self)
        # the process is the script's from here on
        sys.argv = [str(self._path), *self._arguments]
        error: BaseException | None = None
        try:
            runpy.run_path(str(self._path), run_name="__main__")
        except JobOver:
            return
        except BaseException as raised:  # noqa: BLE001 - user code may raise anything: SystemExit too
            error = raised
        self._to_worker.put(_Ended(error))
