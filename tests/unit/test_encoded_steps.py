"""Steps of the published model, and the way from one version to another."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.payloads import random
from support.world import layout_of, spec_of
from torch import Tensor

from vcasgd.errors import InvalidUpdate, JobUnreadable
from vcasgd.learning.encodings.encoder import codec_for, step_format
from vcasgd.learning.encodings.steps import StepFormat, checksum
from vcasgd.learning.shards import Cut
from vcasgd.store.tensors.chunks import extended, path
from vcasgd.store.tensors.snapshot import MAX_STEPS, Meta, PublishedStep

LOW_BITS = ("int8", "int2")
FLOATS = 2001


def steps_of(codec: str, floats: int = FLOATS, *, table: bool = False) -> StepFormat | None:
    """Return the format of a job whose model has one statistic, the last element."""
    layout = layout_of(floats - 1, table=table)
    (part,) = Cut(layout.floats, layout.parameters, 1).parts
    update = spec_of(update={"rule": "async-local-sgd", "codec": codec}).update
    return step_format(update, layout, part)


def moved(steps: StepFormat, exact: Tensor, published: Tensor) -> memoryview:
    step = steps.advance(exact, published)
    assert step is not None
    return step


@pytest.mark.parametrize("codec", ["float32", "bfloat16"])
def test_codecs_without_a_residual_have_no_steps(codec: str) -> None:
    assert steps_of(codec) is None


@pytest.mark.parametrize("codec", [*LOW_BITS, "topk", "partition"])
def test_the_published_model_follows_the_exact_one(codec: str) -> None:
    steps, exact = steps_of(codec), random(FLOATS)
    assert steps is not None
    published = exact.clone()
    for seed in range(1, 6):
        exact += 1e-3 * random(FLOATS, seed)
        moved(steps, exact, published)
        # Statistics have no error.
        assert published[-1] == exact[-1]
    for _ in range(60):
        moved(steps, exact, published)

    assert (published - exact).norm() <= 1e-5 * exact.norm()


def test_rows_that_did_not_change_are_no_part_of_a_step() -> None:
    steps = steps_of("rows", 1001, table=True)
    assert steps is not None
    exact, published = torch.zeros(1001), torch.zeros(1001)
    exact[[5, 500]] = 1.5
    exact[-1] = 7.0

    step = moved(steps, exact, published)

    # The number of rows, the statistic, and two rows with their numbers.
    assert len(step) == 4 * (1 + 1 + 2 * 2)
    assert torch.equal(published, exact)


@pytest.mark.parametrize("far", [math.nan, math.inf, 1e35])
def test_a_model_that_is_too_far_away_has_no_step(far: float) -> None:
    steps = steps_of("int2")
    assert steps is not None
    exact = torch.zeros(2001)
    exact[3] = far

    published = torch.zeros(2001)
    assert steps.advance(exact, published) is None
    assert not published.any()


@given(st.binary(max_size=2000))
def test_any_bytes_are_a_step_or_refused(content: bytes) -> None:
    for codec in ("int2", "rows"):
        steps = steps_of(codec, 501, table=codec == "rows")
        assert steps is not None
        published = torch.zeros(501)
        try:
            steps.apply(memoryview(bytearray(content)), published)
        except InvalidUpdate:
            assert not published.any()
        else:
            assert published.isfinite().all()


def test_the_checksum_finds_one_bit() -> None:
    vector = random(300_000)
    other = vector.clone()
    other.view(torch.int32)[299_999] ^= 1

    assert checksum(vector) != checksum(other)
    assert 0 <= checksum(vector) < 2**53
    assert checksum(torch.empty(0)) == 0


def meta_with(*steps: tuple[int, int, int], version: int = 9, floats: int = 100) -> Meta:
    listed = tuple(PublishedStep(*each) for each in steps)
    return Meta(version, 7, floats, floats, "layout", stepped=True, steps=listed)


@pytest.mark.parametrize(
    ("base", "sizes"),
    [
        ((5, 6), [10, 20, 30]),
        ((7, 6), [20, 30]),
        ((8, 7), [30]),
        ((9, 7), None),  # It is the present one.
        ((8, 6), None),  # Another server's version.
        ((4, 6), None),
        (None, None),
    ],
)
def test_the_way_from_a_base(base: tuple[int, int] | None, sizes: list[int] | None) -> None:
    way = path(meta_with((5, 6, 10), (7, 6, 20), (8, 7, 30)), base)

    assert (None if way is None else [step.size for step in way]) == sizes
    if way is not None:
        assert (way[-1].version, way[-1].token) == (9, 7)


def test_a_way_with_more_bytes_than_the_model_is_none() -> None:
    present = meta_with((7, 7, 150), (8, 7, 399), floats=100)

    assert path(present, (7, 7)) is None
    assert path(present, (8, 7)) is not None


def test_the_list_has_no_more_than_what_is_worth_fetching() -> None:
    meta = meta_with(floats=100)
    for version in range(10, 20):
        meta = meta_with(
            *((each.version, each.token, each.size) for each in extended(meta, 150)),
            version=version,
        )
        assert len(meta.steps) <= 2
    assert [each.version for each in meta.steps] == [17, 18]
    assert extended(meta, 400) == ()
    assert len(extended(meta_with(*[(1, 1, 1)] * MAX_STEPS), 1)) == MAX_STEPS


def test_a_description_with_too_many_steps_can_not_be_read() -> None:
    meta = meta_with(*[(1, 1, 1)] * MAX_STEPS)
    assert Meta.from_json(meta.to_json().encode()) == meta
    too_many = meta_with(*[(1, 1, 1)] * (MAX_STEPS + 1))
    negative = meta_with((1, 1, -1))
    for bad in (too_many, negative):
        with pytest.raises(JobUnreadable):
            Meta.from_json(bad.to_json().encode())


@pytest.mark.parametrize(
    ("megabytes", "codec"),
    [(1000, "float32"), (125, "float32"), (124, "int8"), (50, "int8"), (49, "int2"), (0, "int2")],
)
def test_the_encoding_follows_the_rate_of_the_link(megabytes: float, codec: str) -> None:
    assert codec_for(megabytes * 1e6) == codec
