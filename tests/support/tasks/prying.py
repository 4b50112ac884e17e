"""Task that tries to break out of its sandbox, and trains only if nothing succeeds.

With ``megabytes``, it takes so much memory instead, in a process of its own.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import vcasgd

HOG = "import sys, time; held = b'x' * int(float(sys.argv[1]) * 1e6); time.sleep(600)"


class Prying(vcasgd.Task):
    def __init__(self, secret: str, port: int, agent: int, megabytes: float = 0.0) -> None:
        if megabytes:
            subprocess.run([sys.executable, "-c", HOG, str(megabytes)], check=False)
        attempts: dict[str, Callable[[], Any]] = {
            "read a file of the owner": Path(secret).read_text,
            "list the home folder of the owner": lambda: list(Path(secret).parent.iterdir()),
            "change its own code": Path(__file__).touch,
            "change Python": (Path(sys.prefix) / "escaped").touch,
            "change the kernel": lambda: os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY),
            "connect to another port": lambda: socket.create_connection(("127.0.0.1", port), 5),
            "see another process": lambda: b"join" in _command_of(agent) or _fail(),
            "fill the disk": lambda: _fill(Path("/tmp/big")),
            "fill the shared memory": lambda: _fill(Path("/dev/shm/big")),
        }
        escaped = [name for name, attempt in attempts.items() if _succeeds(attempt)]
        if escaped:
            raise RuntimeError(f"escaped: {', '.join(escaped)}")

    def model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def dataset(self, split: str) -> Dataset[Any]:
        del split
        return TensorDataset(torch.ones(64, 2), torch.ones(64, 1))

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        time.sleep(0.01)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    def evaluate(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
        return {"count": torch.tensor(len(batch[0])), "sum": model(batch[0]).sum()}


def _command_of(process: int) -> bytes:
    return Path(f"/proc/{process}/cmdline").read_bytes()


def _fail() -> None:
    raise OSError("it is another process")


def _fill(path: Path) -> None:
    """Write 1 GB, in files of 64 MB that are removed."""
    files = [path.with_suffix(f".{number}") for number in range(16)]
    try:
        for file in files:
            file.write_bytes(bytes(64_000_000))
    finally:
        for file in files:
            file.unlink(missing_ok=True)


def _succeeds(attempt: Callable[[], Any]) -> bool:
    try:
        attempt()
    except OSError:
        return False
    return True
