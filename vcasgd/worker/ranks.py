"""The first rank's side of a worker with several ranks: their processes, and what they do together.

The worker's own process is rank 0. The others (:mod:`vcasgd.worker.rank`) follow its messages, read
and write vectors in memory that they share, each its own part if the model is sharded, and add
gradients to its own (:mod:`vcasgd.learning.rank_group`). A
rank that ends, hangs, or raises an error costs the interval: all others are killed, and start again
with the next one, from the newest model and this process's optimizer.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from vcasgd.child_process import kill
from vcasgd.errors import RankLost, UserCodeError, VcasgdError
from vcasgd.learning.batch_source import SampleRange
from vcasgd.learning.model_evaluation import Metrics
from vcasgd.learning.rank_group import RankGroup
from vcasgd.learning.vector import Floats, MappedVector
from vcasgd.spec.job import JobSpec
from vcasgd.store.ledger.job import ModelFacts
from vcasgd.task.task import base_path
from vcasgd.worker.gpus import OwnGpu

log = logging.getLogger(__name__)

#: Seconds until a rank has imported its libraries and built the model.
START_SECONDS = 300.0
#: Seconds that ranks wait for one another in their first interval, in which they may compile.
FIRST_SECONDS = 60.0
#: Losses in a row, without an interval in between, that are an error of the job's code.
MAX_LOSSES = 3
#: Seconds in which a rank that caused an error of the group reports it.
REPORT_SECONDS = 2.0
#: Seconds in which others do once one has ended.
LAST_SECONDS = 0.2
#: Seconds between two looks at the processes while this one waits.
LOOK_SECONDS = 1.0
#: Elements of a vector that isn't mapped which ranks get at a time.
CHUNK_FLOATS = 4 << 20


# -- messages, over a pair of connected sockets -------------------------------------------------
# All ranks run the same user's code with the same rights, so they trust one another.


@dataclass(frozen=True)
class StartRank:
    """First message to a rank: what it trains, and where it meets the others."""

    rank: int
    size: int
    spec: dict[str, Any]
    facts: dict[str, Any]
    code: Path
    base: Path | None
    meeting: Path
    timeout: float
    threads: int


@dataclass(frozen=True)
class LoadPart:
    """Load elements of the vector from ``first`` on.

    They are ``floats`` elements of a file from ``start`` on, whose descriptor follows the message.
    """

    first: int
    start: int
    floats: int


@dataclass(frozen=True)
class LoadIntegers:
    """Load the model's counters, after all parts."""

    integers: bytes


@dataclass(frozen=True)
class ShiftPart(LoadPart):
    """Add such numbers to elements of the vector from ``first`` on."""


@dataclass(frozen=True)
class ReadPart(LoadPart):
    """Copy what the rank has of elements of the vector from ``first`` on into such memory.

    Unless ``origin`` is None, parameters are differences from as many elements of another file from
    there on, whose descriptor follows the other one.
    """

    origin: int | None = None


@dataclass(frozen=True)
class RankEvaluation:
    """Evaluate together; each batch is a step. ``rehearses``: only the first one, in all ranks."""

    rehearses: bool = False


@dataclass(frozen=True)
class RankInterval:
    """Train samples together.

    ``batch`` is the mean size of the machine's local batch, ``following`` what is probably trained
    next. ``optimizer`` is the state of a new optimizer, empty if it has none yet; None if all
    continue with theirs.
    """

    samples: SampleRange
    following: tuple[SampleRange, ...]
    batch: float | None
    asynchrony: float
    divergences: int
    optimizer: bytes | None


@dataclass(frozen=True)
class StepMade:
    """The first rank has made its step; ``stop`` ends the interval or the evaluation."""

    stop: bool


@dataclass(frozen=True)
class RankReady:
    """Answer to :class:`StartRank`, and to what moves vectors."""


@dataclass(frozen=True)
class RankPart:
    """Answer to :class:`RankInterval`: what this rank did, and a sum over its model."""

    samples: int
    loss_sum: float
    checksum: float


@dataclass(frozen=True)
class RankMetrics:
    """Answer to :class:`RankEvaluation`; empty if it was stopped."""

    metrics: Metrics


@dataclass(frozen=True)
class RankFailed:
    """The rank ends after an error."""

    error: VcasgdError


# -- processes -------------------------------------------------------------------------------------


@dataclass
class _RankProcess:
    """Another rank's process, and this end of its connection."""

    rank: int
    popen: subprocess.Popen[bytes]
    connection: Connection

    @property
    def end(self) -> str:
        """Description of the end of the process, for people."""
        status = self.popen.poll() or 0
        return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"


