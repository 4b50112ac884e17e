"""Update rules: numbers computed by hand, and properties of all numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vcasgd.errors import InvalidUpdate, SpecError
from vcasgd.learning.layout import TensorKind, as_kind
from vcasgd.learning.rules import (
    Context,
    Rule,
    average_coefficients,
    interval_start,
    longest_interval,
    make_rule,
    merge_integers,
    staleness_weight,
)
from vcasgd.spec.job import JobSpec
from vcasgd.spec.update import AsyncLocalSgdSpec, SmaSpec, Staleness, Update, VcAsgdSpec

POLYNOMIAL = Staleness(function="polynomial")
FRESH = Context(staleness=0, epoch=1, parameters=2)
STALE = replace(FRESH, staleness=3)


def local_sgd(**fields: Any) -> AsyncLocalSgdSpec:
    return AsyncLocalSgdSpec(rule="async-local-sgd", **fields)


@pytest.mark.parametrize(
    ("update", "payload", "context", "expected"),
    [
        # 0.75·W + 0.25·w
        (VcAsgdSpec(alpha=0.75), [14.0, 20.0, 0.0], FRESH, [11.0, 20.0, 22.5]),
        # The update's part is 1 / (epoch + 1).
        (VcAsgdSpec(), [70.0, 80.0, 90.0], FRESH, [40.0, 50.0, 60.0]),
        (VcAsgdSpec(), [70.0, 80.0, 90.0], replace(FRESH, epoch=2), [30.0, 40.0, 50.0]),
        (VcAsgdSpec(), [70.0, 80.0, 90.0], replace(FRESH, epoch=9), [16.0, 26.0, 36.0]),
        # 0.5 · 4^-½ = 0.25 of the way
        (VcAsgdSpec(alpha=0.5, staleness=POLYNOMIAL), [14.0, 24.0, 34.0], STALE, [11, 21, 31]),
        # 10 + 0.5·4, 20 − 0.5·2; 0.75·30 + 0.25·70
        (local_sgd(eta=0.5, statistics_mix=0.25), [4.0, -2.0, 70.0], FRESH, [12.0, 19.0, 40.0]),
        # s(3) = ½
        (local_sgd(statistics_mix=0.5, staleness=POLYNOMIAL), [4.0, 8, 70], STALE, [12, 24, 40]),
    ],
)
def test_an_update_is_blended_by_the_formula(
    update: Update, payload: list[float], context: Context, expected: list[float]
) -> None:
    """The vector is [10, 20, 30], whose last element is a statistic."""
    weights = torch.tensor([10.0, 20.0, 30.0])

    make_rule(update).blend(weights, torch.tensor(payload), context)

    assert weights.tolist() == pytest.approx(expected)


def test_sma_without_momentum_moves_the_weights_and_the_worker() -> None:
    rule = make_rule(SmaSpec(rule="sma", moving_rate=0.25, momentum=0))
    weights, local = torch.tensor([10.0, 20.0]), torch.tensor([14.0, 12.0])

    start = interval_start(rule, local, weights)
    rule.blend(weights, local, replace(FRESH, state=torch.zeros(2)))

    assert weights.tolist() == [11.0, 18.0]  # W + 0.25·(w − W)
    assert start.tolist() == [13.0, 14.0]  # w − 0.25·(w − W)


def test_a_worker_without_its_own_copy_starts_from_the_snapshot() -> None:
    base, local = torch.tensor([1.0]), torch.tensor([5.0])

    assert interval_start(make_rule(SmaSpec(rule="sma")), None, base) is base
    assert interval_start(make_rule(VcAsgdSpec()), local, base) is base


def test_sma_has_momentum_for_parameters_only() -> None:
    rule = make_rule(SmaSpec(rule="sma", moving_rate=0.5, momentum=0.5))
    weights, state = torch.tensor([0.0, 8.0]), torch.zeros(2)
    context = Context(0, 1, 1, state=state)

    rule.blend(weights, torch.tensor([4.0, 4.0]), context)
    assert weights.tolist() == [2.0, 6.0]  # v = 0.5·4
    rule.blend(weights, torch.tensor([4.0, 4.0]), context)

    assert weights.tolist() == [4.0, 5.0]  # v = 0.5·2 + 0.5·(4 − 2) = 2
    assert state.tolist() == [2.0, 0.0]


EVERY_RULE: list[Update] = [VcAsgdSpec(), SmaSpec(rule="sma"), local_sgd()]


@pytest.mark.parametrize("update", EVERY_RULE, ids=lambda update: update.rule)
def test_a_factor_shortens_the_step_of_every_rule(update: Update) -> None:
    def blended(factor: float) -> Tensor:
        weights, state = torch.tensor([10.0, 20.0, 30.0]), torch.ones(3)
        context = replace(FRESH, state=state, factor=factor)
        make_rule(update).blend(weights, torch.tensor([1.0, 2.0, 3.0]), context)
        return weights

    whole, half = blended(1.0), blended(0.5)

    assert not torch.equal(whole, torch.tensor([10.0, 20.0, 30.0]))
    torch.testing.assert_close(half - whole, torch.tensor([10.0, 20.0, 30.0]) - half)


@pytest.mark.parametrize("update", EVERY_RULE, ids=lambda update: update.rule)
def test_statistics_of_many_workers_converge_without_overshoot(update: Update) -> None:
    rule, weights, state = make_rule(update), torch.zeros(1), torch.zeros(1)

    for _ in range(12):
        before = weights.item()
        context = Context(0, 1, 0, state=state)
        rule.blend(weights, torch.tensor([8.0]), context)
        assert before <= weights.item() <= 8.0

    assert weights.item() > 4
    assert state.item() == 0


@pytest.mark.parametrize(
    ("kind", "merged"),
    [
        (TensorKind.INTEGER, [5, 4]),
        (TensorKind.COUNT, [8, 5]),
        (TensorKind.LATEST, [3, 4]),
        (TensorKind.LATEST_FLOAT, [3.0, 4.0]),
        (TensorKind.SUM, [8.0, 5.0]),
        (TensorKind.MAX, [5.0, 4.0]),
        (TensorKind.MIN, [3.0, 1.0]),
    ],
)
def test_integer_state_is_merged_as_its_kind_says(kind: TensorKind, merged: list[float]) -> None:
    current, update = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    part = slice(1, 3)
    as_kind(current[part], kind).copy_(torch.tensor([5, 1]))
    as_kind(update[part], kind).copy_(torch.tensor([3, 4]))

    merge_integers(current, update, [(kind, part)])

    assert as_kind(current[part], kind).tolist() == merged
    assert current[0] == 0
    with pytest.raises(InvalidUpdate):
        merge_integers(current, torch.tensor([9]), [(kind, part)])


def test_numbers_that_are_not_finite_change_no_counter() -> None:
    current = torch.zeros(2, dtype=torch.int64)
    nan = torch.tensor([torch.nan], dtype=torch.float64).view(torch.int64)
    counters = [(TensorKind.COUNT, slice(0, 1)), (TensorKind.MIN, slice(1, 2))]

    with pytest.raises(InvalidUpdate, match="not finite"):
        merge_integers(current, torch.cat([torch.tensor([7]), nan]), counters)

    assert current.tolist() == [0, 0]


mixes = st.floats(0.001, 0.999)
averaging = st.builds(VcAsgdSpec, alpha=st.one_of(st.just("var"), mixes)).map(make_rule)
differences = {"eta": st.floats(0.01, 10), "statistics_mix": st.floats(0.01, 1)}
rules = st.one_of(
    averaging,
    st.builds(SmaSpec, rule=st.just("sma"), moving_rate=mixes, momentum=mixes).map(make_rule),
    st.builds(local_sgd, **differences).map(make_rule),
)
numbers = st.floats(-(2.0**100), 2.0**100, width=32)
pairs = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=70)


def columns(values: list[tuple[float, float]]) -> tuple[Tensor, Tensor]:
    first, second = torch.tensor(values, dtype=torch.float32).unbind(1)
    return first.contiguous(), second.contiguous()


@given(rules, pairs, st.data())
def test_blending_by_shard_equals_blending_the_whole(
    rule: Rule, values: list[tuple[float, float]], data: st.DataObject
) -> None:
    weights, update = columns(values)
    cut = data.draw(st.integers(0, len(values)))
    context = Context(
        staleness=2,
        epoch=3,
        parameters=data.draw(st.integers(0, len(values))),
        state=update.flip(0) / 2,
        factor=data.draw(st.floats(0.05, 1)),
    )
    parts = [(0, cut), (cut, len(values))]
    shards = [weights[start:stop].clone() for start, stop in parts]
    assert context.state is not None
    memories = [context.state[start:stop].clone() for start, stop in parts]

    for shard, memory, (start, stop) in zip(shards, memories, parts, strict=True):
        rule.blend(shard, update[start:stop], replace(context.piece(start, stop), state=memory))
    rule.blend(weights, update, context)

    torch.testing.assert_close(torch.cat(shards), weights)
    torch.testing.assert_close(torch.cat(memories), context.state)
    assert bool(weights.isfinite().all())


@given(averaging, pairs, st.integers(0, 50))
def test_averaging_stays_between_the_old_and_the_new_weights(
    rule: Rule, values: list[tuple[float, float]], staleness: int
) -> None:
    weights, update = columns(values)
    low, high = torch.minimum(weights, update), torch.maximum(weights, update)

    rule.blend(weights, update, Context(staleness, 1, 0))

    assert low.le(weights).all()
    assert weights.le(high).all()


# --- s(τ): numbers computed by hand -------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "tau", "expected"),
    [
        ({"function": "constant"}, 0, 1.0),
        ({"function": "constant"}, 1000, 1.0),
        ({"function": "polynomial"}, -1, 1.0),
        ({"function": "polynomial"}, 0, 1.0),
        ({"function": "polynomial"}, 3, 0.5),  # 4^-½
        ({"function": "polynomial", "a": 2}, 3, 1 / 16),
        ({"function": "hinge"}, 4, 1.0),
        ({"function": "hinge"}, 5, 1 / 11),  # 1/(10·(5−4)+1), as in the paper
        ({"function": "hinge", "a": 0.5, "b": 2}, 4, 0.5),
    ],
)
def test_weights_of_stale_updates(spec: dict[str, object], tau: int, expected: float) -> None:
    assert staleness_weight(Staleness.model_validate(spec), tau) == pytest.approx(expected)


stalenesses = st.builds(
    Staleness,
    function=st.sampled_from(["constant", "polynomial", "hinge"]),
    a=st.floats(0.01, 20),
    b=st.floats(0, 20),
)


@given(stalenesses, st.integers(0, 10_000))
def test_older_updates_never_weigh_more(spec: Staleness, tau: int) -> None:
    assert 0 < staleness_weight(spec, tau + 1) <= staleness_weight(spec, tau) <= 1


# --- the average of a model over steps of which only the versions between them are known --------


@pytest.mark.parametrize("decay", [0.1, 0.9, 0.999, 0.99999])
@pytest.mark.parametrize("steps", [1, 2, 7, 100])
def test_steps_on_a_line_are_averaged_as_one_by_one(decay: float, steps: int) -> None:
    first, last, average = 3.0, 5.0, -1.0

    expected = average
    for step in range(1, steps + 1):
        weight = first + (last - first) * step / steps
        expected = decay * expected + (1 - decay) * weight

    kept, share = average_coefficients(decay, steps)
    assert kept * average + (1 - kept) * first + share * (last - first) == pytest.approx(expected)


def test_parts_of_a_step_add_up_to_it() -> None:
    halves = average_coefficients(0.9, 0.5)[0] ** 2

    assert halves == pytest.approx(average_coefficients(0.9, 1)[0])


@pytest.mark.parametrize(("decay", "steps"), [(0.999, 62.5), (0.99, 6.25), (0.5, 1.0)])
def test_an_average_has_enough_versions(decay: float, steps: float) -> None:
    assert longest_interval(decay) == pytest.approx(steps)


def spec(**fields: object) -> JobSpec:
    return JobSpec.parse({"name": "j", "task": "t:T", "epochs": 1, **fields})


def test_a_number_is_the_decay() -> None:
    assert spec(ema=0.999).ema == spec(ema={"decay": 0.999}).ema
    assert spec().ema is None


@pytest.mark.parametrize("ema", [0, 1, 1.5, -0.1, "0.9", True, {"evaluate": "instead"}])
def test_other_averages_are_refused(ema: object) -> None:
    with pytest.raises(SpecError, match="ema"):
        spec(ema=ema)


def test_a_rule_that_averages_itself_is_refused() -> None:
    with pytest.raises(SpecError, match="ema can't be combined with the rule sma"):
        spec(ema=0.9, update={"rule": "sma"})
