"""Update rules, with numbers computed by hand and properties that hold for all numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vcasgd.errors import InvalidUpdate
from vcasgd.learning.rules import Context, Payload, Rule, make_rule, merge_integers, payload_of
from vcasgd.learning.vector import Layout, gather
from vcasgd.spec import AsyncLocalSgd, Staleness, Update, VcAsgd

POLYNOMIAL = Staleness(function="polynomial")
FRESH = Context(staleness=0, epoch=1, parameters=2)


def blended(update: Update, payload: list[float], context: Context = FRESH) -> tuple[object, float]:
    """What becomes of the vector [10, 20, 30], whose last element is a statistic."""
    weights = torch.tensor([10.0, 20.0, 30.0])
    given_weight = make_rule(update).blend(weights, torch.tensor(payload), context)
    return weights.tolist(), given_weight


def test_vc_asgd_with_a_constant_alpha() -> None:
    weights, given_weight = blended(VcAsgd(alpha=0.75), [14.0, 20.0, 0.0])

    assert weights == [11.0, 20.0, 22.5]  # 0.75·W + 0.25·w
    assert given_weight == 0.25


@pytest.mark.parametrize(("epoch", "mixing"), [(1, 1 / 2), (2, 1 / 3), (9, 1 / 10)])
def test_vc_asgd_with_variable_alpha(epoch: int, mixing: float) -> None:
    weights, given_weight = blended(VcAsgd(), [70.0, 80.0, 90.0], replace(FRESH, epoch=epoch))

    assert weights == pytest.approx([10 + 60 * mixing, 20 + 60 * mixing, 30 + 60 * mixing])
    assert given_weight == pytest.approx(mixing)  # 1 − e/(e+1)


def test_vc_asgd_trusts_a_stale_update_less() -> None:
    update = VcAsgd(alpha=0.5, staleness=POLYNOMIAL)

    weights, given_weight = blended(update, [14.0, 24.0, 34.0], replace(FRESH, staleness=3))

    assert weights == [11.0, 21.0, 31.0]  # 0.5 · 4^-½ = 0.25 of the way
    assert given_weight == 0.25


def test_async_local_sgd_adds_differences_and_averages_statistics() -> None:
    update = AsyncLocalSgd(rule="async-local-sgd", eta=0.5, statistics_mix=0.25)

    weights, given_weight = blended(update, [4.0, -2.0, 70.0])

    assert weights == [12.0, 19.0, 40.0]  # 10 + 0.5·4, 20 − 0.5·2; 0.75·30 + 0.25·70
    assert given_weight == 0.5


def test_async_local_sgd_trusts_a_stale_update_less() -> None:
    update = AsyncLocalSgd(rule="async-local-sgd", statistics_mix=0.5, staleness=POLYNOMIAL)

    weights, given_weight = blended(update, [4.0, 8.0, 70.0], replace(FRESH, staleness=3))

    assert weights == [12.0, 24.0, 40.0]  # s(3) = ½
    assert given_weight == 0.5


@pytest.mark.parametrize("update", [VcAsgd(), AsyncLocalSgd(rule="async-local-sgd")])
@pytest.mark.parametrize("length", [1, 2, 4])
def test_an_update_of_another_length_changes_nothing(update: Update, length: int) -> None:
    weights = torch.tensor([10.0, 20.0, 30.0])

    with pytest.raises(InvalidUpdate) as caught:
        make_rule(update).blend(weights, torch.zeros(length), FRESH)

    assert caught.value.reason == "length"
    assert weights.tolist() == [10.0, 20.0, 30.0]


def test_batch_norm_statistics_of_many_workers_do_not_add_up() -> None:
    # Given four workers that all measured a running mean of 8 from the global 0
    norm = nn.BatchNorm1d(1)
    layout = Layout.of(norm)
    weights = torch.zeros(layout.floats)
    gather(norm, layout, weights, torch.zeros(layout.integers, dtype=torch.int64))
    base, local = weights.clone(), weights.clone()
    local[layout.parameters] = 8.0
    rule = make_rule(AsyncLocalSgd(rule="async-local-sgd", statistics_mix=0.5))
    payload = payload_of(rule.payload, layout.parameters, local, base, torch.empty_like(local))

    # When all four push
    seen = []
    for _ in range(4):
        rule.blend(weights, payload, Context(0, 1, layout.parameters))
        seen.append(weights[layout.parameters].item())

    # Then the mean closes in on 8 instead of passing 8 with the second
    assert seen == [4.0, 6.0, 7.0, 7.5]


def test_payloads() -> None:
    local, base = torch.tensor([3.0, 5.0, 9.0]), torch.tensor([1.0, 1.0, 1.0])
    out = torch.full((3,), -1.0)

    assert payload_of(Payload.WEIGHTS, 2, local, base, out) is local
    assert out.tolist() == [-1.0, -1.0, -1.0]
    assert payload_of(Payload.DELTA, 2, local, base, out) is out
    assert out.tolist() == [2.0, 4.0, 9.0]


def test_rules_say_what_they_want() -> None:
    assert make_rule(VcAsgd()).payload is Payload.WEIGHTS
    assert make_rule(AsyncLocalSgd(rule="async-local-sgd")).payload is Payload.DELTA


def test_counters_never_run_backwards() -> None:
    current = torch.tensor([5, 1], dtype=torch.int64)

    merge_integers(current, torch.tensor([3, 4]))

    assert current.tolist() == [5, 4]
    with pytest.raises(InvalidUpdate):
        merge_integers(current, torch.tensor([9]))


rules = st.one_of(
    st.builds(VcAsgd, alpha=st.one_of(st.just("var"), st.floats(0.001, 0.999))),
    st.builds(
        AsyncLocalSgd,
        rule=st.just("async-local-sgd"),
        eta=st.floats(0.01, 10),
        statistics_mix=st.floats(0.01, 1),
    ),
).map(make_rule)
numbers = st.floats(-(2.0**100), 2.0**100, width=32)
pairs = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=70)


def columns(values: list[tuple[float, float]]) -> tuple[Tensor, Tensor]:
    first, second = torch.tensor(values, dtype=torch.float32).unbind(1)
    return first.contiguous(), second.contiguous()


@settings(deadline=None)
@given(rules, pairs, st.data())
def test_shard_by_shard_is_the_same_as_the_whole(
    rule: Rule, values: list[tuple[float, float]], data: st.DataObject
) -> None:
    weights, update = columns(values)
    cut = data.draw(st.integers(0, len(values)))
    context = Context(2, 3, data.draw(st.integers(0, len(values))))
    shards = [weights[:cut].clone(), weights[cut:].clone()]

    rule.blend(weights, update, context)
    rule.blend(shards[0], update[:cut], context)
    rule.blend(shards[1], update[cut:], replace(context, parameters=context.parameters - cut))

    torch.testing.assert_close(torch.cat(shards), weights)


@settings(deadline=None)
@given(st.one_of(st.just("var"), st.floats(0.001, 0.999)), pairs, st.integers(0, 50))
def test_averaging_stays_between_old_and_new(
    alpha: float, values: list[tuple[float, float]], staleness: int
) -> None:
    weights, update = columns(values)
    low, high = torch.minimum(weights, update), torch.maximum(weights, update)

    given_weight = make_rule(VcAsgd(alpha=alpha, staleness=POLYNOMIAL)).blend(
        weights, update, Context(staleness, 1, 0)
    )

    assert 0 < given_weight < 1
    assert low.le(weights).all()
    assert weights.le(high).all()