class Ranks:
    """Ranks 1 to ``size`` - 1 of this worker.

    Methods raise :class:`RankLost`, or the error that a rank reports. ``timeout`` bounds each wait
    of ranks for one another in seconds, and ``first_timeout`` those of the first interval.
    ``on_wait`` is called while this process waits for the others to start.
    """

    def __init__(
        self,
        size: int,
        spec: JobSpec,
        code: Path,
        gpu: OwnGpu,
        timeout: float,
        on_wait: Callable[[], None] = lambda: None,
        first_timeout: float = FIRST_SECONDS,
    ) -> None:
        self.size = size
        self._spec, self._code, self._gpu = spec, code, gpu
        self._timeout, self._first_timeout = timeout, max(timeout, first_timeout)
        self._on_wait = on_wait
        self._processes: list[_RankProcess] = []
        #: Memory that all ranks can map, float32 [at most CHUNK_FLOATS].
        self._memory = MappedVector(0)
        self._threads = torch.get_num_threads()
        #: Losses of a rank since the last interval that all trained.
        self._losses = 0
        #: The error to raise for the running processes; None until one is lost.
        self._fault: VcasgdError | None = None
        #: This process's membership; None before :meth:`start`.
        self.group: RankGroup | None = None

    @property
    def running(self) -> bool:
        """True if all ranks follow."""
        return self.group is not None

    # -- processes ---------------------------------------------------------------------------------

    def start(self, facts: ModelFacts, floats: int, device: str, *, sharded: bool = False) -> None:
        """Start the processes of the other ranks, and meet them.

        ``floats`` is the length of the vector, of which each has a part if it is ``sharded``.
        """
        self._memory, self._fault = MappedVector(min(floats, CHUNK_FLOATS)), None
        try:
            threads = max(1, self._threads // self.size) if device == "cpu" else self._threads
            torch.set_num_threads(threads)
            with tempfile.TemporaryDirectory(prefix="vcasgd-ranks-") as folder:
                meeting = Path(folder) / "meeting"
                start = StartRank(
                    rank=0,
                    size=self.size,
                    spec=self._spec.model_dump(mode="json"),
                    facts=facts.to_dict(),
                    code=self._code,
                    base=base_path(),
                    meeting=meeting,
                    timeout=self._first_timeout,
                    threads=threads,
                )
                for rank in range(1, self.size):
                    self._processes.append(self._launch(rank, start))
                self._await(RankReady, START_SECONDS)
                self._tell(RankReady())
                self.group = RankGroup.connect(
                    *(0, self.size, meeting, self._first_timeout, device, self._lost),
                    sharded=sharded,
                )
                self._await(RankReady, START_SECONDS)
        except (OSError, RuntimeError) as error:
            raise self._lost(error) from error
        finally:
            if self.group is None:
                self.stop()
        log.info("this worker trains with %d processes", self.size)

    def _launch(self, rank: int, start: StartRank) -> _RankProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            numbers = map(str, (theirs.fileno(), os.getpid()))
            # Not from the present folder, whose files are the user's.
            command = [sys.executable, "-P", "-m", "vcasgd.worker.rank", *numbers]
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "PYTHONUNBUFFERED": "1",
                **self._gpu.variables_of(rank),
            }
            popen = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
            )
        assert popen.stdout is not None
        threading.Thread(target=_copy_lines, args=(rank, popen.stdout), daemon=True).start()
        process = _RankProcess(rank, popen, Connection(ours.detach()))
        process.connection.send(replace(start, rank=rank))
        return process

    def stop(self) -> None:
        """Kill the other ranks; :meth:`start` starts them again."""
        if self.group is not None:
            self.group.close()
            self.group = None
        for process in self._processes:
            process.popen.kill()
        for process in self._processes:
            kill(process.popen)
            process.connection.close()
        self._processes = []
        torch.set_num_threads(self._threads)

    # -- together ----------------------------------------------------------------------------------

    def load(self, floats: Floats, integers: Tensor) -> None:
        """Load a model, float32 [floats] and int64 [k], in the other ranks."""
        for first, (file, *place) in self._shared(floats):
            self._order(LoadPart(first, *place), file)
        self._order(LoadIntegers(integers.numpy().tobytes()))

    def shift(self, start: int, floats: Floats) -> None:
        """Add a vector, float32 [n], to the model of the other ranks from an element on."""
        for first, (file, *place) in self._shared(floats):
            self._order(ShiftPart(start + first, *place), file)

    def read(self, out: MappedVector, start: int, origin: MappedVector | None) -> None:
        """Let each of the others do :meth:`ShardedModel.read_own_part`."""
        (file, *place), before = out.place, origin.place if origin is not None else ()
        self._order(ReadPart(start, *place, *before[1:2]), file, *before[:1])

    def _shared(self, vector: Floats) -> Iterator[tuple[int, tuple[int, int, int]]]:
        """Yield pieces of a vector, float32 [n], each with its first element and its place in
        memory that all ranks can map."""
        if isinstance(vector, MappedVector):
            yield 0, vector.place
            return
        for first in range(0, len(vector), len(self._memory)):
            piece = vector[first : first + len(self._memory)]
            self._memory[: len(piece)].copy_(piece)
            yield first, self._memory.between(0, len(piece)).place

    def _order(self, message: object, *files: int) -> None:
        self._tell(message, *files)
        self._await(RankReady, self._first_timeout)

    def begin(self, order: RankInterval | RankEvaluation) -> None:
        """Start an interval, or an evaluation, in the other ranks."""
        self._tell(order)

    def step(self, *, stop: bool) -> None:
        """Let the other ranks make their next step, or end the interval."""
        self._tell(StepMade(stop))

    def end(self, own: RankPart) -> RankPart:
        """Return the sums over all ranks of what an interval did; NaN as the checksum if ranks
        have different models."""
        answers = [own, *self._await(RankPart, self._first_timeout)]
        self._losses = 0
        assert self.group is not None
        self.group.set_timeout(self._timeout)
        same = len({answer.checksum for answer in answers}) == 1
        return RankPart(
            sum(answer.samples for answer in answers),
            math.fsum(answer.loss_sum for answer in answers),
            own.checksum if same else math.nan,
        )

    def metrics(self) -> list[Metrics]:
        """Return what the other ranks have evaluated."""
        return [each.metrics for each in self._await(RankMetrics, self._first_timeout)]

    def _tell(self, message: object, *files: int) -> None:
        try:
            for process in self._processes:
                process.connection.send(message)
                for file in files:
                    send_handle(process.connection, file, process.popen.pid)
        except OSError as error:
            raise self._lost(error) from error

    def _await(self, kind: type[Any], seconds: float) -> list[Any]:
        """Return the answers of all other ranks, by rank."""
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + seconds
        while waiting := [one for one in self._processes if one.rank not in answers]:
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._lost(f"no answer in {seconds:.0f} s")
            self._on_wait()
            ready = wait([one.connection for one in waiting], min(left, LOOK_SECONDS))
            for process in waiting:
                if process.connection in ready:
                    answers[process.rank] = self._received(process, kind)
        return [answers[process.rank] for process in self._processes]

    def _received(self, process: _RankProcess, kind: type[Any]) -> Any:
        try:
            answer = process.connection.recv()
        except (OSError, EOFError) as error:
            raise self._lost(error) from error
        if isinstance(answer, RankFailed):
            self.stop()
            raise answer.error
        assert isinstance(answer, kind)
        return answer

    # -- errors ------------------------------------------------------------------------------------

    def _lost(self, error: object) -> VcasgdError:
        """Stop all ranks, and return the error of the one that is at fault.

        Several waits can fail for one loss; it counts once.
        """
        if self._fault is None:
            self._fault = self._found(error)
        return self._fault

    def _found(self, error: object) -> VcasgdError:
        own = self._own_error()
        lost = [one for one in self._processes if one.popen.poll() is not None]
        ends = ", ".join(f"rank {one.rank} {one.end}" for one in lost)
        self.stop()
        if own is not None:
            return own
        log.warning("ranks: %s", error)
        ends = ends or "a rank did not answer in time"
        self._losses += 1
        if self._losses < MAX_LOSSES:
            return RankLost(f"the interval is trained again, because {ends}")
        return UserCodeError(
            f"the processes of this worker were lost {self._losses} times in a row: {ends}",
            remedy="they may need more memory than there is; see the job's log",
        )

    def _own_error(self) -> VcasgdError | None:
        """Return the error that a rank reports, if one does."""
        deadline = time.monotonic() + REPORT_SECONDS
        silent = {one.connection: one for one in self._processes}
        while silent and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(silent), left):
                assert isinstance(ready, Connection)
                try:
                    answer = ready.recv()
                except (OSError, EOFError):
                    # Its status is soon there, and other ranks may say nothing for long.
                    with suppress(subprocess.TimeoutExpired):
                        silent.pop(ready).popen.wait(REPORT_SECONDS)
                    deadline = min(deadline, time.monotonic() + LAST_SECONDS)
                    continue
                if isinstance(answer, RankFailed):
                    return answer.error
        return None


def _copy_lines(rank: int, stream: IO[bytes]) -> None:
    """Print what a rank prints, so that it is in the job's log."""
    with stream:
        for line in stream:
            sys.stdout.write(f"[rank {rank}] {line.decode(errors='replace').rstrip()}\n")
