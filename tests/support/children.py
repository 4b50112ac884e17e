"""Processes that a test starts, which end with it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from multiprocessing import forkserver
from pathlib import Path

import torch

from support.waiting import PATIENCE, await_truth

#: Processes fork from one that has torch in memory, so they start in milliseconds.
FORKS = multiprocessing.get_context("forkserver")
# torch imports the last of these with the first optimizer, which takes a second.
FORKS.set_forkserver_preload(
    ["support.harness", "vcasgd.worker.main", "vcasgd.api.__main__", "torch._dynamo"]
)
#: Option of prctl(2): the signal that a process gets when its parent dies.
PR_SET_PDEATHSIG = 1


class Child(ABC):
    """A process in its own group; always killed at the end."""

    pid: int

    @property
    @abstractmethod
    def status(self) -> int | None:
        """The exit status, as in :attr:`subprocess.Popen.returncode`."""

    @property
    def alive(self) -> bool:
        return self.status is None

    def wait(self, timeout: float = PATIENCE) -> int:
        await_truth(lambda: not self.alive, timeout, interval=0.005)
        return self.status

    def kill(self) -> None:
        """Send SIGKILL to the group and wait for its end. Fails if it had ended already."""
        assert self.alive, "the fault did not fire: the process was already dead"
        self._signal(signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL, "the fault did not fire: it ended by itself"

    def freeze(self) -> None:
        """Suspend the group with SIGSTOP; return when it is suspended."""
        assert self.alive, "the fault did not fire: the process was already dead"
        self._signal(signal.SIGSTOP)
        await_truth(lambda: self._state() == "T", interval=0.001)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def terminate(self, timeout: float = PATIENCE) -> int:
        os.kill(self.pid, signal.SIGTERM)
        return self.wait(timeout)

    def end(self) -> None:
        if self.alive:
            # It may end by itself meanwhile.
            with contextlib.suppress(ProcessLookupError):
                self._signal(signal.SIGKILL)
        self.wait()

    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def peak_bytes(self) -> int:
        """Return the most memory that the process has had."""
        (line,) = (
            each
            for each in Path(f"/proc/{self.pid}/status").read_text().splitlines()
            if each.startswith("VmHWM:")
        )
        return int(line.split()[1]) * 1024

    def _state(self) -> str:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def _signal(self, number: int) -> None:
        os.killpg(self.pid, number)


class Process(Child):
    def __init__(self, argv: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        with log.open("ab") as file:
            self.child = subprocess.Popen(
                argv,
                stdout=file,
                stderr=file,
                env={**os.environ, **(env or {})},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self.pid = self.child.pid

    @property
    def status(self) -> int | None:
        return self.child.poll()


class ForkedProcess(Child):
    """A process that calls ``module:function``, forked from an interpreter with all imports."""

    def __init__(self, entry: str, argv: list[str], log: Path, env: Mapping[str, str]) -> None:
        _run_fork_server()
        env = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), **env}
        self.child = FORKS.Process(target=_run, args=(entry, argv, log, env), daemon=True)
        self.child.start()
        self.pid = self.child.pid
        await_truth(self._leads_its_group, interval=0.001)

    @property
    def status(self) -> int | None:
        return self.child.exitcode

    def _leads_its_group(self) -> bool:
        try:
            return os.getpgid(self.pid) == self.pid
        except ProcessLookupError:
            return True


@cache
def _run_fork_server() -> None:
    """Start the fork server with this process's path, without which Python 3.11 preloads nothing of
    the tests."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    forkserver.ensure_running()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


def die_with_parent() -> None:
    """End with the tests, even if they are killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _run(entry: str, argv: list[str], log: Path, env: dict[str, str]) -> None:
    os.setsid()
    die_with_parent()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(env)
    torch.set_num_threads(1)
    sys.argv = [entry, *argv]
    module, _, function = entry.partition(":")
    sys.exit(getattr(importlib.import_module(module), function)())
