"""Screening finds owners whose work is wrong, and accuses no honest one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from vcasgd.verification.screening import (
    FAR_TOO_LONG,
    OWN,
    SKETCH,
    SUSPECT,
    WINDOW,
    Screening,
)

LENGTH, COMMON = 3000, 20
OWNERS = ("alice", "bob", "carol", "mallory")
Forge = Callable[[Tensor, "Work"], Tensor]


pytestmark = pytest.mark.usefixtures("one_thread")


class Work:
    """Steps towards a point that all owners share, with noise in a few common directions."""

    def __init__(self, seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.directions = torch.randn(COMMON, LENGTH, generator=self.random) / LENGTH**0.5
        self.model = torch.zeros(LENGTH)
        self.goal = self.directions[0].clone()
        self.kept: Tensor | None = None

    def step(self, noise: float = 0.5, drift: float = 0.0) -> Tensor:
        amounts = torch.randn(COMMON, generator=self.random) * noise / COMMON**0.5
        step = 0.1 * (self.goal - self.model) + 0.1 * amounts @ self.directions
        self.kept = step if self.kept is None else self.kept
        self.goal = self.goal + drift * self.directions[1]
        return step

    def noise(self) -> Tensor:
        return torch.randn(LENGTH, generator=self.random)


def train(
    forge: Forge | None = None,
    owners: Iterable[str] = OWNERS,
    updates: int = 4 * WINDOW + 8,
    noise: dict[str, float] | None = None,
    samples: dict[str, int] | None = None,
    drift: float = 0.0,
) -> tuple[list[tuple[int, str, str, int | None]], list[tuple[int, str]]]:
    """Apply updates of each owner in turn; the last one forges its second half.

    Returns accusations and refusals with the number of the update of the owner; accusations also
    with the reason, and the version before.
    """
    work, screening = Work(), Screening(LENGTH, 7)
    accused, refused = [], []
    for number in range(updates):
        for owner in owners:
            step = work.step((noise or {}).get(owner, 0.5), drift)
            if forge is not None and owner == OWNERS[-1] and number >= updates // 2:
                step = forge(step, work)
            count = (samples or {}).get(owner, 4)
            measure = screening.measure(step.clone(), work.model, LENGTH, count)
            if screening.refusal(owner, measure) is not None:
                refused.append((number, owner))
                continue
            work.model += step / len(OWNERS)
            if found := screening.add(owner, measure, number):
                accused.append((number, owner, found, screening.version_before(owner)))
    return accused, refused


@pytest.mark.parametrize(
    ("noise", "samples"),
    [({}, {}), ({"alice": 1.5}, {}), ({"bob": 0.1}, {}), ({}, {"carol": 1, "bob": 16})],
    ids=["equal machines", "a smaller batch", "a larger batch", "other intervals"],
)
def test_honest_owners_are_not_accused(noise: dict[str, float], samples: dict[str, int]) -> None:
    assert train(noise=noise, samples=samples) == ([], [])


@pytest.mark.parametrize(
    ("forge", "words"),
    [
        (lambda step, _: -step, "oppose"),
        (lambda step, _: 5 * step, "as long as those of any other owner"),
        (lambda step, work: (noise := work.noise()) * step.norm() / noise.norm(), "in common"),
        (lambda _step, work: work.kept, "equal to earlier ones"),
    ],
    ids=["flipped", "scaled", "random", "replayed"],
)
def test_a_hostile_owner_is_accused(forge: Forge, words: str) -> None:
    # While the model still learns something; later, a flipped step is noise like any other.
    accused, _ = train(forge, drift=0.02)

    number, owner, why, version = accused[0]
    assert {name for _, name, *_ in accused} == {"mallory"}, owner
    assert words in why
    # Its updates since well before the attack may be wrong.
    assert version == number - SUSPECT + 1
    assert version <= 2 * WINDOW + 4 <= number


@pytest.mark.ci
def test_an_owner_of_most_updates_is_compared_with_the_others_too() -> None:
    # Given one that makes seven updates for each of another one
    owners, updates = (*OWNERS, *6 * OWNERS[-1:]), 2 * WINDOW + 8

    flipped, _ = train(lambda step, _: -step, owners, updates, drift=0.02)
    honest = train(None, owners, updates, drift=0.02)

    assert {name for _, name, *_ in flipped} == {"mallory"}
    assert honest == ([], [])


def test_a_single_update_that_is_far_too_long_is_refused() -> None:
    accused, refused = train(lambda step, _: 3 * FAR_TOO_LONG * step)

    assert {owner for _, owner in refused} == {"mallory"}
    assert not accused


def test_nobody_is_accused_by_one_other_owner_alone() -> None:
    accused, refused = train(lambda step, _: -step, owners=("alice", "mallory"))

    assert (accused, refused) == ([], [])


def test_machines_of_ones_own_accuse_and_are_not_accused() -> None:
    accused, _ = train(lambda step, work: work.noise() * step.norm(), owners=(OWN, "mallory"))

    assert {owner for _, owner, *_ in accused} <= {"mallory"}
    assert accused or train(lambda step, work: work.noise() * step.norm(), (OWN, "mallory"))[1]


def test_sketches_keep_inner_products() -> None:
    random, screening = torch.Generator().manual_seed(1), Screening(10 * SKETCH + 5, 3)
    one, other = torch.randn(2, 10 * SKETCH + 5, generator=random)
    other = one + other

    exact = float(torch.cosine_similarity(one, other, dim=0))
    kept = float(torch.cosine_similarity(screening.sketch(one), screening.sketch(other), dim=0))

    assert kept == pytest.approx(exact, abs=0.06)
