"""The plan of an audit: what is killed when."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcasgd.chaos.killers import Target
from vcasgd.chaos.plan import UNREPLICATED, plan_strikes
from vcasgd.errors import SpecError

WORKERS = {Target.WORKER, Target.WORKER_NOTICE}


@pytest.mark.parametrize("among", [UNREPLICATED, tuple(Target)])
@given(kills=st.integers(len(Target), 60), seed=st.integers(0, 2**32))
def test_every_target_is_hit_and_no_kill_is_missing(
    among: tuple[Target, ...], kills: int, seed: int
) -> None:
    strikes = plan_strikes(kills, random.Random(seed), among)

    hits = Counter(target for strike in strikes for target in strike.targets)
    assert hits.total() == kills
    assert set(hits) == set(among)
    assert any(len(strike.targets) > 1 for strike in strikes), "several at once"


@given(seed=st.integers(0, 2**32))
def test_a_part_of_the_stack_dies_only_once_in_a_strike(seed: int) -> None:
    for strike in plan_strikes(40, random.Random(seed)):
        parts = [target for target in strike.targets if target not in WORKERS]
        assert len(parts) == len(set(parts))


@given(seed=st.integers(0, 2**32))
def test_of_a_server_and_its_replica_only_one_dies_in_a_strike(seed: int) -> None:
    for strike in plan_strikes(40, random.Random(seed), tuple(Target)):
        if Target.FAILOVER in strike.targets:
            assert not {Target.LEDGER, Target.TENSORS} & set(strike.targets)


def test_the_same_seed_gives_the_same_plan() -> None:
    assert plan_strikes(12, random.Random(7)) == plan_strikes(12, random.Random(7))


def test_too_few_kills_are_refused() -> None:
    with pytest.raises(SpecError, match="use at least 7") as caught:
        plan_strikes(6, random.Random(0))
    assert caught.value.field == "kills"
