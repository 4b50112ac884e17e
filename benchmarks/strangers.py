"""Screening of strangers on a simulated job: false accusations, and what finds which attack.

    python benchmarks/strangers.py --seeds 3
    python benchmarks/strangers.py --attack flip --seeds 1
    python benchmarks/strangers.py --replicas --seeds 1

Learners, the default rule, and the screening are the product's own; machines and time are
simulated. Each of four machines belongs to another owner. An accusation is counted, and the owner
continues, so that one run judges all of its updates. With ``--replicas``, another machine trains
every third subtask again when it is done, from the present model and with a new optimizer: how much
do honest machines agree about the same samples?
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from vcasgd.fleet.histories import always
from vcasgd.simulation.job import Conditions, Simulation
from vcasgd.simulation.worker import SimulatedWorker
from vcasgd.spec.job import JobSpec
from vcasgd.store.tensors.header import Header
from vcasgd.verification.screening import Screening
from vcasgd.worker.interval import Base
from vcasgd.worker.learner import Learner

ROOT = Path(__file__).parents[1]
OWNERS, EPOCHS = 4, 10
#: Owner that attacks in the second half of a job.
HOSTILE = "w1"
ATTACKS = ("flip", "scale", "random", "replay", "backdoor")
#: Range of speeds, latency in seconds, and whether batches differ.
HONEST: dict[str, tuple[float, float, dict[str, Any]]] = {
    "equal machines": (1.0, 0.002, {}),
    "speeds of 1 to 8": (8.0, 0.002, {}),
    "late updates": (4.0, 0.02, {}),
    "two steps in a push": (4.0, 0.002, {"push_every": 2}),
    "no rounds, stale updates": (
        4.0,
        0.02,
        {"push_every": 2, "update": {"rule": "async-local-sgd"}},
    ),
}


class ScreenedJob(Simulation):
    """A job of which each machine has an owner, and one of them may attack."""

    attack: str | None = None

    def prepare(self, attack: str | None, *, replicas: bool = False) -> None:
        self.attack, self._replicas = attack, replicas
        #: Owners of the subtasks that were trained twice, and the cosine of both changes.
        self.agreement: list[tuple[str, float]] = []
        #: Sum of the changes of each subtask in progress.
        self._changes: dict[int, Tensor] = {}
        self.accusations: list[tuple[int, str, str]] = []
        self.refused: Counter[str] = Counter()
        self.screened = 0
        self._screening = Screening(self._model.weights.numel(), 1)
        self._kept: Tensor | None = None
        self._noise = torch.Generator().manual_seed(3)
        self._target = torch.randn(self._model.parameters, generator=self._noise)

    def _apply(self, worker: SimulatedWorker, header: Header, payload: bytes) -> None:
        model, owner = self._model, worker.name
        if owner == HOSTILE and self.attack:
            payload = self._forged(payload)
        model.payload(header)[:] = payload
        step = model.step_of(header)
        samples = header.stop - header.start
        measure = self._screening.measure(step, model.weights, model.parameters, samples)
        self.screened += 1
        if self._screening.refusal(owner, measure):
            self.refused[owner] += 1
        if why := self._screening.add(owner, measure, model.meta.version):
            self.accusations.append((self.screened, owner, why))
        if self._replicas:
            self._changes[header.subtask] = self._changes.get(header.subtask, 0) + step
        super()._apply(worker, header, payload)
        if self._replicas and header.stop == self._plan.size(header.subtask):
            self._replicate(owner, header)

    def _replicate(self, owner: str, header: Header) -> None:
        change, model = self._changes.pop(header.subtask), self._model
        if header.subtask % 3:
            return
        learner = Learner(self._spec, self._task, "cpu")
        learner.start_subtask()
        base = Base(model.weights.clone(), model.integers.clone(), version=model.meta.version)
        trained = learner.train(base, header.subtask, 0, header.stop)
        again = trained.update.clone()
        again[model.parameters :] = 0
        self.agreement.append((owner, float(cosine_similarity(again, change, dim=0))))

    def _forged(self, payload: bytes) -> bytes:
        vector = torch.frombuffer(bytearray(payload), dtype=torch.float32)
        step = vector[: self._model.parameters]
        if self._model.record.samples_applied < self._plan.total_samples / 2:
            self._kept = step.clone()
            return payload
        norm = step.norm()
        match self.attack:
            case "flip":
                step.neg_()
            case "scale":
                step.mul_(5)
            case "random":
                noise = torch.randn(len(step), generator=self._noise)
                step.copy_(noise * norm / noise.norm())
            case "replay" if self._kept is not None:
                step.copy_(self._kept)
            case "backdoor":
                step.add_(self._target * (0.3 * norm / self._target.norm()))
        return vector.numpy().tobytes()


def job(
    conditions: Conditions, attack: str | None, more: dict[str, Any], *, replicas: bool = False
) -> ScreenedJob:
    sys.path.insert(0, str(ROOT / "examples/digits"))
    from train import Digits

    fields = {"update": {"rule": "rounds"}, **more}
    fields["update"] = {**fields["update"], "codec": "float32"}
    spec = JobSpec.parse({"name": "strangers", "task": "train:Digits", "epochs": EPOCHS, **fields})
    made = ScreenedJob(spec, lambda: Digits(channels=8), conditions, evaluate_every=EPOCHS)
    made.prepare(attack, replicas=replicas)
    return made


def summary(agreement: list[tuple[str, float]]) -> str:
    """Return the mean and the standard deviation of each owner's cosines in the second half."""
    late = agreement[len(agreement) // 2 :]
    cosines = {owner: [each for name, each in late if name == owner] for owner, _ in sorted(late)}
    return ", ".join(
        f"{owner} {fmean(each):.2f} ± {stdev(each):.2f} ({len(each)})"
        for owner, each in cosines.items()
        if len(each) > 1
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attack", choices=ATTACKS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--replicas", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    total, wrong, refused = 0, 0, 0
    for name, (speeds, latency, more) in HONEST.items():
        for seed in range(options.seeds):
            made = job(
                Conditions(always(OWNERS), seed=seed, speed_range=speeds, latency=latency),
                options.attack,
                more,
                replicas=options.replicas,
            )
            points = made.run().points
            accused = Counter(owner for _, owner, _ in made.accusations)
            total += made.screened
            wrong += sum(
                n for owner, n in accused.items() if owner != HOSTILE or not options.attack
            )
            refused += sum(made.refused.values())
            accuracy = points[-1].metrics["accuracy"] if points else float("nan")
            first = made.accusations[:1]
            print(
                f"{name}, seed {seed}: {made.screened} updates, accuracy {accuracy:.4f}, "
                f"accused {dict(accused)}, refused {dict(made.refused)}, first {first}",
                flush=True,
            )
            if options.replicas:
                print(f"  replicas of the second half: {summary(made.agreement)}", flush=True)
        if options.attack:
            break
    print(f"{total} updates, {wrong} false accusations, {refused} refused updates")


if __name__ == "__main__":
    main()
