"""Repetition of intervals on a simulated job: differences of honest and of hostile updates, costs.

    python benchmarks/repetitions.py --seeds 3
    python benchmarks/repetitions.py --attack backdoor
    python benchmarks/repetitions.py --steps 64

Learners, the default rule, and the repetition are the product's own; machines and time are
simulated. The repetition computes without oneDNN, so that its rounding differs as on other
hardware. With ``--attack``, one of four owners attacks in the second half: all its intervals are
repeated, and how many updates it takes until two of those that are drawn are wrong is simulated.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from strangers import EPOCHS, HOSTILE, OWNERS, ROOT
from vcasgd.fleet.histories import Life, always
from vcasgd.simulation.job import Conditions, Simulation
from vcasgd.simulation.worker import SimulatedInterval, SimulatedWorker
from vcasgd.spec.job import JobSpec
from vcasgd.store.tensors.header import Header
from vcasgd.task.task import Task
from vcasgd.verification.judge import (
    DIFFERENT,
    DIFFERENT_STATE,
    MAX_WRONG,
    update_difference,
)
from vcasgd.verification.repetitions import ONE_IN
from vcasgd.verification.verifier import IntervalFacts, RepeatingLearner, state_of
from vcasgd.worker.learner import Learner

ATTACKS = ("flip", "backdoor", "momentum")


@dataclass(frozen=True)
class Repeated:
    """One repetition: the owner, whether the update was forged, the relative differences of the
    update and of the state after, and the processor's seconds."""

    owner: str
    forged: bool
    update: float
    state: float
    trained: float
    committed: float
    repeated: float

    @property
    def wrong(self) -> bool:
        return self.update > DIFFERENT or self.state > DIFFERENT_STATE


class RepeatedJob(Simulation):
    """A job of which a part of the intervals is repeated at once, with another rounding."""

    def prepare(self, attack: str | None, share: float) -> None:
        self.attack, self.share = attack, share
        self.results: list[Repeated] = []
        self.state_bytes = 0
        self._draw = random.Random(1)
        self._target: Tensor | None = None

    def _new_worker(self, nth: int, life: Life) -> SimulatedWorker:
        worker = super()._new_worker(nth, life)
        honest = worker.train
        worker.train = lambda interval, name: self._train(  # type: ignore[method-assign]
            worker, honest, interval, name
        )
        return worker

    def _train(
        self,
        worker: SimulatedWorker,
        honest: Callable[[SimulatedInterval, str], tuple[Header, bytes]],
        interval: SimulatedInterval,
        name: str,
    ) -> tuple[Header, bytes]:
        learner = worker.learner
        assert learner is not None
        before = state_of(learner)
        captured = time.process_time()
        header, payload = honest(interval, name)
        trained = time.process_time()
        forged = self.attack is not None and worker.name == HOSTILE and self._half_done()
        if forged and self.attack == "momentum":
            self._poison(learner)
        at = time.process_time()
        after = state_of(learner)
        assert len(after.digest) == len(before.digest)
        committed = time.process_time() - at
        if forged and self.attack != "momentum":
            payload = self._forged(payload)
        # A worker keeps the state after its last interval, so it copies one for each.
        times = trained - captured, committed
        if forged or self._draw.random() < self.share:
            facts = IntervalFacts(
                *(header.subtask, header.start, header.stop, header.stop, header.batch)
            )
            self.state_bytes = max(self.state_bytes, len(before.to_bytes()) + len(after.to_bytes()))
            self._repeat(worker, forged, facts, interval, payload, before, after, times)
        return header, payload

    def _repeat(
        self, worker: SimulatedWorker, forged: bool, facts: Any, interval: SimulatedInterval,
        payload: bytes, before: Any, after: Any, times: tuple[float, float],
    ) -> None:  # fmt: skip
        base = interval.start_from.base
        assert worker.learner is not None
        repeating = RepeatingLearner(worker.learner)
        began = time.process_time()
        with torch.backends.mkldnn.flags(enabled=False):
            trained = repeating.repeat(facts, (base.floats, base.integers), before)
        seconds = time.process_time() - began
        sent = torch.frombuffer(bytearray(payload), dtype=torch.float32)
        self.results.append(
            Repeated(
                worker.name,
                forged,
                update_difference(sent, trained.update, base.floats, self._model.parameters),
                after.difference(state_of(repeating)),
                *times,
                seconds,
            )
        )

    def _half_done(self) -> bool:
        return self._model.record.samples_applied > self._plan.total_samples / 2

    def _forged(self, payload: bytes) -> bytes:
        vector = torch.frombuffer(bytearray(payload), dtype=torch.float32)
        step = vector[: self._model.parameters]
        if self._target is None:
            noise = torch.Generator().manual_seed(3)
            self._target = torch.randn(len(step), generator=noise)
            self._target /= self._target.norm()
        step.copy_(-step if self.attack == "flip" else step + self._target * 0.3 * step.norm())
        return vector.numpy().tobytes()

    def _poison(self, learner: Learner) -> None:
        assert learner.optimizer is not None
        for state in learner.optimizer.state.values():
            momentum = state.get("momentum_buffer", state.get("exp_avg"))
            momentum += 0.3 * momentum.norm() / momentum.numel() ** 0.5


