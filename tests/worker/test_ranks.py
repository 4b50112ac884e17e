"""A worker with several processes trains as one, and survives the loss of any of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import TASKS
from support.waiting import PATIENCE
from support.work import memory_of
from torch import Tensor

from vcasgd.errors import RankLost, SpecError, UserCodeError
from vcasgd.learning.shards import ShardRange
from vcasgd.learning.vector import Floats, MappedVector
from vcasgd.session.script import LoopInThread, load
from vcasgd.spec.job import JobSpec
from vcasgd.worker.gpus import OwnGpu
from vcasgd.worker.interval import Base, Trained
from vcasgd.worker.learner import Learner
from vcasgd.worker.ranked_learner import LeadingLearner
from vcasgd.worker.ranks import Ranks


@contextmanager
def learner_of(
    ranks: int, task: str = "ranked:Ranked", timeout: float = PATIENCE, **args: Any
) -> Iterator[Learner]:
    """Yield a learner with so many processes, whose optimizer lasts for the job."""
    fields = {"name": "job", "task": task, "epochs": 4, "subtasks_per_epoch": 2}
    spec = JobSpec.parse({**fields, "workers": {"gpus": 2}})
    loaded = load(task, args, TASKS)
    if ranks == 1:
        learner = Learner(spec, loaded, "cpu")
    else:
        given = spec.model_copy(update={"args": args})
        processes = Ranks(ranks, given, TASKS, OwnGpu(), timeout, first_timeout=timeout)
        learner = LeadingLearner(spec, loaded, "cpu", processes)
    learner.check_against(learner.facts(1))
    learner.rehearse(lambda: None)
    learner.start_subtask()
    try:
        yield learner
    finally:
        learner.close()
        if isinstance(loaded, LoopInThread):
            loaded.close()


def interval(learner: Learner, base: Base, subtask: int) -> Trained:
    assert learner.member is not None
    learner.member.assign(12)
    trained = learner.train(
        *(base, subtask, 0, learner.plan.size(subtask)),
        memory=lambda: in_memory_of(learner, torch.empty(len(base.floats))),
    )
    return replace(trained, update=trained.update[:])


def in_memory_of(learner: Learner, vector: Tensor) -> Floats:
    """Return a copy of a vector in memory as the exchange lends it."""
    copy = MappedVector(len(vector)) if learner.maps_vectors else torch.empty(len(vector))
    copy[:].copy_(vector)
    return copy


def trained_by(learner: Learner, intervals: int = 3) -> list[Trained]:
    floats, integers = learner.initial()
    done = []
    for subtask in range(intervals):
        done.append(interval(learner, Base(floats, integers), subtask))
        floats = in_memory_of(learner, floats[:] + done[-1].update)
    return done


WHOLE, PARTS = "ranked:Ranked", "sharded:Sharded"


@pytest.mark.parametrize(
    ("task", "ranks", "args"),
    [
        pytest.param(WHOLE, 2, {"optimizer": "adamw"}, marks=pytest.mark.ci),
        (PARTS, 2, {"optimizer": "adamw", "parts": 4}),
        *(
            pytest.param(*each, marks=pytest.mark.extended)
            for each in [
                (WHOLE, 2, {"optimizer": "sgd"}),
                (WHOLE, 2, {"convolves": True}),
                (WHOLE, 4, {"optimizer": "adamw"}),
                (PARTS, 4, {"optimizer": "sgd"}),
                (PARTS, 4, {"optimizer": "adamw"}),
            ]
        ),
    ],
)
def test_ranks_train_what_one_process_trains(task: str, ranks: int, args: dict[str, Any]) -> None:
    with learner_of(1, task, **args) as one, learner_of(ranks, task, **args) as many:
        for alone, together in zip(trained_by(one), trained_by(many), strict=True):
            assert (together.stop, together.steps) == (alone.stop, alone.steps)
            assert together.loss_sum == pytest.approx(alone.loss_sum, rel=1e-5)
            assert "parts" in args or torch.equal(together.integers, alone.integers)
            torch.testing.assert_close(together.update, alone.update, rtol=1e-4, atol=1e-5)
        # Training after an evaluation needs its parts back.
        alone, together = (evaluated(each, alone.update) for each in (one, many))
        assert together == pytest.approx(alone, rel=1e-5)
        alone, together = (trained_by(each, 1)[0] for each in (one, many))
        torch.testing.assert_close(together.update, alone.update, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.extended)])
@pytest.mark.ci
def test_ranks_measure_statistics_of_the_whole_batch(ranks: int) -> None:
    with (
        learner_of(1, WHOLE, norm="BatchNorm1d") as one,
        learner_of(ranks, WHOLE, norm="SyncBatchNorm") as many,
    ):
        for alone, together in zip(trained_by(one), trained_by(many), strict=True):
            assert together.loss_sum == pytest.approx(alone.loss_sum, rel=1e-5)
            assert torch.equal(together.integers, alone.integers)
            torch.testing.assert_close(together.update, alone.update, rtol=1e-4, atol=1e-5)


@pytest.mark.ci
def test_a_model_with_batch_norm_trains_in_parts_with_16_bits() -> None:
    args = {"parallel": "fsdp", "precision": "bf16", "norm": "SyncBatchNorm"}
    with learner_of(2, WHOLE, **args) as learner:
        trained = interval(learner, Base(*learner.initial()), 0)
        assert trained.update.isfinite().all()


@pytest.mark.ci
def test_a_rank_never_has_all_parameters_in_16_bits(tmp_path: Path) -> None:
    with learner_of(
        2, "sharded:Wide", folder=str(tmp_path), precision="bf16", layers=16
    ) as learner:
        base = Base(*learner.initial())

        def train(subtask: int) -> None:
            learner.train(
                *(base, subtask, 0, learner.plan.size(subtask)),
                memory=lambda: MappedVector(len(base.floats)),
            )

        train(0)
        # They would be half a vector, of four bytes for each number.
        assert memory_of(lambda: train(1)) < len(base.floats)


def evaluated(learner: Learner, floats: Tensor) -> dict[str, float]:
    _, integers = learner.initial()
    return learner.evaluate(floats, integers)


@pytest.mark.parametrize("task", [pytest.param(WHOLE, marks=pytest.mark.extended), PARTS])
@pytest.mark.ci
def test_a_part_of_the_vector_moves_in_all_ranks(task: str) -> None:
    """A copy of its own moves by parts, which begin and end within tensors."""
    with learner_of(2, task) as learner:
        floats, integers = learner.initial()
        interval(learner, Base(floats, integers), 0)
        parts = learner.cut(3).parts
        before = read(learner, parts)
        middle = torch.arange(parts[1].floats) / 64
        learner.shift([(parts[1], in_memory_of(learner, middle))])
        before[parts[1].start : parts[1].stop] += middle
        torch.testing.assert_close(read(learner, parts), before)
        interval(learner, replace(Base(floats, integers), continues=True), 1)


def read(learner: Learner, parts: Sequence[ShardRange]) -> Tensor:
    pieces = [in_memory_of(learner, torch.empty(part.floats)) for part in parts]
    for part, piece in zip(parts, pieces, strict=True):
        learner.read_part(part, piece)
    return torch.cat([piece[:] for piece in pieces])


@pytest.mark.parametrize(
    ("task", "args", "problem"),
    [
        (PARTS, {"optimizer": "adagrad"}, "Adagrad: it may need whole tensors"),
        (PARTS, {"parallel": "tp"}, "parallel is 'tp'"),
        (WHOLE, {"fault": "sums"}, "its loss is a sum over samples"),
    ],
)
def test_what_cannot_be_shared_is_refused(task: str, args: dict[str, str], problem: str) -> None:
    with pytest.raises(SpecError, match=problem), learner_of(2, task, **args):
        pass


@pytest.mark.extended
@pytest.mark.parametrize("own_steps", [False, True], ids=["session", "loop"])
def test_scripts_train_as_in_one_process(own_steps: bool) -> None:
    args = {"own_steps": own_steps}
    with (
        learner_of(1, "ranked_loop.py", **args) as one,
        learner_of(2, "ranked_loop.py", **args) as many,
    ):
        for alone, together in zip(trained_by(one), trained_by(many), strict=True):
            assert together.loss_sum == pytest.approx(alone.loss_sum, rel=1e-5)
            torch.testing.assert_close(together.update, alone.update, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("task", "fault"),
    [
        (WHOLE, "killed"),
        pytest.param(WHOLE, "leaves", marks=pytest.mark.ci),
        *(
            pytest.param(*each, marks=pytest.mark.extended)
            for each in [(WHOLE, "hangs"), (PARTS, "killed"), (PARTS, "hangs")]
        ),
    ],
)
def test_a_lost_rank_costs_the_interval_only(task: str, fault: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    marker.touch()
    args = {"fault": fault, "marker": str(marker)}
    with learner_of(2, task, timeout=PATIENCE if fault == "killed" else 15, **args) as learner:
        floats, integers = learner.initial()
        with pytest.raises(RankLost, match="signal 9" if fault == "killed" else "in time"):
            interval(learner, Base(floats, integers), 0)

        trained = interval(learner, Base(floats, integers), 0)

    assert not marker.exists()
    assert trained.stop == learner.plan.size(0)


@pytest.mark.extended
@pytest.mark.parametrize("task", [WHOLE, PARTS])
def test_an_error_of_a_rank_is_that_of_the_worker(task: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    marker.touch()
    with learner_of(2, task, fault="raises", marker=str(marker)) as learner:
        floats, integers = learner.initial()
        with pytest.raises(UserCodeError, match="this rank has a fault"):
            interval(learner, Base(floats, integers), 0)
