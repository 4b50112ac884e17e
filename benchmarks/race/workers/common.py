"""Arguments and reports of the scripts of all peers. Each runs in its peer's environment.

A script has two roles: ``coordinator`` is the process that a contender needs besides its workers,
and ``worker`` is one machine. A worker trains until it is killed, or leaves at SIGTERM, the notice
of an eviction.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from cnn import DigitSteps
from pace import Pace
from transformer import PacedSteps

#: Seconds between two snapshots of the model, which are judged after the run.
SNAPSHOT_SECONDS = 0.5
#: Models. Only that of the first one learns something that can be judged.
CNN, TRANSFORMER = "cnn", "transformer"


@dataclass(frozen=True)
class WorkerOptions:
    """Conditions of a run. ``pace`` is the seconds of a step with a whole batch, and ``address``
    the one at which others reach this machine.
    """

    role: str
    folder: Path
    machine: str
    coordinator: str
    address: str
    model: str
    workers: int
    batch: int
    pace: float
    sync_every: int
    data: Path

    @property
    def patience(self) -> float:
        """Seconds that an exchange may take."""
        return 2.0 if self.model == CNN else 60.0

    @property
    def host(self) -> str:
        return self.coordinator.partition(":")[0]

    @property
    def port(self) -> int:
        return int(self.coordinator.partition(":")[2])


def worker_options(arguments: list[str] | None = None) -> WorkerOptions:
    """Parse the command line, which is the same for all peers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=(CNN, TRANSFORMER), required=True)
    parser.add_argument("--role", choices=("coordinator", "worker", "trainer"), required=True)
    for name in ("--folder", "--data"):
        parser.add_argument(name, type=Path, required=True)
    for name in ("--machine", "--coordinator", "--address"):
        parser.add_argument(name, required=True)
    for name in ("--workers", "--batch", "--sync-every"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--pace", type=float, required=True)
    return WorkerOptions(**vars(parser.parse_args(arguments)))


class Reporter:
    """Appends what a machine does to its file: its first step, and each change of the model."""

    def __init__(self, options: WorkerOptions, machine: str | None = None) -> None:
        self._machine = machine or options.machine
        (options.folder / "progress").mkdir(exist_ok=True)
        path = options.folder / "progress" / f"{self._machine}.jsonl"
        self._file = path.open("a", buffering=1)
        self._snapshots = options.folder / "snapshots"
        self._snapshots.mkdir(exist_ok=True)
        self._keeps_snapshots = options.model == CNN
        self._stepped = False

    def step(self) -> None:
        """Report the first local step."""
        if not self._stepped:
            self._stepped = True
            self._write(kind="step")

    def commit(self, total: int, model: nn.Module) -> None:
        """Report that the model contains ``total`` samples, and keep a snapshot now and then."""
        self._write(kind="commit", total=total)
        if not self._keeps_snapshots:
            return
        slot = int(time.time() / SNAPSHOT_SECONDS)
        try:
            # The first machine in each interval writes it.
            os.close(os.open(self._snapshots / f"{slot}.claim", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        part = self._snapshots / f"{slot}.part"
        torch.save({"at": time.time(), "state": model.state_dict()}, part)
        part.rename(part.with_suffix(".pt"))

    def _write(self, **fields: object) -> None:
        self._file.write(json.dumps({"at": time.time(), **fields}) + "\n")


class Training:
    """Model, optimizer, and data of one machine, and its paced local step."""

    def __init__(self, options: WorkerOptions, machine: str | None = None) -> None:
        # The machines share the processors of one computer.
        torch.set_num_threads(1)
        name = machine or options.machine
        self.batch = options.batch
        seed = zlib.crc32(f"{name} {os.getpid()}".encode())
        self._steps: DigitSteps | PacedSteps
        if options.model == CNN:
            self._steps = DigitSteps(options.data, options.batch, seed)
        else:
            self._steps = PacedSteps(seed)
        self.model: nn.Module = self._steps.model
        self.optimizer = self._steps.optimizer
        self._pace = Pace(options.pace / options.batch, options.folder, name)

    def backward(self, wrapped: nn.Module | None = None) -> None:
        """Compute the gradients of a batch, in the time of a step.

        ``wrapped`` is the model in a module that also reduces the gradients.
        """
        with self._pace.step(self.batch):
            self.optimizer.zero_grad()
            self._steps.loss(wrapped or self.model).backward()


class Notice:
    """Turns SIGTERM into a flag, so that a worker leaves after its next exchange."""

    def __init__(self) -> None:
        self.given = False
        signal.signal(signal.SIGTERM, self._give)

    def _give(self, *_: object) -> None:
        self.given = True
