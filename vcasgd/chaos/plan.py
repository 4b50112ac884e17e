"""Random plan of kills. It depends only on the seed, so that runs can be repeated."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from vcasgd.chaos.killers import Target
from vcasgd.errors import SpecError

#: Targets in a stack without replicas.
UNREPLICATED = tuple(target for target in Target if target is not Target.FAILOVER)
_SERVERS = frozenset({Target.LEDGER, Target.TENSORS})
#: Range of seconds between the recovery from one group and the next group.
PAUSE_SECONDS = (0.3, 3.0)
#: Sizes of groups, drawn with equal probability.
GROUP_SIZES = (1, 1, 1, 2, 2, 3)
#: Probability that a group does not wait for the recovery from the previous one.
OVERLAP = 0.25


@dataclass(frozen=True)
class KillGroup:
    """Simultaneous kills.

    They happen ``pause`` seconds after the previous group if it ``overlaps``, or else after the
    recovery from it.
    """

    targets: tuple[Target, ...]
    pause: float
    overlaps: bool


def plan_kills(
    kills: int, rng: random.Random, among: Sequence[Target] = UNREPLICATED
) -> list[KillGroup]:
    """Return a plan with exactly ``kills`` kills, each target at least once, some at once.

    Raises :class:`SpecError` if there are fewer kills than targets.
    """
    if kills < len(among):
        raise SpecError(
            f"kills: {kills} is less than the number of targets, {len(among)}",
            remedy=f"use at least {len(among)}",
            field="kills",
        )
    targets = [*among, *rng.choices(list(among), k=kills - len(among))]
    rng.shuffle(targets)
    groups: list[KillGroup] = []
    while targets:
        group = _group(targets, max(rng.choice(GROUP_SIZES), 1 if groups else 2))
        overlaps = bool(groups) and rng.random() < OVERLAP
        groups.append(KillGroup(group, rng.uniform(*PAUSE_SECONDS), overlaps))
    return groups


def _excludes(group: list[Target], target: Target) -> bool:
    """Return True if the target can't die together with the group.

    Only one of a server and its replica can die at a time.
    """
    pair = {Target.FAILOVER} & {*group, target} and _SERVERS & {*group, target}
    return target in group or bool(pair)


def _group(targets: list[Target], size: int) -> tuple[Target, ...]:
    """Remove up to ``size`` targets from the list and return them.

    A part of the stack can die only once at a time; any number of machines can die.
    """
    group: list[Target] = []
    for target in list(targets):
        repeatable = target in (Target.WORKER, Target.WORKER_NOTICE)
        if len(group) < size and (repeatable or not _excludes(group, target)):
            group.append(target)
            targets.remove(target)
    return tuple(group)
