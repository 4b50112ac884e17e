"""Subtasks of an epoch's seeded order, and the applied record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from vcasgd.errors import CheckpointDamaged, InvalidUpdate, SpecError
from vcasgd.learning import permutation, subtasks
from vcasgd.learning.applied_record import AppliedRecord
from vcasgd.learning.subtasks import EpochPlan, SampleBlocks
from vcasgd.store.tensors.snapshot import Record

PLAN = EpochPlan(samples=10, subtasks_per_epoch=3, epochs=2, seed=0)


@st.composite
def plans(draw: st.DrawFn) -> EpochPlan:
    """Plans that end with an epoch, or within one."""
    samples, epochs = draw(st.integers(1, 60)), draw(st.integers(1, 3))
    return EpochPlan(
        samples=samples,
        subtasks_per_epoch=draw(st.integers(1, min(samples, 8))),
        epochs=epochs,
        seed=draw(st.integers(0, 2**32 - 1)),
        total_samples=(epochs - 1) * samples + draw(st.integers(1, samples)),
        batch_size=draw(st.integers(1, 8)),
    )


class TestEpochPlan:
    @pytest.mark.parametrize(
        ("batch_size", "bounds"),
        [
            (1, [(0, 3), (3, 6), (6, 10)]),
            (4, [(0, 4), (4, 10)]),
            (4, [(0, 4), (4, 8), (8, 10)]),
            (4, [(0, 2), (2, 5), (5, 7), (7, 10)]),
        ],
        ids=["single samples", "an odd batch", "a batch each", "more subtasks than batches"],
    )
    def test_subtasks_have_whole_batches(
        self, batch_size: int, bounds: list[tuple[int, int]]
    ) -> None:
        plan = EpochPlan(10, len(bounds), 2, seed=0, batch_size=batch_size)

        assert [plan.bounds(each) for each in range(plan.total_subtasks)] == bounds * 2

    @given(plans())
    def test_every_epoch_contains_every_sample_exactly_once(self, plan: EpochPlan) -> None:
        total = 0
        for epoch in range(plan.epochs):
            first = epoch * plan.subtasks_per_epoch
            parts = [
                plan.indices(subtask, 0, plan.size(subtask))
                for subtask in range(first, first + plan.subtasks_in(epoch))
            ]
            together, sizes = np.concatenate(parts), [len(part) for part in parts]
            assert len(set(together)) == len(together)
            assert set(together) <= set(range(plan.samples))
            assert min(sizes) >= 1
            if epoch < plan.epochs - 1:
                assert len(together) == plan.samples
                in_batches = len(parts) <= -(-plan.samples // plan.batch_size)
                unit = plan.batch_size if in_batches else 1
                batches = [-(-size // unit) for size in sizes]
                assert max(batches) - min(batches) <= 1
                assert not any(size % unit for size in sizes[:-1])
            total += len(together)
        assert total == plan.total_samples
        assert first + len(parts) == plan.total_subtasks

    @given(plans())
    def test_the_last_epoch_is_a_prefix_of_a_whole_one(self, plan: EpochPlan) -> None:
        whole = replace(plan, total_samples=0)
        for subtask in range(plan.total_subtasks):
            expected = whole.indices(subtask, 0, plan.size(subtask))
            assert np.array_equal(plan.indices(subtask, 0, plan.size(subtask)), expected)
            is_last = subtask == plan.total_subtasks - 1
            assert is_last or plan.size(subtask) == whole.size(subtask)

    @pytest.mark.parametrize(
        ("total", "subtasks", "last"),
        [
            (11, 4, (0, 1)),
            (13, 4, (0, 3)),
            (14, 5, (3, 4)),
            (16, 5, (3, 6)),
            (17, 6, (6, 7)),
            (20, 6, (6, 10)),
        ],
    )
    def test_a_job_can_end_within_its_last_epoch(
        self, total: int, subtasks: int, last: tuple[int, int]
    ) -> None:
        plan = EpochPlan(10, 3, 2, seed=0, total_samples=total)

        assert plan.total_subtasks == subtasks
        assert plan.bounds(subtasks - 1) == last
        assert plan.progress(subtasks - 1, plan.size(subtasks - 1)) == 1.0
        assert plan.progress(3, 0) == 10 / total
        with pytest.raises(InvalidUpdate):
            plan.bounds(subtasks)

    @pytest.mark.parametrize("total", [-1, 10, 21])
    def test_a_total_outside_the_last_epoch_names_the_field(self, total: int) -> None:
        with pytest.raises(SpecError, match="don't end in epoch 2") as caught:
            EpochPlan(10, 3, 2, seed=0, total_samples=total)
        assert caught.value.field == "max_samples"

    @given(plans(), st.data())
    def test_every_machine_computes_the_same_order(
        self, plan: EpochPlan, data: st.DataObject
    ) -> None:
        subtask = data.draw(st.integers(0, plan.total_subtasks - 1))
        stop = data.draw(st.integers(0, plan.size(subtask)))
        start = data.draw(st.integers(0, stop))
        whole = plan.indices(subtask, 0, plan.size(subtask))

        permutation.shuffled.cache_clear()  # like another machine
        permutation._chunk.cache_clear()
        subtasks._windows.cache_clear()
        twin = replace(plan)

        assert np.array_equal(twin.indices(subtask, start, stop), whole[start:stop])
        assert twin.order_digest() == plan.order_digest()

    def test_progress_covers_the_whole_job(self) -> None:
        # the subtasks of an epoch start at 0, 3, and 6
        assert [PLAN.progress(subtask, 0) for subtask in range(6)] == [
            0.0, 0.15, 0.3, 0.5, 0.65, 0.8,
        ]  # fmt: skip
        assert PLAN.progress(4, 2) == 0.75
        assert PLAN.progress(5, 4) == 1.0

    def test_the_order_is_the_same_in_all_releases(self) -> None:
        assert PLAN.indices(0, 0, 3).tolist() == [6, 1, 0]
        assert PLAN.order_digest().startswith("0fda3a4e2b3e")

    def test_epochs_and_seeds_have_different_orders(self) -> None:
        plan, other = (EpochPlan(1000, 1, 2, seed=seed) for seed in (0, 1))
        order = plan.indices(0, 0, 1000)

        assert not np.array_equal(order, plan.indices(1, 0, 1000))
        assert plan.order_digest() != other.order_digest()
        with pytest.raises(ValueError, match="read-only"):
            order[0] = 5

    @pytest.mark.parametrize(
        ("numbers", "field", "message"),
        [
            ((0, 1, 1, 0), "task", "the training data set is empty"),
            ((2, 3, 1, 0), "subtasks_per_epoch", "set subtasks_per_epoch to at most 2"),
            ((2, 0, 1, 0), "subtasks_per_epoch", "at least 1"),
            ((2, 1, 0, 0), "epochs", "at least 1"),
            ((2, 1, 1, -1), "seed", "at least 0"),
        ],
    )
    def test_an_invalid_plan_names_the_field(
        self, numbers: tuple[int, int, int, int], field: str, message: str
    ) -> None:
        with pytest.raises(SpecError, match=message) as caught:
            EpochPlan(*numbers)
        assert caught.value.field == field

    @pytest.mark.parametrize(
        ("call", "numbers"),
        [
            *((call, (subtask,)) for subtask in (-1, 6) for call in (PLAN.bounds, PLAN.size)),
            *((AppliedRecord(PLAN).position, (subtask,)) for subtask in (-1, 6)),
            *((PLAN.indices, (0, *samples)) for samples in ((-1, 2), (0, 4), (3, 2))),
        ],
    )
    def test_what_is_unknown_is_out_of_range(self, call: Any, numbers: tuple[int, ...]) -> None:
        with pytest.raises(InvalidUpdate) as caught:
            call(*numbers)
        assert caught.value.reason == "range"


def content(record: AppliedRecord) -> tuple[int, dict[int, int], dict[int, bytes]]:
    return record.finished_epochs, record.positions, record.done.blocks


class TestAppliedRecord:
    @pytest.mark.parametrize(
        ("subtask", "start", "stop", "reason"),
        [
            (0, 0, 2, "duplicate"),
            (0, 1, 3, "duplicate"),
            (0, 0, 3, "duplicate"),
            (1, 1, 2, "out-of-place"),
            (0, 2, 4, "range"),
            (0, 2, 2, "range"),
            (1, -1, 2, "range"),
            (6, 0, 1, "range"),
        ],
    )
    def test_samples_out_of_place_are_rejected(
        self, subtask: int, start: int, stop: int, reason: str
    ) -> None:
        record = AppliedRecord(PLAN, positions={0: 2})

        with pytest.raises(InvalidUpdate) as caught:
            record.advance(subtask, start, stop)

        assert caught.value.reason == reason
        assert content(record) == (0, {0: 2}, {})
        with pytest.raises(InvalidUpdate):
            record.check(subtask, start, stop)

    def test_a_push_of_a_finished_epoch_is_a_duplicate(self) -> None:
        with pytest.raises(InvalidUpdate) as caught:
            AppliedRecord(PLAN, finished_epochs=1).advance(0, 0, 3)
        assert caught.value.reason == "duplicate"

    def test_positions_of_done_subtasks_and_finished_epochs_are_folded(self) -> None:
        """Records of version 0.1.0 have them."""
        record = AppliedRecord(PLAN, 1, {0: 3, 1: 1, 3: 3, 4: 1})

        assert (list(record.done), record.positions) == ([3], {4: 1})
        assert record.samples_applied == 10 + 4

    @pytest.mark.parametrize(
        ("finished", "positions", "done"),
        [
            (-1, {}, {}),
            (3, {}, {}),
            (0, {6: 1}, {}),
            (0, {0: 4}, {}),
            (0, {0: -1}, {}),
            (0, {}, {0: b"\x40"}),
            (0, {}, {1: b"\x01"}),
            (0, {}, {10**18: b""}),
            (0, {}, {0: bytes(513)}),
        ],
    )
    def test_a_damaged_record_is_an_error(
        self, finished: int, positions: dict[int, int], done: dict[int, bytes]
    ) -> None:
        with pytest.raises(CheckpointDamaged):
            AppliedRecord(PLAN, finished, positions, done)

    @given(plans(), st.data())
    def test_against_a_set_of_samples(self, plan: EpochPlan, data: st.DataObject) -> None:
        record = AppliedRecord(plan)
        applied: set[tuple[int, int]] = set()
        for _ in range(data.draw(st.integers(0, 40))):
            subtask = data.draw(st.integers(0, plan.total_subtasks - 1))
            size = plan.size(subtask)
            # mostly the rest of the subtask, so that epochs finish
            start = data.draw(st.one_of(st.just(record.position(subtask)), st.integers(0, size)))
            stop = data.draw(st.one_of(st.just(size), st.integers(0, size)))
            samples = {(subtask, sample) for sample in range(start, stop)}
            follows = start == record.position(subtask) and start < stop
            if follows:
                assert not samples & applied
                finished = record.finished_epochs
                ends_epoch = record.advance(subtask, start, stop)
                assert ends_epoch == (record.finished_epochs > finished)
                applied |= samples
            else:
                with pytest.raises(InvalidUpdate):
                    record.advance(subtask, start, stop)
            check_against(record, applied)


def check_against(record: AppliedRecord, applied: set[tuple[int, int]]) -> None:
    plan = record.plan
    counts = [sum(1 for owner, _ in applied if owner == s) for s in range(plan.total_subtasks)]
    done = [count == plan.size(subtask) for subtask, count in enumerate(counts)]
    epochs = [
        done[k : k + plan.subtasks_per_epoch] for k in range(0, len(done), plan.subtasks_per_epoch)
    ]
    finished = next((k for k, epoch in enumerate(epochs) if not all(epoch)), plan.epochs)
    open_from = finished * plan.subtasks_per_epoch

    assert [record.position(subtask) for subtask in range(plan.total_subtasks)] == counts
    assert record.samples_applied == len(applied)
    assert record.complete == all(done)
    assert record.finished_epochs == finished
    assert record.positions == {s: n for s, n in enumerate(counts) if n and not done[s]}
    assert list(record.done) == [s for s, whole in enumerate(done) if whole and s >= open_from]
    stored = Record(finished, record.positions, record.done.blocks)
    text = RECORDS.dump_json(stored)
    assert content(RECORDS.validate_json(text).applied(plan)) == content(record)


# --- blocks ------------------------------------------------------------------------------

RECORDS = TypeAdapter(Record)
BLOCKS = SampleBlocks((30, 10, 0, 25, 35), window=2)


def test_an_order_in_blocks_contains_every_sample_once_and_differs_by_epoch() -> None:
    plan = EpochPlan(100, 4, 2, seed=3, blocks=BLOCKS)
    epochs = [
        np.concatenate([plan.indices(number, 0, 25) for number in range(first, first + 4)])
        for first in (0, 4)
    ]

    assert all(sorted(epoch.tolist()) == list(range(100)) for epoch in epochs)
    assert epochs[0].tolist() != epochs[1].tolist()
    assert plan.order_digest() != EpochPlan(100, 4, 2, seed=3).order_digest()


def test_an_order_in_blocks_is_the_same_on_every_machine() -> None:
    # other numbers would mix two orders in a job that spans two releases
    plan = EpochPlan(8, 1, 1, seed=7, blocks=SampleBlocks((2, 2, 2, 2), window=2))

    assert plan.indices(0, 0, 8).tolist() == [0, 2, 1, 3, 5, 7, 6, 4]


def test_a_subtask_reads_few_blocks() -> None:
    blocks = SampleBlocks((10,) * 100, window=4)
    plan = EpochPlan(1000, 20, 1, seed=1, blocks=blocks)

    touched = [len({int(i) // 10 for i in plan.indices(n, 0, 50)}) for n in range(20)]

    # 50 samples are in two or three windows of four blocks
    assert max(touched) <= 12
    plain = EpochPlan(1000, 20, 1, seed=1)
    assert min(len({int(i) // 10 for i in plain.indices(n, 0, 50)}) for n in range(20)) > 30


def test_blocks_that_do_not_match_the_data_set_are_an_error() -> None:
    with pytest.raises(SpecError, match="has 99 samples, but its blocks have 100"):
        EpochPlan(99, 4, 2, seed=3, blocks=BLOCKS)
    with pytest.raises(SpecError, match="a window of at least 1"):
        SampleBlocks((1,), window=0)
