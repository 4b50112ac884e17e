"""Kill plan of an audit."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcasgd.chaos.audit import UNREPLICATED, plan_kills
from vcasgd.chaos.killers import Target
from vcasgd.errors import SpecError

WORKERS = {Target.WORKER, Target.WORKER_NOTICE}


@pytest.mark.parametrize("among", [UNREPLICATED, tuple(Target)])
@given(kills=st.integers(len(Target), 60), seed=st.integers(0, 2**32))
def test_every_target_is_hit_and_no_kill_is_missing(
    among: tuple[Target, ...], kills: int, seed: int
) -> None:
    groups = plan_kills(kills, random.Random(seed), among)

    hits = Counter(target for group in groups for target in group.targets)
    assert hits.total() == kills
    assert set(hits) == set(among)
    assert any(len(group.targets) > 1 for group in groups), "several at once"


@given(seed=st.integers(0, 2**32))
def test_part_dies_only_once_in_a_group(seed: int) -> None:
    for group in plan_kills(40, random.Random(seed)):
        parts = [target for target in group.targets if target not in WORKERS]
        assert len(parts) == len(set(parts))


@given(seed=st.integers(0, 2**32))
def test_server_and_replica_never_die_in_the_same_group(seed: int) -> None:
    for group in plan_kills(40, random.Random(seed), tuple(Target)):
        if Target.FAILOVER in group.targets:
            assert not {Target.LEDGER, Target.TENSORS} & set(group.targets)


def test_the_same_seed_gives_the_same_plan() -> None:
    assert plan_kills(12, random.Random(7)) == plan_kills(12, random.Random(7))


def test_too_few_kills_are_refused() -> None:
    with pytest.raises(SpecError, match="use at least 7") as caught:
        plan_kills(6, random.Random(0))
    assert caught.value.field == "kills"
