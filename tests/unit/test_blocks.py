"""Payloads in blocks: int8 and sparse blocks, exact statistics, error feedback."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.payloads import decoded, joined, magnitudes, random
from torch import Tensor

from vcasgd.learning.encodings import CODECS, Float32, Int8, Partition, TopK
from vcasgd.learning.encodings.blocks import BlockFormat, EncodedBlocks, ErrorFeedback


def formats_of(*names: str) -> st.SearchStrategy[BlockFormat]:
    """Generate formats with one of the codecs, 0 to 3000 elements and any number of parameters."""
    return st.builds(
        lambda name, floats, share: BlockFormat(CODECS[name](), floats, int(share * floats)),
        st.sampled_from(names),
        st.integers(0, 3000),
        st.floats(0, 1),
    )


dense = formats_of("float32", "bfloat16", "int8")
formats = formats_of("float32", "bfloat16", "int8", "int2", "topk", "partition")
lossy = formats_of("int8", "int2", "topk", "partition")


def encoded(fmt: BlockFormat, vector: Tensor, chunk: int = 4096) -> memoryview:
    return joined(EncodedBlocks(fmt, vector), chunk)


def test_a_block_of_int8_by_hand() -> None:
    payload = bytes(Int8().encode(torch.tensor([254.0, -127.0, 2.9, 0.9])))

    # the scale is 254 / 127 = 2; 2.9 rounds to 1 · 2, 0.9 to 0
    assert payload == struct.pack("<f4b", 2.0, 127, -64, 1, 0) + bytes(248)


@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), max_size=600))
def test_int8_is_within_half_a_step_of_its_block(values: list[float]) -> None:
    vector = torch.tensor(values)
    fmt = BlockFormat(Int8(), len(values), len(values))

    result = decoded(fmt, encoded(fmt, vector))

    for start in range(0, len(values), Int8.block_floats):
        block = vector[start : start + Int8.block_floats]
        bound = block.abs().max() / 254 * (1 + 1e-5) + 2e-36  # a smaller scale counts as 0
        assert (result[start : start + len(block)] - block).abs().max() <= bound


def test_statistics_are_exact_although_parameters_are_rounded() -> None:
    # a small variance next to a large mean, behind a large difference
    vector = torch.tensor([100.0, 0.001, 1000.0, 1e-5])
    fmt = BlockFormat(Int8(), 4, 2)

    result = decoded(fmt, encoded(fmt, vector))

    assert result.tolist() == [100.0, 0.0, 1000.0, vector[3].item()]
    assert fmt.size == 256 + 2 * 4


@given(dense, st.integers(0, 5), st.sampled_from([256, 512, 4096]))
def test_size_and_pieces_match_the_whole(fmt: BlockFormat, seed: int, chunk: int) -> None:
    vector = random(fmt.floats, seed)

    payload = encoded(fmt, vector, chunk)

    assert len(payload) == fmt.size == len(EncodedBlocks(fmt, vector))
    assert torch.equal(decoded(fmt, payload, 300), decoded(fmt, payload, 100_000))
    torch.testing.assert_close(decoded(fmt, payload), vector, rtol=0.01, atol=0.02)


@given(formats, st.integers(0, 5))
def test_no_number_exceeds_the_maximum_magnitude(fmt: BlockFormat, seed: int) -> None:
    payload = encoded(fmt, random(fmt.floats, seed))

    bound = max(magnitudes(fmt, payload), default=0.0)

    assert all(abs(number) <= bound for number in decoded(fmt, payload).tolist())
    assert bound < 10


# not partition, which sends only a part of the numbers
@given(
    formats_of("float32", "bfloat16", "int8", "int2", "topk"),
    st.data(),
    st.sampled_from([math.nan, math.inf, -math.inf]),
)
def test_a_number_that_is_not_finite_is_detected_at_any_position(
    fmt: BlockFormat, data: st.DataObject, bad: float
) -> None:
    vector = random(fmt.floats)
    if fmt.floats == 0:
        return
    vector[data.draw(st.integers(0, fmt.floats - 1))] = bad

    assert not all(each <= 1e30 for each in magnitudes(fmt, encoded(fmt, vector)))


@given(formats, st.data())
def test_garbage_decodes_within_its_magnitude_or_is_detected(
    fmt: BlockFormat, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 100)))
    garbage = torch.randint(0, 256, (fmt.size,), dtype=torch.uint8, generator=generator)
    payload = memoryview(bytearray(garbage.numpy().tobytes()))

    bounds = magnitudes(fmt, payload)
    numbers = decoded(fmt, payload)

    if all(each <= 1e30 for each in bounds):
        assert bool(numbers.abs().le(max(bounds, default=0.0)).all())


@given(formats, st.integers(1, 6))
def test_sent_updates_and_the_residual_add_up_to_all_updates(
    fmt: BlockFormat, updates: int
) -> None:
    feedback = ErrorFeedback(fmt)
    produced, sent = torch.zeros(fmt.parameters), torch.zeros(fmt.parameters)

    for update in range(updates):
        vector = random(fmt.floats, update)
        before = vector.clone()
        payload = joined(feedback.encode(vector))
        assert torch.equal(vector, before)
        produced += vector[: fmt.parameters]
        sent += decoded(fmt, payload)[: fmt.parameters]

    residual = feedback.residual if not fmt.codec.for_statistics else produced - sent
    torch.testing.assert_close(sent + residual, produced, rtol=1e-5, atol=1e-5)


@given(lossy, st.integers(1, 5), st.sampled_from([1, 700, 1 << 18]))
def test_an_update_is_encoded_with_the_residual(fmt: BlockFormat, updates: int, most: int) -> None:
    feedback = ErrorFeedback(fmt)
    for update in range(updates):
        vector = random(fmt.floats, update)
        whole = vector.clone()
        whole[: fmt.parameters] += feedback.residual
        own = replace(fmt, codec=fmt.codec.for_update(update))

        payload = joined(feedback.encode(vector, most))

        assert payload == joined(EncodedBlocks(own, whole))


def test_topk_sends_the_largest_of_each_block_first() -> None:
    # Given 70,000 numbers: the largest at the end of each block, small ones elsewhere
    vector = torch.full((70_000,), 2.0**-10)
    vector[65_536 - 1024 : 65_536] = -8.0
    vector[70_000 - 1024 :] = 4.0
    fmt = BlockFormat(TopK(), 70_000, 70_000)
    feedback = ErrorFeedback(fmt)

    first = decoded(fmt, joined(feedback.encode(vector)))

    assert fmt.size == 2 * 4096
    assert torch.equal(first, torch.where(vector.abs() > 1, vector, 0))
    rest = feedback.residual.clone()
    second = decoded(fmt, joined(feedback.encode(torch.zeros(70_000))))
    assert torch.equal(rest, torch.where(vector.abs() > 1, 0, vector))
    assert torch.equal(second + feedback.residual, rest)
    assert int(second.count_nonzero()) == 2 * 1024


def test_a_lossless_codec_has_no_residual() -> None:
    vector = random(5)

    feedback = ErrorFeedback(BlockFormat(Float32(), 5, 3))

    assert bytes(joined(feedback.encode(vector))) == vector.numpy().tobytes()
    assert not feedback.has_residual


@given(lossy, st.integers(0, 6))
def test_the_last_update_carries_the_whole_residual(fmt: BlockFormat, updates: int) -> None:
    feedback, whole = ErrorFeedback(fmt), replace(fmt, codec=Float32())
    produced, sent = torch.zeros(fmt.floats), torch.zeros(fmt.floats)

    for update in range(updates + 1):
        vector = random(fmt.floats, update)
        last = update == updates
        encoding = feedback.whole(vector) if last else feedback.encode(vector)
        assert encoding.codec == ("float32" if last else fmt.codec.name)
        produced += vector
        sent += decoded(whole if last else fmt, joined(encoding))

    assert not feedback.has_residual
    torch.testing.assert_close(
        sent[: fmt.parameters], produced[: fmt.parameters], rtol=1e-5, atol=1e-5
    )


def test_partitions_take_turns() -> None:
    # Given two blocks of three parts of distinct numbers
    fmt = BlockFormat(Partition(3), 3060, 3060)
    vector = torch.arange(1.0, 3061.0).bfloat16().float()
    feedback = ErrorFeedback(fmt)

    # When the same update is sent four times
    updates = [decoded(fmt, joined(feedback.encode(vector))) for _ in range(4)]

    # Then the parts take turns, each with the sum of its numbers so far
    assert fmt.size == 2 * 1024
    for turn, (times, update) in enumerate(zip((1, 2, 3, 3), updates, strict=True)):
        part = torch.arange(3060) // 510 % 3 == turn % 3
        assert torch.equal(update, torch.where(part, times * vector, 0).bfloat16().float())


def test_an_invalid_part_number_is_rejected() -> None:
    fmt = BlockFormat(Partition(3), 10, 10)
    payload = memoryview(bytearray(joined(ErrorFeedback(fmt).encode(torch.ones(10)))))

    assert fmt.max_magnitude(payload, 0) == 1.0
    payload[0] = 3
    assert math.isnan(fmt.max_magnitude(payload, 0))
