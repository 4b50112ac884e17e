"""Updates as they are on the wire: int8 blocks, statistics kept exact, error feedback."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vcasgd.errors import InvalidUpdate
from vcasgd.learning.codecs import Int8, Partition, TopK, make_codec
from vcasgd.learning.encoding import Encoding, Feedback, Format


def formats_of(*names: str) -> st.SearchStrategy[Format]:
    """Of codec, elements, parameters."""
    return st.builds(
        lambda name, floats, share: Format(make_codec(name), floats, int(share * floats)),
        st.sampled_from(names),
        st.integers(0, 3000),
        st.floats(0, 1),
    )


dense = formats_of("float32", "bfloat16", "int8")
formats = formats_of("float32", "bfloat16", "int8", "topk", "partition")


def encoded(wire: Format, vector: Tensor, chunk: int = 4096) -> memoryview:
    return joined(Encoding(wire, vector), chunk)


def joined(encoding: Encoding, chunk: int = 4096) -> memoryview:
    chunks = [bytes(each) for each in encoding.chunks(chunk)]
    assert all(len(each) == chunk for each in chunks[:-1])
    return memoryview(bytearray(b"".join(chunks)))


def decoded(wire: Format, payload: memoryview, most: int = 600) -> Tensor:
    out, scratch = torch.full((wire.floats,), math.nan), wire.scratch(most)
    for piece in wire.pieces(most):
        out[piece.start : piece.stop] = piece.decoded(payload, scratch)
    return out


def largest(wire: Format, payload: memoryview, chunk: int = 4096) -> list[float]:
    starts = range(0, len(payload), chunk)
    return [wire.largest(payload[at : at + chunk], at) for at in starts]


def random(floats: int, seed: int = 0) -> Tensor:
    return torch.randn(floats, generator=torch.Generator().manual_seed(seed))


def test_a_block_of_int8_by_hand() -> None:
    payload = bytes(Int8().encode(torch.tensor([254.0, -127.0, 2.9, 0.9])))

    # the scale is 254 / 127 = 2; 2.9 is nearest to 1 · 2, 0.9 to 0
    assert payload == struct.pack("<f4b", 2.0, 127, -64, 1, 0) + bytes(248)


@settings(deadline=None)
@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), max_size=600))
def test_int8_is_within_half_a_step_of_its_block(values: list[float]) -> None:
    vector = torch.tensor(values)
    wire = Format(Int8(), len(values), len(values))

    result = decoded(wire, encoded(wire, vector))

    for start in range(0, len(values), Int8.block_floats):
        block = vector[start : start + Int8.block_floats]
        bound = block.abs().max() / 254 * (1 + 1e-5) + 2e-36  # less than that is nothing
        assert (result[start : start + len(block)] - block).abs().max() <= bound


def test_statistics_are_exact_where_differences_are_rounded() -> None:
    # a small variance behind a large mean, and a large difference
    vector = torch.tensor([100.0, 0.001, 1000.0, 1e-5])
    wire = Format(Int8(), 4, 2)

    result = decoded(wire, encoded(wire, vector))

    assert result.tolist() == [100.0, 0.0, 1000.0, vector[3].item()]
    assert wire.size == 256 + 2 * 4


@settings(deadline=None)
@given(dense, st.integers(0, 5), st.sampled_from([256, 512, 4096]))
def test_size_and_pieces_are_those_of_the_whole(wire: Format, seed: int, chunk: int) -> None:
    vector = random(wire.floats, seed)

    payload = encoded(wire, vector, chunk)

    assert len(payload) == wire.size == len(Encoding(wire, vector))
    assert torch.equal(decoded(wire, payload, 300), decoded(wire, payload, 100_000))
    torch.testing.assert_close(decoded(wire, payload), vector, rtol=0.01, atol=0.02)


@settings(deadline=None)
@given(formats, st.integers(0, 5))
def test_no_number_is_larger_than_was_said(wire: Format, seed: int) -> None:
    payload = encoded(wire, random(wire.floats, seed))

    bound = max(largest(wire, payload), default=0.0)

    assert all(abs(number) <= bound for number in decoded(wire, payload).tolist())
    assert bound < 10


# of a partition only a part is sent
@settings(deadline=None)
@given(
    formats_of("float32", "bfloat16", "int8", "topk"),
    st.data(),
    st.sampled_from([math.nan, math.inf, -math.inf]),
)
def test_what_is_not_finite_is_found_wherever_it_is(
    wire: Format, data: st.DataObject, bad: float
) -> None:
    vector = random(wire.floats)
    if wire.floats == 0:
        return
    vector[data.draw(st.integers(0, wire.floats - 1))] = bad

    assert not all(each <= 1e30 for each in largest(wire, encoded(wire, vector)))


@settings(deadline=None)
@given(formats, st.data())
def test_garbage_is_numbers_or_is_found(wire: Format, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 100)))
    garbage = torch.randint(0, 256, (wire.size,), dtype=torch.uint8, generator=generator)
    payload = memoryview(bytearray(garbage.numpy().tobytes()))

    bounds = largest(wire, payload)
    numbers = decoded(wire, payload)

    if all(each <= 1e30 for each in bounds):
        assert bool(numbers.abs().le(1e30).all())


@pytest.mark.parametrize("length", [1, 255, 257, 512])
def test_int8_that_does_not_fit_is_refused_and_nothing_written(length: int) -> None:
    out = torch.full((300,), 7.0)

    with pytest.raises(InvalidUpdate) as caught:
        Int8().decode(bytes(length), out)

    assert caught.value.reason == "length"
    assert out.eq(7.0).all()


@settings(deadline=None)
@given(formats, st.integers(1, 6))
def test_what_is_sent_and_what_is_kept_is_what_was_produced(wire: Format, updates: int) -> None:
    feedback = Feedback(wire)
    produced, sent = torch.zeros(wire.parameters), torch.zeros(wire.parameters)

    for update in range(updates):
        vector = random(wire.floats, update)
        before = vector.clone()
        payload = joined(feedback.encoding(vector))
        assert torch.equal(vector, before)
        produced += vector[: wire.parameters]
        sent += decoded(wire, payload)[: wire.parameters]

    kept = feedback.kept if not wire.codec.for_statistics else produced - sent
    torch.testing.assert_close(sent + kept, produced, rtol=1e-5, atol=1e-5)


def test_what_is_too_small_for_one_update_comes_with_a_later_one() -> None:
    wire = Format(Int8(), 2, 2)
    feedback, sent = Feedback(wire), torch.zeros(2)

    for _ in range(10):
        sent += decoded(wire, joined(feedback.encoding(torch.tensor([127.0, 0.2]))))

    assert sent.tolist() == [1270.0, 2.0]


def test_the_largest_of_each_block_are_sent_and_all_others_later() -> None:
    # Given 70,000 numbers, the largest at the end of each block, and so small a number elsewhere
    vector = torch.full((70_000,), 2.0**-10)
    vector[65_536 - 1024 : 65_536] = -8.0
    vector[70_000 - 1024 :] = 4.0
    wire = Format(TopK(), 70_000, 70_000)
    feedback = Feedback(wire)

    first = decoded(wire, joined(feedback.encoding(vector)))

    assert wire.size == 2 * 4096
    assert torch.equal(first, torch.where(vector.abs() > 1, vector, 0))
    rest = feedback.kept.clone()
    second = decoded(wire, joined(feedback.encoding(torch.zeros(70_000))))
    assert torch.equal(rest, torch.where(vector.abs() > 1, 0, vector))
    assert torch.equal(second + feedback.kept, rest)
    assert int(second.count_nonzero()) == 2 * 1024


def test_there_is_no_feedback_where_nothing_is_lost() -> None:
    vector = random(5)

    feedback = Feedback(Format(make_codec("float32"), 5, 3))

    assert bytes(joined(feedback.encoding(vector))) == vector.numpy().tobytes()
    assert not feedback.owes


lossy = formats_of("int8", "topk", "partition")


@settings(deadline=None)
@given(lossy, st.integers(0, 6))
def test_with_the_last_update_goes_all_that_was_kept_back(wire: Format, updates: int) -> None:
    feedback, whole = Feedback(wire), replace(wire, codec=make_codec("float32"))
    produced, sent = torch.zeros(wire.floats), torch.zeros(wire.floats)

    for update in range(updates + 1):
        vector = random(wire.floats, update)
        last = update == updates
        encoding = feedback.whole(vector) if last else feedback.encoding(vector)
        assert encoding.codec == ("float32" if last else wire.codec.name)
        produced += vector
        sent += decoded(whole if last else wire, joined(encoding))

    assert not feedback.owes
    torch.testing.assert_close(
        sent[: wire.parameters], produced[: wire.parameters], rtol=1e-5, atol=1e-5
    )


def test_each_part_is_sent_when_it_is_its_turn() -> None:
    # Given two blocks of three parts, each number other than all others
    wire = Format(Partition(3), 3060, 3060)
    vector = torch.arange(1.0, 3061.0).bfloat16().float()
    feedback = Feedback(wire)

    # When the same update is made four times
    updates = [decoded(wire, joined(feedback.encoding(vector))) for _ in range(4)]

    # Then each part comes with all that its numbers have become meanwhile, one after the other
    assert wire.size == 2 * 1024
    for turn, (times, update) in enumerate(zip((1, 2, 3, 3), updates, strict=True)):
        part = torch.arange(3060) // 510 % 3 == turn % 3
        assert torch.equal(update, torch.where(part, times * vector, 0).bfloat16().float())


def test_a_part_that_there_is_none_of_is_refused() -> None:
    wire = Format(Partition(3), 10, 10)
    payload = memoryview(bytearray(joined(Feedback(wire).encoding(torch.ones(10)))))

    assert wire.largest(payload, 0) == 1.0
    payload[0] = 3
    assert math.isnan(wire.largest(payload, 0))
