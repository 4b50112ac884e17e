"""Which kills, when, from a seed: pure, so that a run can be repeated and the plan tested."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from vcasgd.chaos.killers import Target
from vcasgd.errors import SpecError

#: what there is to kill in a stack without replicas
UNREPLICATED = tuple(target for target in Target if target is not Target.FAILOVER)
_SERVERS = frozenset({Target.LEDGER, Target.TENSORS})
#: seconds between the recovery from one group of kills and the next group
PAUSE_SECONDS = (0.3, 3.0)
#: how many fall in the same moment, drawn from this
GROUP_SIZES = (1, 1, 1, 2, 2, 3)
#: how often a group does not wait for the recovery from the one before
OVERLAP = 0.25


@dataclass(frozen=True)
class Strike:
    """Kills that fall in the same moment, ``pause`` seconds after the last strike, or after
    the recovery from it where ``overlaps`` is false."""

    targets: tuple[Target, ...]
    pause: float
    overlaps: bool


def plan_strikes(
    kills: int, rng: random.Random, among: Sequence[Target] = UNREPLICATED
) -> list[Strike]:
    """Exactly ``kills`` kills, each target at least once, several of them at once.

    Raises :class:`SpecError` where there are fewer kills than targets.
    """
    if kills < len(among):
        raise SpecError(
            f"kills: {kills} can't hit each of the {len(among)} targets",
            remedy=f"use at least {len(among)}",
            field="kills",
        )
    targets = [*among, *rng.choices(list(among), k=kills - len(among))]
    rng.shuffle(targets)
    strikes: list[Strike] = []
    while targets:
        group = _group(targets, max(rng.choice(GROUP_SIZES), 1 if strikes else 2))
        overlaps = bool(strikes) and rng.random() < OVERLAP
        strikes.append(Strike(group, rng.uniform(*PAUSE_SECONDS), overlaps))
    return strikes


def _excludes(group: list[Target], target: Target) -> bool:
    """Of a server and its replica only one may die at a time."""
    pair = {Target.FAILOVER} & {*group, target} and _SERVERS & {*group, target}
    return target in group or bool(pair)


def _group(targets: list[Target], size: int) -> tuple[Target, ...]:
    """Takes up to ``size`` targets from the list; a part of the stack can die only once at a
    time, machines can die in any number."""
    group: list[Target] = []
    for target in list(targets):
        repeatable = target in (Target.WORKER, Target.WORKER_NOTICE)
        if len(group) < size and (repeatable or not _excludes(group, target)):
            group.append(target)
            targets.remove(target)
    return tuple(group)
