"""The contenders, and what each needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from faults import Action

HERE = Path(__file__).resolve().parent
WORKERS = HERE / "workers"
OURS = "ours"
COUNTED = "samples of the updates in the published snapshot"


@dataclass(frozen=True)
class Entrant:
    """A contender. One without ``script`` is vcasgd, whose stack starts and replaces machines.

    ``environment`` is a virtual environment, with requirements in a file of that name. ``machines``
    of which ``trainers`` train at the same time; None means all of the workload.
    """

    name: str
    title: str
    counted: str
    script: str = ""
    environment: str = ""
    requirements: Path | None = None
    machines: int | None = None
    trainers: int | None = None
    has_coordinator: bool = True
    #: vcasgd only: its workers choose the length of their rounds, as they do by default.
    chooses_rounds: bool = False
    #: Faults that mean nothing to it, with the reason.
    pointless: tuple[tuple[Action, str], ...] = ()


ENTRANTS = {
    entrant.name: entrant
    for entrant in (
        Entrant(OURS, "vcasgd", COUNTED),
        Entrant("ours-default", "vcasgd, rounds as by default", COUNTED, chooses_rounds=True),
        Entrant(
            "torchft-localsgd",
            "torchft LocalSGD",
            "committed steps of all groups; the lighthouse is the coordinator",
            script="torchft_local.py",
            environment="torchft",
            requirements=HERE.parent / "peers" / "torchft.txt",
        ),
        Entrant(
            "torchft-diloco",
            "torchft DiLoCo",
            "committed steps of all groups; the lighthouse is the coordinator",
            script="torchft_diloco.py",
            environment="torchft",
            requirements=HERE.parent / "peers" / "torchft.txt",
        ),
        Entrant(
            "torchft-step",
            "torchft data parallelism",
            "committed steps of all groups, an all-reduce each; the lighthouse is the coordinator",
            script="torchft_step.py",
            environment="torchft",
            requirements=HERE.parent / "peers" / "torchft.txt",
        ),
        Entrant(
            "torchrun",
            "torchrun elastic, checkpoints",
            "steps up to the last checkpoint, which is written every 20 steps; the store of the "
            "rendezvous is the coordinator",
            script="torchrun_elastic.py",
            environment="torch",
            requirements=WORKERS / "torch.txt",
        ),
        Entrant(
            "ray-train",
            "Ray Train, elastic",
            "steps up to the last checkpoint, which is written every 20 steps; the head with the "
            "driver is the coordinator",
            script="ray_elastic.py",
            environment="ray-train",
            requirements=WORKERS / "ray.txt",
        ),
        Entrant(
            "hivemind",
            "hivemind local steps",
            "finished epochs of 20 steps of 4 machines; the first DHT peer is the coordinator",
            script="hivemind_local.py",
            environment="hivemind",
            requirements=HERE.parent / "peers" / "hivemind.txt",
        ),
        Entrant(
            "one-machine",
            "one machine, warm standby",
            "steps up to the last checkpoint, which is written every 20 steps",
            script="one_machine.py",
            environment="torch",
            requirements=WORKERS / "torch.txt",
            machines=2,
            trainers=1,
            has_coordinator=False,
            pointless=((Action.COORDINATOR, "has none"), (Action.SLOW, "has no other machine")),
        ),
    )
}


def why_not(entrant: Entrant, action: Action | None) -> str:
    """Return why a fault can't happen to a contender, or an empty string."""
    return next((reason for each, reason in entrant.pointless if each is action), "")
