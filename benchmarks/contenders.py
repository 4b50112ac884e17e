"""The measured systems and their commands."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from environments import python_of

HERE = Path(__file__).resolve().parent
PEERS = HERE / "peers"


@dataclass(frozen=True)
class Contender:
    """A measured system.

    ``environment`` is a folder below ``.venvs``, or empty for vcasgd. With ``information``, the
    system is measured once and not compared.
    """

    name: str
    title: str
    counted: str
    script: str = ""
    environment: str = ""
    arguments: tuple[str, ...] = ()
    information: bool = False

    @property
    def requirements(self) -> Path:
        return PEERS / f"{self.environment}.txt"

    @property
    def python(self) -> Path:
        return python_of(self.environment)

    def argv(self, size_mb: int, seconds: float) -> list[str]:
        common = ["--size-mb", str(size_mb), "--workers", "2", "--seconds", f"{seconds:g}"]
        if not self.environment:
            start = [sys.executable, "-m", "benchmarks.measure", "store", "--json"]
        else:
            start = [str(self.python), str(PEERS / self.script)]
        return [*start, *common, *self.arguments]


OURS = "vcasgd-float32"

CONTENDERS = (
    Contender(
        OURS,
        "vcasgd, float32",
        "updates applied and published; workers fetch each new version",
        arguments=("--codec", "float32"),
    ),
    Contender(
        "vcasgd-bfloat16",
        "vcasgd, bfloat16",
        "the same",
        arguments=("--codec", "bfloat16"),
    ),
    Contender(
        "ray",
        "Ray actor, a node each",
        "gradients applied; a worker gets the weights after each of its own",
        script="ray_actor.py",
        environment="ray",
    ),
    Contender(
        "ray-shared",
        "Ray actor, one node (shared memory)",
        "the same; nothing crosses a socket",
        script="ray_actor.py",
        environment="ray",
        arguments=("--shared",),
        information=True,
    ),
    Contender(
        "hivemind",
        "hivemind averaging",
        "rounds × 2 peers",
        script="hivemind_averaging.py",
        environment="hivemind",
    ),
    Contender(
        "torchft",
        "torchft all-reduce",
        "committed steps × 2 groups",
        script="torchft_allreduce.py",
        environment="torchft",
    ),
    Contender(
        "flower",
        "Flower FedAvg",
        "rounds × 2 clients",
        script="flower_rounds.py",
        environment="flower",
    ),
)