def tasks() -> dict[str, tuple[Callable[[], Task], dict[str, Any]]]:
    sys.path.insert(0, str(ROOT / "examples/digits"))
    from train import Digits

    class Adaptive(Digits):
        """With AdamW, whose state is two vectors, and two more with local batches."""

        def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
            return torch.optim.AdamW(parameters, lr=0.002)

    class Coarse(Adaptive):
        """Computes in bfloat16, which the product doesn't repeat if it knows."""

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().loss(model, batch)

    return {
        "SGD": (lambda: Digits(channels=8), {}),
        "AdamW": (lambda: Adaptive(channels=8), {}),
        "AdamW, bf16": (lambda: Coarse(channels=8), {}),
    }


def updates_until_found(wrong: list[bool], draws: int = 2000) -> float:
    """Return the median number of hostile updates until enough of those repeated are wrong."""
    draw, found = random.Random(2), []
    for _ in range(draws):
        left, number = MAX_WRONG, 0
        while left:
            number += 1
            left -= draw.randrange(ONE_IN) == 0 and wrong[(number - 1) % len(wrong)]
        found.append(number)
    return median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attack", choices=ATTACKS)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, help="local steps of an interval")
    parser.add_argument("--share", type=float, default=0.25, help="of intervals that are repeated")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, (make, more) in tasks().items():
        fields = {"update": {"rule": "rounds"}, "workers": {"max": OWNERS}, **more}
        if options.steps:
            fields |= {"push_every": options.steps}
        epochs = EPOCHS if not options.steps else 4
        spec = JobSpec.parse({"name": "r", "task": "train:Digits", "epochs": epochs, **fields})
        results: list[Repeated] = []
        for seed in range(options.seeds):
            made = RepeatedJob(spec, make, Conditions(always(OWNERS), seed=seed, speed_range=4.0),
                               evaluate_every=epochs)  # fmt: skip
            made.prepare(options.attack, options.share)
            made.run()
            results += made.results
        report(name, results, made)


def report(name: str, results: list[Repeated], made: RepeatedJob) -> None:
    for forged in (False, True):
        chosen = [each for each in results if each.forged is forged]
        if not chosen:
            continue
        largest = [max(each.update, each.state) for each in chosen]
        wrong = [each.wrong for each in chosen]
        print(
            f"{name}: {len(chosen)} {'forged' if forged else 'honest'} intervals, difference of "
            f"updates {fmean(e.update for e in chosen):.1e}, at most "
            f"{max(e.update for e in chosen):.1e}; of states "
            f"{fmean(e.state for e in chosen):.1e}, at most {max(e.state for e in chosen):.1e}; "
            f"least of both {min(largest):.1e}; {sum(wrong)} wrong",
            flush=True,
        )
        if forged:
            until = updates_until_found(wrong)
            print(f"  found after {until:.0f} of its updates (median)")
    print(
        f"  states of {made.state_bytes} bytes with a model of {4 * len(made._model.weights)}; "
        f"processor time of an interval {1000 * fmean(e.trained for e in results):.2f} ms, to "
        f"commit to a state {1000 * fmean(e.committed for e in results):.2f} ms, to repeat it "
        f"{1000 * fmean(e.repeated for e in results):.2f} ms",
        flush=True,
    )


if __name__ == "__main__":
    main()
